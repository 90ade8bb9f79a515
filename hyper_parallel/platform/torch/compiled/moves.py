"""Redistribution inside a compiled frame: plain local tensors in, plain local tensors out.

The layout of a tensor is its cut: the dimension that is sharded into consecutive shards, or None for replicated.
Shards are equal in size unless ``sizes`` are passed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hyper_parallel.platform.contract.programs import Comparison, Program, step_between
from hyper_parallel.platform.torch.basics.tensor import State
from hyper_parallel.platform.torch.compiled import functions
from hyper_parallel.platform.torch.compiled.comparisons import NUMBER, Shards, mark
from hyper_parallel.platform.torch.compiled.placed import Shared, gathered_class, kept_on_mesh, placed_class, plain

__all__ = ["INPUT", "Moves", "placed_classes", "shards_of"]

#: The reason for leaving a module to eager mode because of its inputs.
INPUT = "its inputs are not one tensor with the placement that the style expects"
_UNEVEN = (
    "a layer has returned plain shards of unequal sizes, so ranks compare the sizes of plain shards in every later "
    "call: pass DTensors between modules (use_local_output=False)"
)

#: Tensors with more dimensions stay outside of compiled code.
_MOST_DIMS = 8


@kept_on_mesh
def _classes(mesh: Any, size: int) -> tuple[dict[int | None, type], dict[int | None, type]]:
    """Return the classes of `placed_class` and of `gathered_class`, by cut."""
    cuts = range(_MOST_DIMS)
    return {cut: placed_class(mesh, size, cut) for cut in (None, *cuts)}, {
        cut: gathered_class(mesh, size, cut) for cut in cuts
    }


def shards_of(compare: Comparison | None) -> Shards | None:
    """Return the record of plain shards that ranks compare for a style; None if the style needs no comparison."""
    return None if compare is None else Shards(compare)


def placed_classes(mesh: Any, size: int) -> dict[int | None, type]:
    """Return the classes of `placed_class`, by cut."""
    found: dict[int | None, type] = _classes(mesh, size)[0]
    return found


class Moves:
    """Communication of one program on its 1-D mesh."""

    def __init__(self, how: Program) -> None:
        self.mesh, self.size, self.rank, self.local = how.mesh, how.size, how.rank, how.local
        self.group = how.group().group_name
        # Made here, because a class cannot be created while a frame is traced.
        self.placed, self.gathered = _classes(how.mesh, how.size)
        self.dtensor = State.tensor_class.__bases__[0]

    def take(
        self, x: Any, given: int | None, module: Any, shards: Shards | None, features: bool = False
    ) -> tuple[Tensor, int | None] | str:
        """Return an input as a plain tensor, and its sharded dimension. Return a reason instead if the object is no
        tensor, or if compiled code does not know its layout.

        Args:
            x: the input.
            given: how a plain input is held.
            module: module that gets the input.
            shards: record of the comparison of plain shards; None for no comparison.
            features: whether ``module`` knows the size of the last dimension.
        """
        if isinstance(x, self.dtensor):
            if x.placed_on is not self.mesh:
                return INPUT
            cut, is_plain = x.placed_cut if x.gathers is None else x.gathers, False
            x = plain(x)
        elif isinstance(x, Tensor):
            cut, x, is_plain = given, plain(x) if isinstance(x, Shared) else x, True
        else:
            return INPUT
        if cut is None:
            return x, None
        if not -x.ndim <= cut < x.ndim <= _MOST_DIMS:
            return INPUT
        cut %= x.ndim
        if is_plain and shards is not None and not (features and cut == x.ndim - 1):
            if self.mesh._has_uneven_shards:
                return _UNEVEN
            label = getattr(module, "_hyper_parallel_path", "") or type(module).__name__
            x = mark(x, shards.key, label, getattr(module, NUMBER, ""))
        return x, cut

    def give(self, y: Tensor, cut: int | None, even: bool = True) -> Any:
        """Return an output with this cut, plain or as a DTensor; None for a DTensor with shards of unequal size."""
        if self.local:
            return y
        return y.as_subclass(self.placed[cut]) if even else None

    def give_gathered(self, x: Tensor, cut: int) -> Any:
        """Return a stand-in that holds shards along ``cut`` of a replicated DTensor; see `gathered_class`."""
        y: Any = x.as_subclass(self.gathered[cut])
        y.read_for_parts = None
        return y

    def read(self, given: Any, x: Tensor, cut: int | None) -> Tensor:
        """Return the unsharded ``x``, for a consumer that returns a partial cotangent.

        `take` has converted the input ``given`` to ``x``. Consumers of the same input share one collective.
        """
        shares = isinstance(given, Shared) or (isinstance(given, self.dtensor) and given.gathers is not None)
        if not shares:
            return self.bring(x, cut, None, for_parts=True)
        differentiable, kept = torch.is_grad_enabled(), given.read_for_parts
        # A tensor read inside no_grad has no backward: it serves no reader outside.
        if kept is None or (differentiable and not kept[0]):
            given.read_for_parts = kept = differentiable, self.bring(x, cut, None, for_parts=True)
        y: Tensor = kept[1]
        return y

    def bring(
        self, x: Tensor, source: int | str | None, target: int | str | None, sizes: tuple[int, ...] = (),
        for_parts: bool = False,
    ) -> Any:  # fmt: skip
        """Do the step of `step_between` from ``source`` to ``target``. Returns None if the result would have uneven
        shards.

        Args:
            x: local tensor.
            source, target, for_parts: see `step_between`.
            sizes: sizes of the shards, where they may be uneven.
        """
        name = step_between(source, target, for_parts and x.is_floating_point())
        if name is None or self.size == 1:
            return x
        if name == "exchange" and sizes and min(sizes) != max(sizes):
            return None
        if isinstance(target, int) and not (name == "slice" and sizes) and x.shape[target] % self.size:
            return None
        return functions.take(x, name, source, target, sizes, self.size, self.rank, self.group)
