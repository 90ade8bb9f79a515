"""`full_state_dict`, `load_pretrained` and `save_pretrained`."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hyper_parallel import checkpoint
from hyper_parallel.checkpoint.ranks import all_ranks, together
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.integrations.huggingface.renamed import arrangement
from hyper_parallel.integrations.torch.state_dict_values import StateDictOptions
from hyper_parallel.integrations.torch.state_dicts import get_model_state_dict
from hyper_parallel.platform import get_platform

__all__ = ["full_state_dict", "load_pretrained", "save_pretrained"]


def full_state_dict(model: Any) -> dict[str, Any]:
    """Return the state dict of a parallelised model with full plain tensors, for ``save_pretrained``.

    All ranks of the mesh must call it, and each gets the full state dict: ``model.save_pretrained(path,
    state_dict=weights)``. Without ``state_dict``, ``save_pretrained`` raises an error on the rank that writes.

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
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def load_pretrained(
    model: Any,
    path: str | os.PathLike[str],
    *,
    rename: Callable[[str], str | None] | None = None,
    strict: bool = True,
    convert_dtypes: bool = False,
    verify: bool | None = None,
    mesh: DeviceMesh | None = None,
) -> None:
    """Load weights with `hyper_parallel.checkpoint.load_pretrained` into a model of transformers. Such models also have
    buffers that no file stores, such as frequencies of rotary embeddings. If these are on meta, the model recomputes
    them.

    Names in the files are translated as ``from_pretrained`` does, by transformers' own table. Matrices of experts that
    are separate tensors in the files are read into one parameter of the model. Each rank reads its shard of each
    tensor.

    Args:
        model: a ``transformers.PreTrainedModel``, parallelised or not, whose parameters may be on meta.
        path: a safetensors file, or a directory with ``model.safetensors`` or ``model.safetensors.index.json``.
        rename: function from names in the files to names in the model, in place of transformers' table. If it returns
            None, the tensor is skipped.
        strict: whether the files must have every parameter and persistent buffer of the model, and no other tensor.
        convert_dtypes: whether to convert tensors of another dtype than the model's.
        verify: whether to compare data with checksums, as in `hyper_parallel.checkpoint.load_pretrained`.
        mesh: mesh of the ranks that load; None stands for all ranks of the world.

    Raises:
        ValueError, CheckpointError: as `hyper_parallel.checkpoint.load_pretrained` raises, on all ranks.

    Example:
        >>> import tempfile, torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from hyper_parallel import init_device_mesh
        >>> from hyper_parallel.integrations.huggingface import load_pretrained, parallelize_model
        >>> config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        ...                      num_attention_heads=4)
        >>> directory = tempfile.mkdtemp()
        >>> LlamaForCausalLM(config).save_pretrained(directory)
        >>> with torch.device("meta"):
        ...     model = LlamaForCausalLM(config)
        >>> model = parallelize_model(model, init_device_mesh("cpu", (1,)))
        >>> load_pretrained(model, directory)
        >>> model.generate(torch.tensor([[1, 2]]), max_new_tokens=2, do_sample=False, pad_token_id=0).shape
        torch.Size([1, 4])
    """
    checkpoint.load_pretrained(
        model,
        path,
        rename=rename,
        strict=strict,
        convert_dtypes=convert_dtypes,
        verify=verify,
        mesh=mesh,
        arrange=arrangement(model) if rename is None else None,
    )
    platform = get_platform()
    for _, x in platform.saved_tensors(model):
        x._is_hf_initialized = True  # the model's initialisation skips these tensors
    for _, module in platform.named_modules(model):
        empty = [x for _, x in platform.named_buffers(module) if platform.is_meta(x)]
        for x in empty:
            platform.give_memory(x)
        if empty:
            model._init_weights(module)


def save_pretrained(
    model: Any,
    directory: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "50GB",
    checksums: bool = True,
    mesh: DeviceMesh | None = None,
) -> Path:
    """Write weights and configuration of a model for ``from_pretrained``. All ranks of the world, or of ``mesh``, call
    it. Each writes its local shards, and nothing is gathered.

    Args:
        model: a ``transformers.PreTrainedModel``, parallelised or not.
        directory: directory on a file system that all ranks share; it is created. Existing weights are replaced.
        max_shard_size: maximum size of a file, in bytes, or as ``"5GB"``.
        checksums: whether the headers store checksums of the data.
        mesh: mesh of the ranks that save; None stands for all ranks of the world.

    Returns:
        ``directory``.

    Raises:
        ValueError, CheckpointError: as `hyper_parallel.checkpoint.save_pretrained` raises, on all ranks.

    Example:
        >>> import tempfile
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from hyper_parallel import init_device_mesh
        >>> from hyper_parallel.integrations.huggingface import parallelize_model, save_pretrained
        >>> config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        ...                      num_attention_heads=4)
        >>> model = parallelize_model(LlamaForCausalLM(config), init_device_mesh("cpu", (1,)))
        >>> LlamaForCausalLM.from_pretrained(save_pretrained(model, tempfile.mkdtemp())).config.hidden_size
        32
    """
    path = checkpoint.save_pretrained(model, directory, max_shard_size=max_shard_size, checksums=checksums, mesh=mesh)
    ranks = all_ranks(get_platform(), mesh)

    def write_configuration() -> None:
        if ranks.rank == ranks.members[0]:
            config = copy.deepcopy(model.config)
            config.architectures = [type(model).__name__]
            config.save_pretrained(path)
            if getattr(model, "generation_config", None) is not None and model.can_generate():
                model.generation_config.save_pretrained(path)

    together(ranks, f"saving {path}", write_configuration)
    return path
