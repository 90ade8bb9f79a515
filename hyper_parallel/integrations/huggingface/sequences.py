"""Models with sharded sequences: each rank gets a shard, and attention reads the full sequence."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from hyper_parallel.core.dtensor.plain_attention import Earlier, PartsOfModule
from hyper_parallel.core.dtensor.undistributed import broadcast_tensors, held_tensors
from hyper_parallel.core.layouts.chunking import chunk_sizes
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.tensor_parallel.program.planned_parameters import module_label, name_module
from hyper_parallel.core.weak_table import WeakTable
from hyper_parallel.integrations.huggingface.cut_calls import checked_call
from hyper_parallel.integrations.huggingface.prefill import prefilled

__all__ = ["check_cut", "cut_sequences", "meshes_of"]

#: The name under which this attention is registered in transformers.
NAME = "hyper_parallel_sequences"
#: Layer types whose attention is supported here.
_KINDS = ("full_attention", "sliding_attention")
#: Scalings of rotary embeddings that depend on the largest position, which differs between ranks.
_BY_LENGTH = ("dynamic", "longrope")
#: Further arguments of some models' attention, which are refused.
_FURTHER = ("softcap", "position_bias")
#: Arguments from which models compute their loss.
_LABELS = ("labels", "start_positions", "end_positions")
#: Layers that mix positions without attention.
_MIXING = ("Conv1d", "Conv2d", "RNN", "LSTM", "GRU")
#: Parts of the names of models that compute on one position of each sequence.
_POOLING = (
    *("ForSequenceClassification", "ForMultipleChoice", "ForNextSentencePrediction", "ForImageClassification"),
    *("ForAudioClassification", "DoubleHeadsModel"),
)


class _Cut(NamedTuple):
    """Sharding of the sequences of attention modules.

    Attributes:
        mesh: mesh that shards the sequences.
        balance: as for `ContextParallel`.
    """

    mesh: DeviceMesh
    balance: bool


#: configuration of a model, or of a part of it -> `_Cut`.
_CUTS = WeakTable()
#: attention module -> what its earlier calls have found out.
_EARLIER = WeakTable()


def meshes_of(mesh: DeviceMesh) -> tuple[DeviceMesh | None, DeviceMesh | None]:
    """Return the mesh of tensor parallelism and the mesh of sharded sequences, which is the dimension ``"cp"``."""
    names = mesh.mesh_dim_names or ()
    if "cp" not in names:
        return mesh, None
    others = tuple(name for name in names if name != "cp")
    return (mesh[others] if others else None), mesh["cp"]


def check_cut(model: Any, mesh: DeviceMesh) -> None:
    """Raise ValueError for a model whose sequences cannot be sharded. Changes nothing.

    Raises:
        ValueError: as `parallelize_model` documents.
    """
    remedy = "parallelise the model on a mesh without the dimension 'cp'"
    name = type(model).__name__
    if not getattr(model, "_supports_attention_backend", False):
        raise ValueError(f"{name} does not use the attention interface of transformers: {remedy}")
    if any(part in kind.__name__ for kind in type(model).__mro__ for part in _POOLING):
        raise ValueError(
            f"{name} computes its output from one position of each sequence, but a rank has a shard of the positions: "
            f"call its base model, gather last_hidden_state with context_parallel_unshard, and pool it, or {remedy}"
        )
    for path, module in mesh.platform.named_modules(model):
        if path.rpartition(".")[2] == "pooler":
            raise ValueError(
                f"{path!r} reads one position of each sequence, but a rank has a shard of the positions: build "
                f"{name} with add_pooling_layer=False, or {remedy}"
            )
        config = getattr(module, "config", None)
        odd = sorted(set(getattr(config, "layer_types", None) or ()) - set(_KINDS))
        if odd:
            raise ValueError(f"{path or name!r} has layers of the kinds {odd}, which are not supported: {remedy}")
        types = getattr(module, "rope_type", ())
        types = types.values() if isinstance(types, dict) else (types,)
        if any(kind in _BY_LENGTH for kind in types):
            raise ValueError(
                f"{path!r} scales its rotary embeddings by the largest position, which is unknown on a rank with a "
                f"shard of the sequence. Choose another rope_type than {', '.join(map(repr, _BY_LENGTH))}, or {remedy}"
            )
        if any(name.endswith("sinks") for name in mesh.platform.own_parameters(module)) and not _with_sinks(module):
            raise ValueError(
                f"{path!r} has attention sinks, but its file has no function eager_attention_forward with sinks: "
                f"{remedy}"
            )
        if type(module).__name__ in _MIXING:
            raise ValueError(
                f"{path!r} is a {type(module).__name__}, which mixes positions but is not attention: {remedy}"
            )


def _reach(module: Any, window: int | None, causal: bool) -> float | None:
    """Return the smallest distance at which tokens no longer attend to each other. Return None for a class with unknown
    windows.

    Args:
        module: attention module.
        window: its argument ``sliding_window``.
        causal: whether a token sees none after it.
    """
    if window is None:
        return math.inf
    names = vars(sys.modules[type(module).__module__])
    if causal or "_bidirectional_window_overlay" in names:  # the latter is that of Gemma 3
        return window
    if "create_bidirectional_sliding_window_mask" not in names:
        return None
    # This mask shows the distance that the config names. Most modules pass one more, as flash attention counts.
    return window + (window == module.config.sliding_window)


def _eager(module: Any) -> Any:
    """Return the function ``eager_attention_forward`` in the file of a module's class, or None."""
    return getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)


