"""Conversions of the tensors in state dicts: to the caller's form, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hyper_parallel.checkpoint.nest import layout_of
from hyper_parallel.checkpoint.ranks import all_ranks
from hyper_parallel.core.dtensor.api import distribute_tensor
from hyper_parallel.core.dtensor.tensor import DTensor
from hyper_parallel.core.layouts.placement_types import Replicate
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.platform import Platform

__all__ = ["Source", "StateDictOptions", "given"]


@dataclass
class StateDictOptions:
    """Options of the functions of `hyper_parallel.checkpoint.state_dict`.

    Attributes:
        full_state_dict: return full plain tensors in place of DTensors.
        cpu_offload: return tensors in host memory. With ``full_state_dict`` only the first rank gets tensors, and other
            ranks get an empty dict.
        ignore_frozen_params: leave out parameters that require no gradient; on loading, they may be missing.
        keep_submodule_prefixes: used with ``submodules`` in torch; must be True.
        strict: whether the state dict must have every tensor of the model, and no other.
        broadcast_from_rank0: only the first rank has the full tensors, and broadcasts them; needs ``full_state_dict``.
        flatten_optimizer_state_dict: return the state of an optimizer as one flat dict, with keys such as
            ``state.up.weight.exp_avg`` and ``param_groups.up.weight.lr``.
        dsd_fqn_modifiers: must have its default, as in torch.

    Raises:
        ValueError: for a value that is not supported.

    Mirrors ``torch.distributed.checkpoint.state_dict.StateDictOptions``.
    """

    full_state_dict: bool = False
    cpu_offload: bool = False
    ignore_frozen_params: bool = False
    keep_submodule_prefixes: bool = True
    strict: bool = True
    broadcast_from_rank0: bool = False
    flatten_optimizer_state_dict: bool = False
    dsd_fqn_modifiers: str = "_fqn_modifiers"

    def __post_init__(self) -> None:
        if not self.keep_submodule_prefixes:
            raise ValueError(
                "keep_submodule_prefixes=False needs submodules=..., which is not supported: call the function with "
                "the submodule as the model"
            )
        if self.dsd_fqn_modifiers != "_fqn_modifiers":
            raise ValueError(
                f"dsd_fqn_modifiers={self.dsd_fqn_modifiers!r} is not supported: rename the keys of the state dict "
                "instead"
            )


def given(tensors: dict[Any, Any], options: StateDictOptions, platform: Platform) -> dict[Any, Any]:
    """Convert tensors to the form that ``options`` requests, such as full tensors on the CPU."""
    keep = not (options.full_state_dict and options.cpu_offload) or platform.world() is None or platform.rank() == 0
    found, known = {}, {}
    for name, x in tensors.items():
        if platform.is_tensor(x) and id(x) not in known:
            known[id(x)] = _converted(x, options, platform, keep)
        if keep:
            found[name] = known[id(x)] if platform.is_tensor(x) else x
    return found


def _converted(x: Any, options: StateDictOptions, platform: Platform, keep: bool) -> Any:
    layout = layout_of(x)
    with platform.no_grad():
        if options.full_state_dict and layout is not None:
            x, layout = x.full_tensor(), None
        if not keep:
            return None
        with platform.no_dispatch():
            local = platform.detach(x)
            local = platform.to_host(local, False) if options.cpu_offload else local
        return local if layout is None else platform.wrap(local, layout)


class Source:
    """Tensors and numbers of a state dict to load. Each rank reads its own state dict, or the first rank broadcasts.

    Attributes:
        shapes: shapes by name; None for a number.
        dtypes: dtypes of tensors by name.
    """

    def __init__(self, state: Mapping[str, Any], options: StateDictOptions, platform: Platform) -> None:
        if options.broadcast_from_rank0 and not options.full_state_dict:
            raise ValueError(
                "broadcast_from_rank0=True needs a state dict of unsharded tensors: set full_state_dict=True too"
            )
        self._state, self._platform = state, platform
        self._ranks = all_ranks(platform, None)
        self._broadcasts = options.broadcast_from_rank0 and len(self._ranks.members) > 1
        facts = [[name, *self._fact(x)] for name, x in state.items()]
        if self._broadcasts:
            facts = self._ranks.gather(facts)[0]
        self.shapes = {name: None if shape is None else tuple(shape) for name, shape, _, _ in facts}
        self.dtypes = {name: dtype for name, _, dtype, _ in facts}
        self._numbers = {name: number for name, _, _, number in facts}

    def _fact(self, x: Any) -> Iterator[Any]:
        if not self._platform.is_tensor(x):
            return iter((None, "", x))
        dtype = next(name for name, d in self._platform.dtypes.items() if d == x.dtype)
        return iter(([*x.shape], dtype, float(x) if not x.shape else None))

    def number(self, name: str) -> Any:
        """Return the number called ``name``."""
        return self._numbers[name]

    def _value(self, name: str) -> Any:
        platform = self._platform
        if not self._broadcasts:
            return self._state[name]
        first = self._ranks.rank == self._ranks.members[0]
        shape, dtype = self.shapes[name], platform.dtypes[self.dtypes[name]]
        x = platform.to_device(self._state[name]) if first else platform.factory("empty", shape or (), None, dtype)
        world = DeviceMesh(None, range(len(self._ranks.members)))
        return distribute_tensor(x, world, [Replicate()], src_data_rank=0).to_local()

    def skip(self, name: str) -> None:
        """Skip a tensor that this rank does not need. If the first rank broadcasts it, the tensor is received and
        dropped."""
        if self.shapes[name] is not None:
            self._value(name)

    def fill(self, held: Any, name: str) -> None:
        """Write the tensor called ``name``, or this rank's shard of it, into ``held``."""
        platform, layout = self._platform, layout_of(held)
        with platform.no_grad():
            x = self._value(name)
            if isinstance(x, DTensor) and layout is None:
                x = x.full_tensor()
            elif isinstance(x, DTensor):
                if x.device_mesh is not layout.mesh:
                    raise ValueError(
                        f"{name!r} is on {layout.mesh} in the model and on {x.device_mesh} in the state dict"
                    )
                x = x.redistribute(placements=layout.placements).to_local()
            elif layout is not None:
                x = distribute_tensor(
                    platform.to_device(x), layout.mesh, layout.placements, src_data_rank=None
                ).to_local()
            with platform.no_dispatch():
                platform.write(held, platform.to_dtype(x, held.dtype))
        platform.clear_cache(held)
