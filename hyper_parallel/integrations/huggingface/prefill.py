"""Prompts of `generate` with sharded sequences: each rank computes a shard, and all ranks get the full cache."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

from hyper_parallel.core.communication.parts import numbers_of_ranks
from hyper_parallel.core.dtensor.context_parallel import context_parallel_unshard
from hyper_parallel.core.dtensor.sequence_batches import shard_sequence
from hyper_parallel.core.layouts.chunking import chunk_sizes
from hyper_parallel.core.mesh.device_mesh import DeviceMesh

__all__ = ["prefilled"]

#: Names of the cache in the calls and outputs of models, the newer name first.
_NAMES = ("cache", "past_key_values")
#: Arguments that ask for outputs of layers.
_OF_LAYERS = ("output_hidden_states", "output_attentions")


def prefilled(given: dict[str, Any], config: Any, mesh: DeviceMesh, balance: bool, call: Callable[..., Any]) -> Any:
    """Return the output of the first call that `generate` makes, or None for a prompt that is not sharded.

    The ranks compare their prompts. The prompt is sharded if all ranks have the same prompt, with at least one position
    for each rank. No rank may ask for the outputs of layers. After the call, keys, values and outputs are unsharded, so
    that every rank has the full cache.

    Args:
        given: arguments of the base model, by name.
        config: configuration of the base model.
        mesh: mesh that shards sequences.
        balance: see `shard_sequence`.
        call: function that calls the base model, with attention over the full sequence.
    """
    from transformers import DynamicCache

    platform = mesh.platform
    name = next((name for name in _NAMES if given.get(name) is not None), "")
    named: list[Any] = [given.get(key) for key in ("input_ids", "attention_mask", "position_ids")]
    ids, mask, positions = named
    usual = bool(name) and ids is not None and not given[name].get_seq_length()
    usual = usual and (mask is None or getattr(mask, "ndim", 0) == 2) and getattr(positions, "ndim", 0) == 2
    if not usual or mesh.size() == 1 or platform.sends_nothing:
        return None
    length = ids.shape[1]
    hides = mask is not None and not bool(mask.all())
    # Layers would return those of a shard, in the order in which the rank holds it.
    of_layers = any(given.get(key, getattr(config, key, False)) for key in _OF_LAYERS)
    fits = 0 not in chunk_sizes(length, mesh.size()) and not hides and not of_layers
    mine = [zlib.crc32(platform.bytes_of(ids)), length, fits]
    rows = numbers_of_ranks(mine, mesh, "the first call of generate")
    if not rows[:, 2].all() or (rows != rows[0]).any():
        return None

    class Parts(DynamicCache):
        """Cache of the keys and values of this rank's shard."""

        def __init__(self) -> None:
            super().__init__()
            self.held: dict[int, tuple[Any, Any]] = {}

        def update(self, keys: Any, values: Any, layer_idx: int, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            self.held[layer_idx] = keys, values
            return keys, values

    parts, cache = Parts(), given[name]
    cut = {"input_ids": ids, "position_ids": positions.expand(ids.shape)}
    own = shard_sequence(cut, mesh, labels=None, positions=None, balance=balance)
    result = call(**{**given, **own, "attention_mask": None, name: parts})
    for layer, both in sorted(parts.held.items()):
        cache.update(*context_parallel_unshard(mesh, both, [2, 2], balance=balance), layer)
    (whole,) = context_parallel_unshard(mesh, [result.last_hidden_state], [1], balance=balance)
    result.last_hidden_state = whole
    result[name] = cache
    return result
