"""From one layout to another inside a compiled frame: plain local tensors in, plain local tensors out.

The layout of a tensor is its cut: a dimension along which the ranks have consecutive parts, or None if all ranks have
all of it. Parts are equal unless their ``sizes`` are given.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hyper_parallel.platform.contract.programs import Comparison, step_between
from hyper_parallel.platform.torch.basics.tensor import State
from hyper_parallel.platform.torch.compiled import functions
from hyper_parallel.platform.torch.compiled.comparisons import NUMBER, Shards, mark
from hyper_parallel.platform.torch.compiled.placed import Shared, gathered_class, kept_on_mesh, placed_class, plain

__all__ = ["INPUT", "Moves", "placed_classes", "shards_of"]

#: Why a module is left to eager mode, where it is for its inputs.
INPUT = "its inputs are not one tensor that lies as the style takes it"
_UNEVEN = (
    "a layer has given plain parts of unequal sizes, and from then on ranks compare the sizes of plain shards in every "
    "call: pass DTensors between modules (use_local_output=False)"
)

#: Tensors of more dimensions stay outside of compiled code.
_MOST_DIMS = 8


@kept_on_mesh
def _classes(mesh: Any, size: int) -> tuple[dict[int | None, type], dict[int | None, type]]:
    """`placed_class` and `gathered_class` by cut."""
    cuts = range(_MOST_DIMS)
    return {cut: placed_class(mesh, size, cut) for cut in (None, *cuts)}, {
        cut: gathered_class(mesh, size, cut) for cut in cuts
    }


def shards_of(compare: Comparison | None) -> Shards | None:
    """The plain shards that a style's data say are compared."""
    return None if compare is None else Shards(compare)


def placed_classes(mesh: Any, size: int) -> dict[int | None, type]:
    """`placed_class` by cut."""
    found: dict[int | None, type] = _classes(mesh, size)[0]
    return found


class Moves:
    """Communication of one style, on its 1-D mesh.

    Args:
        mesh, size, rank: of the style.
        group: that of its ranks, as core gets it.
        local: whether its results are plain.
    """

    def __init__(self, mesh: Any, group: Any, size: int, rank: int, local: bool) -> None:
        self.mesh, self.size, self.rank, self.local, self.group = mesh, size, rank, local, group().group_name
        # Made here: in a frame a class cannot be.
        self.placed, self.gathered = _classes(mesh, size)
        self.dtensor = State.tensor_class.__bases__[0]

    def take(
        self, x: Any, given: int | None, module: Any, shards: Shards | None, features: bool = False
    ) -> tuple[Tensor, int | None] | str:
        """An input as a plain tensor, and its cut. A reason where it is no tensor, or has a layout that is not known
        here. A plain one lies as ``given``.

        Args:
            x, given: the input.
            module: that it is for.
            shards: where the ranks compare plain ones.
            features: whether ``module`` knows how many features there are, which come last.
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
        """An output with this cut, plain or as a DTensor; None for a DTensor with parts of unequal size."""
        if self.local:
            return y
        return y.as_subclass(self.placed[cut]) if even else None

    def give_gathered(self, x: Tensor, cut: int) -> Any:
        """The DTensor that is gathered of shards along ``cut``."""
        y: Any = x.as_subclass(self.gathered[cut])
        y.read_for_parts = None
        return y

    def read(self, given: Any, x: Tensor, cut: int | None) -> Tensor:
        """All of ``x``, which `take` made of ``given``, for a consumer that returns a summand of the cotangent. Several
        that are given the same share one collective."""
        shares = isinstance(given, Shared) or (isinstance(given, self.dtensor) and given.gathers is not None)
        if not shares:
            return self.bring(x, cut, None, for_parts=True)
        if given.read_for_parts is None:
            given.read_for_parts = self.bring(x, cut, None, for_parts=True)
        return given.read_for_parts

    def bring(
        self, x: Tensor, source: int | str | None, target: int | str | None, sizes: tuple[int, ...] = (),
        for_parts: bool = False,
    ) -> Any:  # fmt: skip
        """Take the step between two ways of holding a tensor: see `step_between`. Returns None where parts would not be
        even.

        Args:
            x, source, target, for_parts: see there.
            sizes: of the parts, where these need not be even.
        """
        name = step_between(source, target, for_parts and x.is_floating_point())
        if name is None or self.size == 1:
            return x
        if name == "exchange" and sizes and min(sizes) != max(sizes):
            return None
        if isinstance(target, int) and not (name == "slice" and sizes) and x.shape[target] % self.size:
            return None
        return functions.take(x, name, source, target, sizes, self.size, self.rank, self.group)
