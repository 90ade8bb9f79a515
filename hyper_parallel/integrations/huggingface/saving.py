"""`full_state_dict`."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.dtensor.tensor import DTensor

__all__ = ["full_state_dict"]


def full_state_dict(model: Any) -> dict[str, Any]:
    """The state dict of a parallelised model with whole plain tensors, for ``save_pretrained``.

    All ranks of the mesh must call it, and each gets all of it: ``model.save_pretrained(path, state_dict=weights)``.
    Without ``state_dict``, ``save_pretrained`` is an error on the rank that writes.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from hyper_parallel import init_device_mesh
        >>> from hyper_parallel.integrations.huggingface import full_state_dict, parallelize_model
        >>> config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        ...                      num_attention_heads=4)
        >>> model = parallelize_model(LlamaForCausalLM(config), init_device_mesh("cpu", (1,)))
        >>> weights = full_state_dict(model)
        >>> tuple(weights["lm_head.weight"].shape)
        (64, 32)
    """
    whole: dict[int, Any] = {}  # what is tied is gathered once and stays one tensor: savers look for that
    state: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) not in whole:
            whole[id(value)] = (value.full_tensor() if isinstance(value, DTensor) else value).detach()
        state[name] = whole[id(value)]
    return state
