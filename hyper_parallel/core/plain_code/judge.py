"""Judgement of an operation on plain local tensors: whether its result is that of one device, by its sharding rule.

The rule gets the global shapes of the operands, and the solver finds the layouts that the operation needs. If the
solver would redistribute an operand, the local result is wrong. The judge neither communicates nor reads values, so all
ranks have the same verdict.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hyper_parallel.core.communication.recorder import LISTENERS, CollectiveEvent
from hyper_parallel.core.layouts.layout import Layout, get_layout, replicated_layout
from hyper_parallel.core.layouts.placement_types import Replicate, Shard
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.operations.strategy import Strategy, Unsized, solve
from hyper_parallel.core.plain_code.findings import Problem
from hyper_parallel.core.plain_code.marks import (
    WHOLE,
    Joined,
    Lost,
    Mark,
    Ways,
    describe,
    is_even,
    layout_of,
    mark_of,
)
from hyper_parallel.core.plain_code.texts import gradient_problem, moved_problem, reshape_problem, unfit_problem
from hyper_parallel.core.plain_code.views import RESHAPES, of_whole, piece_of_packed, reshaped, taken_along
from hyper_parallel.core.rules import OPERATIONS
from hyper_parallel.core.rules.op_sharding import LocalCall, OpSharding

#: Operations with an index tensor. Without a mark, the index may still differ between ranks, as that of a router's
#: tokens does. A finding with such an index is not certain.
_INDEXED = ("gather", "getitem", "index_select")
#: Most combinations of marks that are tried for one operation.
_MOST_WAYS = 64


@dataclass(frozen=True)
class Verdict:
    """The result of judging one operation: a problem, or the placements of its results.

    Attributes:
        problems: problems of the result, which differs from that of one device. The results then have no marks.
        gradients: problems of an operand's gradient. The result itself is right.
        results: marks of each result.
        notes: assumptions that are not findings.
    """

    problems: tuple[Problem, ...] = ()
    gradients: tuple[Problem, ...] = ()
    results: tuple[Ways, ...] = ()
    notes: tuple[str, ...] = ()


class Operand(NamedTuple):
    """An operand of an operation that is judged: its local shape and possible placements.

    Attributes:
        shape: local shape.
        ways: possible marks of the operand.
        trains: whether it requires a gradient.
        is_parameter: whether it is a parameter of a module.
    """

    shape: tuple[int, ...]
    ways: Ways
    trains: bool
    is_parameter: bool


class Call(NamedTuple):
    """A call of an operation, for the judge.

    Attributes:
        name: canonical name of the operation.
        title: native name of the operation, for messages.
        static: static arguments.
        operands: descriptions of the operands; None for an operand that is not a tensor.
        shapes: local shapes of the results.
        in_place: whether the operation writes to its first operand.
        values: the operands themselves, for rules that replace the local call.
        result: result of the native operation.
    """

    name: str
    title: str
    static: Any
    operands: tuple[Operand | None, ...]
    shapes: tuple[tuple[int, ...], ...]
    in_place: bool
    values: tuple[Any, ...]
    result: Any


def judge(call: Call, mesh: DeviceMesh) -> Verdict:
    """Judge an operation that has an operand with a recorded placement on ``mesh``."""
    lost = next((x.ways for x in call.operands if x is not None and isinstance(x.ways, Lost)), None)
    if lost is not None:
        return Verdict(results=(lost,) * len(call.shapes))
    if any(x is not None and isinstance(x.ways, Joined) for x in call.operands):
        return _judge_joined(call)
    if call.name == "dropout" and not (call.static[1] and 0 < call.static[0] < 1):
        first = call.operands[0]
        return Verdict(results=(WHOLE if first is None else first.ways,))
    choices = [(None,) if x is None else x.ways for x in call.operands]
    found = [
        _judge_way(call, way, mesh)
        for way in itertools.islice(itertools.product(*choices), _MOST_WAYS)  # type: ignore[arg-type]
    ]
    fitting = [v for v in found if not v.problems]
    if not fitting:
        return found[0]
    right = [v for v in fitting if not v.gradients] or fitting[:1]
    results = tuple(_any_of([v.results[i] for v in right]) for i in range(len(call.shapes)))
    return Verdict(gradients=right[0].gradients, results=results, notes=right[0].notes)


def _any_of(ways: Sequence[Ways]) -> Ways:
    """Merge the possible placements of a result, which were computed for each combination of operand placements."""
    odd = next((w for w in ways if isinstance(w, (Joined, Lost))), None)
    return odd if odd is not None else tuple(dict.fromkeys(itertools.chain(*ways)))  # type: ignore[arg-type]


def _judge_way(call: Call, marks: tuple[Mark | None, ...], mesh: DeviceMesh) -> Verdict:
    """Judge the call for one combination of operand placements."""
    if call.name == "like" and (marks[0] is None or not marks[0].sharded):
        return Verdict(results=(WHOLE,) * len(call.shapes))
    if call.name == "cat" and len(set(marks)) > 1 and all(m is None or _only_summed(m) for m in marks):
        dim = call.static[0] % max(len(call.shapes[0]), 1)
        sizes = tuple(x.shape[dim] for x in call.operands if x is not None)
        return Verdict(results=(Joined(dim, sizes, tuple((m,) for m in marks)),))
    first: Verdict | None = None
    for assumed in ({}, _assumed(call, marks)):
        if first is not None and not assumed:
            continue
        verdict = _judge_layouts(call, marks, mesh, assumed)
        if not verdict.problems:
            return verdict
        first = first or verdict
    assert first is not None
    return first


def _only_summed(mark: Mark) -> bool:
    return bool(mark.summed) and all(p is Replicate() for p in mark.layout.placements)


def _assumed(call: Call, marks: tuple[Mark | None, ...]) -> dict[int, Mark]:
    """Return assumed placements of operands without a mark that have the size of a shard.

    The program may have created such a tensor as a shard itself.
    """
    known = next(((x, m) for x, m in zip(call.operands, marks, strict=True) if x and m and m.sharded), None)
    if known is None:
        return {}
    (x, mark), mesh = known, known[1].layout.mesh
    found = {}
    for i, (other, own) in enumerate(zip(call.operands, marks, strict=True)):
        if other is None or not (own is None or _only_summed(own)):
            continue
        whole, placements = list(other.shape), [*replicated_layout(mesh, other.shape).placements]
        for d, p in enumerate(mark.layout.placements):
            if not isinstance(p, Shard):
                continue
            size, ndim = x.shape[p.dim], len(other.shape)
            # The dimension with the same index from the end, as in broadcasting; otherwise any dimension of this size.
            places = [p.dim - len(x.shape) + ndim, *range(ndim)]
            dim = next((i for i in places if 0 <= i < ndim and whole[i] == size), None)
            if dim is not None:
                whole[dim] = mark.layout.shape[p.dim]
                placements[d] = p.with_dim(dim)
        if whole != list(other.shape):
            found[i] = Mark(get_layout(mesh, tuple(placements), tuple(whole)))
    return found


def _judge_layouts(call: Call, marks: tuple[Mark | None, ...], mesh: DeviceMesh, assumed: dict[int, Mark]) -> Verdict:
    layouts = tuple(
        None if x is None else assumed[i].layout if i in assumed else layout_of(m, mesh, x.shape)
        for i, (x, m) in enumerate(zip(call.operands, marks, strict=True))
    )
    if any(layout is not None and layout.mesh is not mesh for layout in layouts):
        return Verdict(results=(Lost("tensors on several meshes"),) * len(call.shapes))
    merged = next((m.merged for m in marks if m is not None and m.merged), 0)
    mark, operand = marks[0] if marks else None, call.operands[0] if call.operands else None
    if call.name in RESHAPES and mark is not None and operand is not None:
        if 0 in operand.shape:  # other ranks may have elements
            return Verdict(results=(Lost("a reshape of a tensor without elements"),))
        ways = reshaped(mark, operand.shape, call.shapes[0])
        return (
            Verdict(results=(ways,))
            if ways
            else Verdict(
                problems=(
                    replace(reshape_problem(call.title, mark, operand.shape, call.shapes[0]), certain=not merged),
                )
            )
        )
    if call.name == "getitem" and mark is not None and operand is not None and len(call.operands) == 1:
        piece = piece_of_packed(mark, call.static[0], operand.shape)
        if piece is not None:
            return Verdict(results=((piece,),))

    def texts() -> list[str]:
        described = enumerate(zip(call.operands, marks, strict=True))
        return [describe(assumed.get(i, m), x.shape) for i, (x, m) in described if x]

    # Rows in another order, or rows that an index of this rank alone takes, may be right.
    certain = not merged and not (call.name in _INDEXED and any(m is None for m in marks[1:]))
    shape = () if operand is None else operand.shape
    static = of_whole(call.name, call.static, shape, layouts[0] if layouts else None, len(call.shapes))
    sharding = _sharding(call.name, tuple(None if x is None else tuple(x.shape) for x in layouts), static)
    if sharding is None:
        several = sum(x is not None for x in call.operands) > 1 or call.name == "split"
        # A rule that does not know these arguments does not know them on one device either.
        if several and _sharding(call.name, tuple(None if x is None else x.shape for x in call.operands), call.static):
            return Verdict(problems=(replace(unfit_problem(call.title, call.name, texts()), certain=certain),))
        return Verdict(results=(Lost(f"{call.title} with arguments that its rule does not know"),) * len(call.shapes))
    strategy = solve(sharding, layouts, mesh, pinned=0 if call.in_place else None)
    if strategy is None:
        return Verdict(problems=(unfit_problem(call.title, "write", texts()),))
    problems = []
    for i, (have, want) in enumerate(zip(layouts, strategy.operands, strict=True)):
        if have is not None and want is not None and want is not have:
            if i in sharding.unread and want is have.cotangent:
                continue
            problems.append(moved_problem(call.title, call.name, texts(), have, want))
    draws = call.name in ("dropout",)
    if not problems and sharding.call is not None and not draws:
        native = sharding.native_if is not None and sharding.native_if(strategy.operands)
        if not native and not _is_native(sharding.call, call, strategy, mesh):
            problems.append(moved_problem(call.title, call.name, texts(), None, None))
    if problems:
        return Verdict(problems=tuple(replace(problem, certain=certain) for problem in problems))
    return _right(call, marks, strategy, layouts, assumed, merged, draws)


def _sharding(name: str, shapes: tuple, static: Any) -> OpSharding | None:
    """Return the result of a rule.

    Return None if the rule does not support the shapes or the arguments.
    """
    try:
        return OPERATIONS[name].rule(shapes, static)
    except Exception:  # rules may assume a valid call
        return None


def _right(
    call: Call,
    marks: tuple[Mark | None, ...],
    strategy: Strategy,
    layouts: tuple[Layout | None, ...],
    assumed: dict[int, Mark],
    merged: int,
    draws: bool,
) -> Verdict:
    """Return the verdict on an operation without redistribution: checks of gradients, and the placements of its
    results."""
    mesh_dims = range(next(x for x in layouts if x is not None).mesh.ndim)
    split = set(itertools.chain(*strategy.partial_grad_dims))
    # Along these mesh dimensions all ranks compute the same, and the gradient of some operand is partial. So the
    # gradients of the results are partial too.
    same = {d for m in marks if m is not None for d in m.summed} - split
    gradients = []
    for i, (x, m) in enumerate(zip(call.operands, marks, strict=True)):
        if x is None or not x.trains or (call.in_place and i == 0 and m is None):
            continue
        owed = set(strategy.partial_grad_dims[i])
        if i in assumed:
            owed = {d for d in mesh_dims if isinstance(assumed[i].layout.placements[d], Shard)}
        if m is None or not m.sharded:
            owed |= {d for d in same if layouts[i] is not None and layouts[i].placements[d] is Replicate()}  # type: ignore[union-attr]
        owed -= set(() if m is None else m.summed)
        if owed:
            gradients.append(gradient_problem(call.title, x.shape, x.is_parameter, m, i in assumed))
    results: list[Ways] = []
    for shape, layout in itertools.zip_longest(call.shapes, strategy.results[: len(call.shapes)]):
        results.append(_way_of(shape, layout, tuple(sorted(same)), merged))
    notes = [f"{call.title}: a tensor of shape {call.operands[i].shape} counts as this rank's shard" for i in assumed]  # type: ignore[union-attr]
    if draws:
        notes.append(f"{call.title} draws the same numbers for the shard of each rank")
    return Verdict(gradients=tuple(gradients), results=tuple(results), notes=tuple(notes))


def _way_of(shape: tuple[int, ...], layout: Any, summed: tuple[int, ...], merged: int) -> Ways:
    if layout is None:
        return WHOLE
    if isinstance(layout, Unsized):
        layout = layout.sized(shape)
    if tuple(layout.local_shape) != tuple(shape) or not is_even(layout):
        return Lost("a part whose size the layouts do not tell")
    dims = tuple(d for d in summed if layout.placements[d] is Replicate())
    return (mark_of(layout, dims, merged if any(isinstance(p, Shard) for p in layout.placements) else 0),)


def _is_native(rule_call: Any, call: Call, strategy: Strategy, mesh: DeviceMesh) -> bool:
    """Return whether the local call of a rule only calls the native operation.

    It must pass its arguments on unchanged, return the native result unchanged, and not communicate.
    """
    platform = mesh.platform

    def native(operands: Any, static: Any) -> Any:
        same = static == call.static and len(operands) == len(call.values)
        if not same or any(a is not b for a, b in zip(operands, call.values, strict=True)):
            raise _OtherCallError
        return call.result

    def refuse(event: CollectiveEvent) -> None:
        raise _OtherCallError

    LISTENERS.append(refuse)
    try:
        with platform.no_dispatch(), platform.no_grad():
            given = rule_call(
                LocalCall(platform, native, call.values, call.static, strategy.operands, strategy.results)
            )
            return given is call.result
    except Exception:
        return False
    finally:
        LISTENERS.remove(refuse)


class _OtherCallError(Exception):
    """Raised if the local call of a rule does more than call the native operation."""


def _judge_joined(call: Call) -> Verdict:
    """Judge an operation on a `Joined` tensor. A split or slice into the concatenated pieces restores their
    placements."""
    first = call.operands[0]
    count = len(call.shapes)
    if first is None or not isinstance(first.ways, Joined) or sum(x is not None for x in call.operands) > 1:
        return Verdict(results=(Lost(f"{call.title} of pieces that differ"),) * count)
    joined = first.ways
    if call.name == "split" and call.static[1] % len(first.shape) == joined.dim:
        sizes = tuple(shape[joined.dim] for shape in call.shapes)
        if sizes == joined.sizes:
            return Verdict(results=joined.marks)
    if call.name == "getitem":
        piece = _piece(joined, call.static[0], first.shape)
        if piece is not None:
            return Verdict(results=(_resized(piece, call.shapes[0]),))
    if call.shapes == (first.shape,) and OPERATIONS[call.name].elementwise:
        return Verdict(results=(joined,))
    return Verdict(results=(Lost(f"{call.title} of pieces that differ"),) * count)


def _piece(joined: Joined, index: tuple, shape: tuple[int, ...]) -> Ways | None:
    """Return the placements of the piece that contains the slice ``index`` of a concatenated tensor, or None.

    The slice must take all elements of all dimensions except the concatenated one.
    """
    taken = taken_along(index, shape, joined.dim)
    if taken is None or taken.step != 1:
        return None
    begins = itertools.accumulate(joined.sizes, initial=0)
    for begin, size, ways in zip(begins, joined.sizes, joined.marks, strict=False):
        if begin <= taken.start and taken.stop <= begin + size:
            return ways
    return None


def _resized(ways: Ways, shape: tuple[int, ...]) -> Ways:
    """Return ``ways``, the marks of a replicated tensor, changed to the global ``shape``."""
    if not isinstance(ways, tuple):
        return ways
    return tuple(None if m is None else Mark(replicated_layout(m.layout.mesh, shape), m.summed) for m in ways)
