"""The possible shardings of an operation, independent of meshes and placements.

A rule takes the global shapes and static arguments of one canonical operation. It names the dimensions of operands and
results with labels, as einsum does. The `strategy` module derives everything else from them:

* A label that a result also has can be sharded: every operand with the label is sharded there. An operand without the
  label is read as replicated. Each rank computes a partial gradient of such an operand, and the backward of a view
  reduces this gradient. * A label that no result has is contracted. Sharding it makes the result partial, with the
  reduction ``reduce``. * A dimension with the label ``None`` must be unsharded. * An operation that is a sum of
  products (``terms``) keeps a partial sum partial.

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
    """The local call of an operation, as its replacement function receives it.

    Attributes:
        platform: the platform of the tensors.
        native: ``native(operands, static_args)`` runs the native operation.
        operands: local tensors, and operands that are not tensors.
        static_args: static arguments of the local call.
        operand_layouts: the layouts of the operands; None for an operand that is not a tensor.
        result_layouts: the layouts of the results.
    """

    platform: Any
    native: Callable[[tuple, tuple], Any]
    operands: tuple
    static_args: Any
    operand_layouts: tuple
    result_layouts: tuple

    def run(self) -> Any:
        """Return the result of the native operation on the local tensors."""
        return self.native(self.operands, self.static_args)


@dataclass(frozen=True)
class OpSharding:
    """Result of a rule.

    Attributes:
        operands: for each operand the labels of its dimensions, or None for an operand that is not a tensor.
        results: for each result the labels of its dimensions.
        result_shapes: the global shape of each result; None for a size that depends on the data, such as the number of
            nonzero elements. Such a dimension is unsharded, and ``call`` returns it with the same size on all ranks.
        terms: the operation as a sum of products. Each term is a tuple of indices of operands in which it is linear,
            such as ``((0, 1), (2,))`` for ``x * w + b``. Empty if the operation is not linear in any operand.
        linear_for: ``linear_for(operands)`` returns whether the operation is linear for the Python numbers among its
            operands, or for tensors in their place. Otherwise partial sums are completed first. An infinite factor
            makes NaN of summands of both signs, for example. All ranks must get the same result. None for always.
        reduce: reduction over ranks for a contracted label: ``"sum"``, ``"max"``, ``"min"``. ``"call"`` if ``call``
            itself communicates and returns a replicated result. None if no label may be contracted.
        combined: labels that ``call`` itself reduces, unlike other labels, for which ``reduce`` applies. The result is
            replicated there, such as over the classes of a cross entropy, whose samples are summed. If some of several
            results have the label, they are sharded, such as the indices of `unique`.
        localize: ``localize(static_args, operand_layouts, result_layouts) -> static_args`` returns the static arguments
            of the local call, if they contain global sizes, such as the shape of a reshape. None to keep them.
        call: ``call(local) -> result`` takes a `LocalCall` and replaces the native operation on local tensors, such as
            by a masked embedding look-up. None for the native operation.
        native_if: ``native_if(operand_layouts)`` returns whether the native operation is right for these layouts, so
            that ``call`` is not needed. All ranks must get the same result. None for never.
        unread: indices of operands of which only shape and dtype matter. A partial one counts as replicated, which
            avoids an unnecessary reduction. They get no gradient.
        nonempty: labels that may be sharded only if every rank then has at least one element of the dimension. The
            local operation fails for empty tensors, such as a maximum.
        filled: labels of all results for which the local operation fails for empty tensors, or has another gradient
            graph than on other ranks. They may be sharded nevertheless: a rank without elements computes with a filler
            element and drops its results (see `filling`).
        units: (label, number) for a dimension that consists of this number of indivisible units, such as attention
            heads or channel groups. The number of ranks must divide the number of units. If all dimensions with the
            label have one size and units are single elements, any number of ranks is allowed.
        unpack: (dim, sizes, result dim) for an operation that separates the parts of dimension ``dim`` of its only
            tensor operand, the first. If the operand is packed with these sizes, every result is sharded along
            ``result dim``.
        choices: (placements of the operands, placements of the results) for each possible sharding on one mesh
            dimension, in place of labels or in addition to them. Replicated operands are always possible. User-defined
            rules have only these.
    """

    operands: tuple[tuple[Label | None, ...] | None, ...]
    results: tuple[tuple[Label | None, ...], ...]
    result_shapes: tuple[tuple[Any, ...], ...]
    terms: tuple[tuple[int, ...], ...] = ()
    linear_for: Callable[[tuple], bool] | None = None
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