def _with_sinks(module: Any) -> bool:
    """Return whether the function of `_eager` reads the attention sinks of its module."""
    return "sinks" in getattr(getattr(_eager(module), "__code__", None), "co_names", ())


def cut_sequences(model: Any, mesh: DeviceMesh, balance: bool, src_data_rank: int | None) -> None:
    """Make a model accept shards of sequences, as `shard_sequence` returns them."""
    from transformers import AttentionInterface

    platform = mesh.platform
    if src_data_rank is not None:
        broadcast_tensors([x for _, _, x in held_tensors(model, platform)], mesh, src_data_rank)
    AttentionInterface.register(NAME, _attention)
    cut, configs = _Cut(mesh, balance), {}
    for path, module in platform.named_modules(model):
        name_module(module, path)
        if (config := getattr(module, "config", None)) is not None and hasattr(config, "_attn_implementation"):
            configs[id(config)] = config
            _CUTS.set(config, cut)
    before = [(config, config._attn_implementation_internal) for config in configs.values()]
    for config, _ in before:
        config._attn_implementation_internal = NAME
    compared: set[Any] = set()  # shapes of masks; None for no mask

    def check_labels(module: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        given = _by_name(module, args, kwargs)
        labels = [key for key in _LABELS if given.get(key) is not None]
        if labels:
            raise ValueError(
                f"{type(module).__name__} would shift labels within this rank's shard, and average over this shard "
                f"alone. Leave {' and '.join(labels)} out, and compute the loss with token_mean from the logits and "
                "the labels of shard_sequence"
            )
        routed = given.get("output_router_logits")
        if getattr(module.config, "output_router_logits", False) if routed is None else routed:
            raise ValueError(
                f"{type(module).__name__} would balance its experts over the tokens of this rank alone: leave "
                "output_router_logits out, or set it to False in the model's config"
            )
        return (), given

    def check(module: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        if module.config._attn_implementation != NAME:  # generate
            return args, kwargs
        return (), checked_call(_by_name(module, args, kwargs), mesh, balance, type(module).__name__, compared)

    platform.register_forward_pre_hook(model, check_labels, with_kwargs=True)
    platform.register_forward_pre_hook(model.base_model, check, with_kwargs=True)
    if hasattr(model, "generate"):
        generate = model.generate
        _cut_prompts(model.base_model, mesh, balance, before)

        def generate_whole(*args: Any, **kwargs: Any) -> Any:
            """Generate on every rank, from full prompts.

            If all ranks have the same prompt, each computes a shard of it.
            """
            with _whole(before):
                return generate(*args, **kwargs)

        model.generate = generate_whole


def _cut_prompts(base: Any, mesh: DeviceMesh, balance: bool, before: list[tuple[Any, Any]]) -> None:
    """Let each rank compute a shard of the prompt in the first call that `generate` makes of a base model."""

    def make(forward: Any) -> Any:
        def run(module: Any, *args: Any, **kwargs: Any) -> Any:
            if module.config._attn_implementation == NAME:
                return forward(module, *args, **kwargs)
            given = _by_name(module, args, kwargs)

            def of_parts(**parts: Any) -> Any:
                with _set(before, NAME):
                    return forward(module, **parts)

            found = prefilled(given, module.config, mesh, balance, of_parts)
            return forward(module, **given) if found is None else found

        return run

    mesh.platform.replace_forward(base, make)


@contextmanager
def _whole(before: list[tuple[Any, Any]]) -> Iterator[None]:
    """Restore the model's own attention function inside this context."""
    with _set(before, None):
        yield


@contextmanager
def _set(before: list[tuple[Any, Any]], name: str | None) -> Iterator[None]:
    """Use the attention function called ``name`` inside this context. None stands for the model's own function."""
    now = [config._attn_implementation_internal for config, _ in before]
    for config, own in before:
        config._attn_implementation_internal = own if name is None else name
    try:
        yield
    finally:
        for (config, _), implementation in zip(before, now, strict=True):
            config._attn_implementation_internal = implementation


def _by_name(module: Any, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Return the arguments of a call of a model, by name."""
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    return dict(zip(names, args, strict=False)) | kwargs


def _attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **more: Any,
) -> tuple[Any, None]:
    """Compute attention with the signature of transformers' attention interface."""
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward, use_gqa_in_sdpa

    cut: _Cut | None = _CUTS.get(module.config)
    where = f"attention in {module_label(module)}"
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    reach: Any = _reach(module, sliding_window, causal)
    further = [name for name in _FURTHER if more.get(name) is not None]
    if reach is None:
        further.append("an unknown window to both sides")
    if cut is None:
        raise ValueError(
            f"{where} belongs to a copy of a model with sharded sequences: call parallelize_model for the copy"
        )
    if further or attention_mask is not None:
        raise ValueError(
            f"{where} has {', '.join(further) or 'a mask'}, which is not supported for sharded sequences: parallelise "
            "the model on a mesh without the dimension 'cp'"
        )
    if (earlier := _EARLIER.get(module)) is None:
        _EARLIER.set(module, earlier := Earlier())
    parts, platform = PartsOfModule(cut.mesh, where, cut.balance, None, earlier), cut.mesh.platform

    def seen(queries: np.ndarray, length: int) -> Any:
        """Return a mask of the keys that each query sees."""
        width = min(length, reach)
        behind = platform.places(queries, query).reshape((-1, 1)) - platform.places(np.arange(length), query)
        return (behind < width) & (behind >= (0 if causal else 1 - width))

    if more.get("s_aux") is not None:  # its own code, for this rank's queries
        key, value, places = parts.gathered(query, key, value, dropout)
        mask = platform.zeros((len(places), key.shape[2]), query)
        mask = platform.masked_fill(mask, seen(places, key.shape[2]).logical_not(), -math.inf)
        y, _ = _eager(module)(module, query, key, value, mask, scaling, dropout=dropout)
        return y, None

    def mask_of(length: int) -> Any:
        """Return the mask of the full sequence, or None if the causal mask suffices.

        For a rank with one query, transformers makes no causal mask, as for a step of decoding.
        """
        windowed = reach < length or (causal and 1 in chunk_sizes(length, cut.mesh.size()))
        return seen(np.arange(length), length) if windowed else None

    parts.make_mask = mask_of
    groups = getattr(module, "num_key_value_groups", 1)
    if groups > 1 and not use_gqa_in_sdpa(None, key, value):
        # Here, since transformers would fold the heads of one query into its length instead.
        key, value, module = repeat_kv(key, groups), repeat_kv(value, groups), None
    with platform.attention_calls(parts, parts.mixes):
        return sdpa_attention_forward(module, query, key, value, None, dropout, scaling, causal)
