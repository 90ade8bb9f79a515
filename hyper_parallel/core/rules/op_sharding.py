"""The possible shardings of an operation, said once for all meshes and placements.

A rule looks at the global shapes and static arguments of one canonical operation. It names the dimensions of operands
and results with labels, as einsum does. Everything else follows and is worked out by `strategy`:

* A label that a result has too can be sharded: every operand with the label is sharded there. An operand without it is
  read replicated, through the view whose backward reduces: each rank computes a part of that operand's gradient only.
* A label that no result has is contracted: sharding it makes the result partial (a sum, or as ``reduce`` says).
* A dimension with the label ``None`` must be whole on every rank.
* An operation that is a sum of products (``terms``) keeps a partial sum partial.

Example, ``y = x @ w.T + b``::

    OpSharding(
        operands=(("b", "i"), ("o", "i"), ("o",)),
        results=(("b", "o"),),
        result_shapes=((8, 32),),
        terms=((0, 1), (2,)),
        reduce="sum",
    )
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

Label = Hashable


class LocalCall(NamedTuple):
    """The call of an operation on this rank, as the function that replaces it gets it.

    Attributes:
        platform: the platform of the tensors.
        native: ``native(operands, static_args)`` runs the native operation.
        operands: local tensors, and operands that are no tensors.
        static_args: static arguments of the local call.
        operand_layouts: the layouts of the operands; None for one that is no tensor.
        result_layouts: the layouts of the results.
    """

    platform: Any
    native: Callable[[tuple, tuple], Any]
    operands: tuple
    static_args: Any
    operand_layouts: tuple
    result_layouts: tuple

    def run(self) -> Any:
        """The native operation on the local tensors."""
        return self.native(self.operands, self.static_args)


@dataclass(frozen=True)
class OpSharding:
    """Answer of a rule.

    Attributes:
        operands: for each operand the labels of its dimensions, or None for an operand that is no tensor.
        results: for each result the labels of its dimensions.
        result_shapes: the global shape of each result; None for a size that only the data say (how many elements are
            not zero). Such a dimension is whole, and ``call`` gives it the same size on all ranks.
        terms: the operation as a sum of products: each term is a tuple of indices of operands in which it is linear,
            as ``((0, 1), (2,))`` for ``x * w + b``. Empty when the operation is not linear in anything.
        reduce: how a contracted label combines over ranks: ``"sum"``, ``"max"``, ``"min"``; ``"call"`` when ``call``
            combines the ranks itself and returns a replicated result; None when no label may be contracted.
        combined: labels whose contraction ``call`` combines itself, whatever ``reduce`` says of the others: the result
            is replicated there (the classes of a cross entropy, whose samples add up). Of several results some may
            have the label nevertheless, and are sharded (the places of elements among those that differ).
        localize: ``localize(static_args, operand_layouts, result_layouts) -> static_args`` gives the static arguments
            for the local call, where they speak of global sizes (the shape of a reshape). None: they stay.
        call: ``call(local) -> result`` replaces the local call, a `LocalCall`, where it is not the native operation on
            the locals (a masked embedding look-up). None: the native call.
        native_if: ``native_if(operand_layouts)`` says whether the native operation is right for these layouts, so that
            ``call`` is not needed; the same on all ranks. None: it never is.
        unread: indices of operands of which only shape and dtype matter: a partial one counts as replicated, so that
            it is not reduced for nothing, and no gradient flows to it.
        nonempty: labels that may be sharded only if every rank then has at least one element of the dimension, because
            the local operation fails for none (a largest element).
        filled: labels of all results for which the local operation fails for no element, or has another gradient than
            the other ranks have. They may be sharded all the same: a rank without an element computes with one, and
            drops its results. See `filling`.
        units: (label, number) for a dimension that consists of that many units which must not be cut: it may be sharded
            over as many ranks as divide the number, or any number where all dimensions with the label have one size and
            are single units (the features of attention heads; groups of channels).
        unpack: (dim, sizes, result dim) for an operation that takes dimension ``dim`` of its only tensor operand, the
            first, apart: where that is packed in parts of these sizes, every result is sharded along ``result dim``.
        choices: (placements of the operands, placements of the results) for each way to run on one mesh dimension, in
            place of labels or in addition to them; the ways on whole tensors are there too. Rules that users write have
            these alone.
    """

    operands: tuple[tuple[Label | None, ...] | None, ...]
    results: tuple[tuple[Label | None, ...], ...]
    result_shapes: tuple[tuple[Any, ...], ...]
    terms: tuple[tuple[int, ...], ...] = ()
    reduce: str | None = None
    combined: tuple[Label, ...] = ()
    localize: Callable[[tuple, tuple, tuple], tuple] | None = None
    call: Callable[..., Any] | None = None
    native_if: Callable[[tuple], bool] | None = None
    unread: tuple[int, ...] = ()
    nonempty: tuple[Label, ...] = ()
    filled: tuple[Label, ...] = ()
    units: tuple[tuple[Label, int], ...] = ()
    unpack: tuple[tuple[int, tuple[int, ...], int], ...] = ()
    choices: tuple[tuple[tuple[Any, ...], tuple[Any, ...]], ...] = ()
