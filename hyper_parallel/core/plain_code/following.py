"""`Following`, which judges the operations of a program on marked plain tensors, between styled modules.

A tensor gets its first mark when a DTensor is converted to it. Marks are compared with the plan when a plain tensor is
converted to a DTensor. `DTensor.to_local` and `DTensor.from_local` report these conversions, so styles need not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hyper_parallel.core.caches import Cache
from hyper_parallel.core.layouts.layout import Layout
from hyper_parallel.core.layouts.placement_types import Shard
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.operations.binding import bind_of
from hyper_parallel.core.plain_code.borders import Rows, keeps_parts, merged_rows, misfit, output_problem
from hyper_parallel.core.plain_code.findings import Finding, Problem
from hyper_parallel.core.plain_code.inputs import Inputs
from hyper_parallel.core.plain_code.judge import Call, Operand, Verdict, judge
from hyper_parallel.core.plain_code.marks import (
    WHOLE,
    Held,
    Joined,
    Lost,
    Mark,
    Ways,
    held,
    is_even,
    mark_of,
    ways_of,
    write_marks,
)
from hyper_parallel.core.plain_code.report import Report
from hyper_parallel.core.plain_code.sizes import Roots, number_problems, sizes_of_part
from hyper_parallel.core.plain_code.views import marks_of_base
from hyper_parallel.core.plain_code.zeros import joined_operands, zeros_beside
from hyper_parallel.core.program_places import place_in_program
from hyper_parallel.core.rules import OPERATIONS
from hyper_parallel.core.rules.batch_parts import BATCH_PART
from hyper_parallel.platform.contract import Platform
from hyper_parallel.platform.contract.interception import name_of
from hyper_parallel.platform.watching import tensors_in

__all__ = ["FOLLOWING", "UNEVEN", "Following"]

#: The reason for not following a shard whose size differs between ranks.
UNEVEN = "parts of unequal size"
_VERDICTS: Cache = Cache(1 << 14, "verdicts on plain code")
#: Operations whose result means the same as their operand, such as a cast.
_SAME = ("alias", "contiguous", "linear_unary")
#: Words in names of collectives whose results may differ from rank to rank, or are not known yet.
_DIFFERING = ("to_all", "scatter", "wait")
#: The followed programs, innermost last. Only the innermost program gets reports.
FOLLOWING: list[Following] = []


class Following(Report):
    """A followed program and its report.

    The backend reports operations. DTensors report conversions from and to plain tensors.

    Attributes:
        paused: number of styled modules whose calls are running.
        on_reached: function to call if there are `reached` findings, before a styled module communicates; or None.
    """

    def __init__(self, model: Any, platform: Platform) -> None:
        super().__init__()
        self._platform = platform
        self._thread = threading.get_ident()
        self._paths = {id(module): path for path, module in platform.named_modules(model)}
        self.paused = 0
        self.on_reached: Callable[[], None] | None = None
        self._mesh: DeviceMesh | None = None
        self._inside: Any = None
        self._styled, self._own_samples = "", False
        self._rows: Rows | None = None
        self._ways: tuple[Mark | None, ...] = ()
        self._kept: tuple[Mark | None, ...] = ()
        self._roots: Roots = {}
        self._inputs = Inputs()

    @property
    def is_here(self) -> bool:
        """Return whether the program runs in the caller's thread. Programs in other threads are not followed."""
        return self._thread == threading.get_ident()

    # ------------------------------------------------------------------------------------------------ operations
    def sizes(self, x: Any, given: Sequence[int]) -> tuple[int, ...]:
        """Return the shape ``given`` of ``x``, which a program reads. This implements `Follower.sizes`."""
        return sizes_of_part(ways_of(x), given, self._roots)

    def operation(self, op: Any, func: Any, args: tuple, kwargs: dict, call: Callable[[], Any]) -> Any:
        """Run an operation, judge it, and record its results' placements, as `Follower.operation` says."""
        platform, title = self._platform, name_of(func)
        if platform.in_backward():  # a recomputed forward
            return call()
        bound = None if op is None else _bound(op, func, args, kwargs)
        if bound is None:
            result = call()
            collective = platform.is_collective(func)
            if collective:
                self._communicated(args, kwargs, title)
            if not collective or any(word in title for word in _DIFFERING):
                self._lose(result, args, kwargs, title)
            return result
        operands, static = bound
        kind = platform.Tensor
        trains = [platform.requires_grad(x) if isinstance(x, kind) else None for x in operands]
        zeros = zeros_beside(op.name, operands, platform)
        result = call()
        target = operands[0] if op.in_place else result
        results = [target] if isinstance(target, kind) else list(tensors_in(target, kind))
        # An operation may return its operand, which keeps its marks.
        if not results or (not op.in_place and any(y is x for y in results for x in operands)):
            if OPERATIONS[op.name].gathers:
                note = f"{title} reads values of a shard"
                self.notes[note] = self.notes.get(note, 0) + 1
            return result
        self.asked += 1
        marks: list[Held] = []
        described: tuple[Operand | None, ...] = tuple(
            None if needs is None else self._described(x, needs, marks)
            for x, needs in zip(operands, trains, strict=True)
        )
        source = next((h.source for h in marks if h.source), "")
        if zeros or op.name == "cat":
            described, operands = joined_operands(described, operands, zeros)
        mesh = self._mesh_of(described)
        ways: Sequence[Ways] = (WHOLE,) * len(results)
        findings = tuple(dict.fromkeys(f for h in marks for f in h.findings)) if any(h.findings for h in marks) else ()
        if mesh is not None:
            shapes = tuple(tuple(y.shape) for y in results)
            asked = Call(op.name, title, static, described, shapes, op.in_place, operands, target)
            verdict = self._verdict(asked, mesh)
            problems = (*verdict.problems, *(p for p in verdict.gradients if p.certain or self._are_read(operands)))
            if not verdict.problems and None in described:
                problems += number_problems(title, operands, self._roots, platform, results[0])
            findings += tuple(self._find(problem, title) for problem in problems)
            for note in verdict.notes:
                self.notes[note] = self.notes.get(note, 0) + 1
            ways = (Lost("after a finding"),) * len(results) if verdict.problems else verdict.results
            lost = next((w for w in ways if isinstance(w, Lost)), None)
            if lost is not None and not verdict.problems and not any(isinstance(h.ways, Lost) for h in marks):
                self.unknown[lost.why] = self.unknown.get(lost.why, 0) + 1
        stated = op.name in _SAME and any(h.stated for h in marks)
        write_marks(platform, results, Held(WHOLE, source, stated, findings), ways)
        if op.in_place:
            self._mark_base(operands[0], source, findings)
        return result

    def _described(self, x: Any, trains: bool, marks: list[Held]) -> Operand:
        """Describe an operand, and append its recorded placement to ``marks``."""
        found = held(x)
        if found is not None:
            marks.append(found)
        parameter = trains and isinstance(x, self._platform.Parameter)
        return Operand(tuple(x.shape), WHOLE if found is None else found.ways, trains, parameter)

    def _are_read(self, operands: Sequence[Any]) -> bool:
        """Return whether a parameter or a model input may be among ``operands`` without a mark, or have produced
        them."""
        # A program may set ``requires_grad`` of zeros that it has made, for the sake of activation checkpointing.
        platform = self._platform
        plain = [x for x in operands if platform.is_tensor(x) and platform.requires_grad(x) and held(x) is None]
        kinds = (platform.Parameter, *self._inputs)
        return any(isinstance(x, platform.Parameter) or x in self._inputs for x in plain) or any(
            platform.is_made_with(x, kind) is not False for x in plain for kind in kinds
        )

    def _verdict(self, call: Call, mesh: DeviceMesh) -> Verdict:
        """Return the verdict on a call. Verdicts are cached, because they do not depend on the values of tensors."""
        scalars = tuple(value for value, x in zip(call.values, call.operands, strict=True) if x is None)
        key: Any = (call.name, call.title, call.operands, call.shapes, call.in_place, mesh)
        try:
            found = _VERDICTS.get((key, call.static, scalars))
            key = (key, call.static, scalars)
        except TypeError:  # unhashable static arguments of element-wise operations do not affect the verdict
            found = _VERDICTS.get(key)
        if found is None:
            try:
                found = _VERDICTS[key] = judge(call, mesh)
            except Exception:
                if self.on_reached is None:  # otherwise this is a first call, whose check the user did not request
                    raise
                found = Verdict(results=(Lost(f"{call.title}, which could not be judged"),) * len(call.shapes))
        return found

    def _mesh_of(self, operands: tuple[Operand | None, ...]) -> DeviceMesh | None:
        """Return the mesh of the operands' recorded placements, or None if all operands are replicated."""
        for x in operands:
            if x is None or x.ways is WHOLE:
                continue
            if not isinstance(x.ways, tuple):
                return self._mesh
            for mark in x.ways:
                if mark is not None:
                    return mark.layout.mesh
        return None

    def _mark_base(self, view: Any, source: str, findings: tuple[Finding, ...]) -> None:
        """Record the placement of the base tensor of a view that was written to."""
        platform = self._platform
        base, ways = platform.base_of(view), ways_of(view)
        if base is None or (ways == WHOLE and not findings) or held(base) is not None:
            return
        found: Ways = ways
        if isinstance(ways, tuple) and ways != WHOLE:
            of_base = tuple(base.shape), platform.strides(base)
            found = marks_of_base(ways, tuple(view.shape), platform.strides(view), *of_base)
        write_marks(platform, (base,), Held(WHOLE, source, findings=findings), (found,))

    def _lose(self, result: Any, args: tuple, kwargs: dict, title: str) -> None:
        """Record that the placements of an unknown operation's results are unknown."""
        # A returned argument keeps its placement, unless the operation writes to it.
        given = list(tensors_in((args, kwargs), self._platform.Tensor))
        writes = kwargs.get("out") is not None or title.rstrip("_") + "_" == title
        results = [y for y in tensors_in(result, self._platform.Tensor) if writes or not any(y is x for x in given)]
        if not results:
            return
        marks = [h for x in given if (h := held(x)) is not None]
        lost = next((h.ways for h in marks if isinstance(h.ways, Lost)), None)
        if lost is None:
            lost = Lost(title)
            self.unknown[title] = self.unknown.get(title, 0) + 1
        findings = tuple(dict.fromkeys(f for h in marks for f in h.findings))
        write_marks(self._platform, results, Held(WHOLE, findings=findings), (lost,) * len(results))

    def _communicated(self, args: tuple, kwargs: dict, title: str) -> None:
        """Withdraw the findings about the arguments of a collective, because the program itself combines the shards."""
        self.unknown[title] = self.unknown.get(title, 0) + 1
        for x in tensors_in((args, kwargs), self._platform.Tensor):
            found = held(x)
            if found is not None:
                for finding in found.findings:
                    if finding not in self._reached:
                        self._found.pop(finding, None)
                self._platform.write_mark(x, Held(Lost("a collective of the program's own"), found.source))

    def _find(self, problem: Problem, title: str) -> Finding:
        where, module = place_in_program(self._paths, self._platform.Tensor)
        finding = Finding(problem.kind, where, module, title, problem.text, problem.remedy, problem.certain)
        self._found[finding] = self._found.get(finding, 0) + 1
        return finding

    # ------------------------------------------------------------------------------------------------ borders
    def given(self, x: Any, layout: Layout, summed: tuple[int, ...] = ()) -> None:
        """Record the placement of ``x``, made from a DTensor. Its gradient is partial along ``summed``."""
        if not self.is_here:
            return
        self._mesh = layout.mesh
        rows, merged = self._rows, 0
        if rows is not None and layout.placements == (Shard(0),) and layout.shape[0] == rows.count:
            merged, rows.problem = rows.merged, None
        mark = mark_of(layout, tuple(d for d in summed if layout.mesh.shape[d] > 1), merged)
        if mark is None or self._own_samples or self._platform.in_backward():
            return
        if is_even(layout):
            # For one head of one token, the placement of the style is only one of several possible placements.
            ways = self._kept or (self._ways if mark in self._ways else (mark,))
            self._platform.write_mark(x, Held(ways, self._styled, stated=True))
        else:
            self.lose(x, UNEVEN, layout.mesh)

    def joined(self, x: Any, pieces: Sequence[Any], dim: int) -> None:
        """Record the placements of ``x``, which a style concatenated from ``pieces`` along ``dim``."""
        if not self.is_here:
            return
        dim %= len(x.shape)
        found = Joined(dim, tuple(p.shape[dim] for p in pieces), tuple(ways_of(p) for p in pieces))
        self._platform.write_mark(x, Held(found, self._styled, stated=True))

    def lose(self, x: Any, why: str, mesh: DeviceMesh) -> None:
        """Record that the placement of ``x``, a shard on ``mesh``, is unknown. ``why`` is the reason in the report."""
        if not self.is_here:
            return
        self._mesh = mesh
        if self._own_samples or self._platform.in_backward():
            return
        self.unknown[why] = self.unknown.get(why, 0) + 1
        self._platform.write_mark(x, Held(Lost(why), self._styled, stated=True))

    def cut_of(self, x: Any, mesh: DeviceMesh, whole: int, usual: Shard) -> Shard | None:
        """Return the placement of a plain tensor that is known to be a shard on the 1-D ``mesh``, else None.

        Return None also if one of the last ``whole`` dimensions is sharded. Some shapes, such as one head of one token,
        have several possible placements. Among these, ``usual`` is preferred.
        """
        ways, found = ways_of(x), []
        for mark in ways if isinstance(ways, tuple) else ():
            if mark is not None and mark.layout.mesh is mesh:
                placement = mark.layout.placements[0]
                if isinstance(placement, Shard) and placement.dim < mark.layout.ndim - whole:
                    found.append(placement)
        first = usual.dim % max(len(x.shape), 1)
        return min(found, key=lambda placement: placement.dim != first, default=None)

    def taken(self, x: Any, layout: Layout) -> None:
        """Check that a plain tensor, which becomes a DTensor of ``layout``, has this layout."""
        if not self.is_here or self._platform.in_backward():
            return
        self.reach(x)
        ways = ways_of(x)
        if not isinstance(ways, tuple) or self._own_samples or BATCH_PART.get() is not None:
            return
        platform, shape = self._platform, tuple(x.shape)
        if ways == WHOLE and (mark := mark_of(layout)) is not None and is_even(layout) and x in self._inputs:
            # The caller of the model gives this input as the style declares it.
            self._inputs.declare(x, Held((mark,), stated=True), platform)
            return
        trains = platform.requires_grad(x)
        computed = trains and bool(platform.is_made_with(x, x))
        problems = [misfit(mark, layout, shape, trains, computed) for mark in ways]
        first = problems[0]
        if first is not None and all(problems):
            if first.certain and keeps_parts(self._inside, ways, layout):
                first, self._kept = replace(first, certain=False), ways
            if self._rows is not None and not first.certain:
                self._rows.problem = first  # no problem if the module returns its rows in the same order
                return
            self._reached.add(self._find(first, "from_local"))
            if self.on_reached is not None:
                self.on_reached()

    def begins(self, inputs: Any) -> None:
        """Store the ``inputs`` of the model, because a style may declare that they are shards."""
        for x in tensors_in(inputs, self._platform.Tensor):
            self._inputs.add(x)

    def ends(self) -> None:
        """Remove the placements that styles have declared for inputs of the model."""
        self._inputs.clear(self._platform)

    def gives(self, output: Any) -> None:
        """Check the ``output`` of the model. A shard or a partial tensor is a finding, unless a style returned it or an
        input is placed equally."""
        for y in tensors_in(output, self._platform.Tensor):
            self.reach(y)
            found = held(y)
            if found is None or found.stated or not isinstance(found.ways, tuple):
                continue
            problem = output_problem(found.ways, tuple(y.shape), found.source)
            if problem is not None and not self._inputs.are_placed_as(found.ways):
                self._reached.add(self._find(problem, "the model's output"))

    def reach(self, values: Any) -> None:
        """Record that a styled module or the caller receives these tensors, so that findings about them count."""
        for x in tensors_in(values, self._platform.Tensor):
            found = held(x)
            if found is not None:
                self._reached.update(found.findings)
        if self._reached and self.on_reached is not None:
            self.on_reached()

    def is_inside(self, module: Any) -> bool:
        """Return whether ``module`` is the innermost running styled module, or the caller is in another thread."""
        return self._inside is module or not self.is_here

    def styled(
        self, call: Callable[..., Any], module: Any, name: str, *, own_samples: bool = False
    ) -> Callable[..., Any]:
        """Return ``call`` of a styled module, wrapped so that nothing inside is judged. ``name`` is for messages.

        With ``own_samples`` each rank has different samples inside, as in data parallelism, and tensors get no marks.
        """
        if not self.is_here:
            return call

        def run(*args: Any, **kwargs: Any) -> Any:
            before = self._inside, self._styled, self._own_samples, self._rows, self._ways, self._kept
            self._inside, self._styled, self._own_samples = module, name, own_samples or self._own_samples
            first = next(tensors_in(args, self._platform.Tensor), None)
            rows = self._rows = merged_rows(first)
            ways = () if first is None else ways_of(first)
            self._ways, self._kept = ways if isinstance(ways, tuple) else (), ()
            self.paused += 1
            try:
                result = call(*args, **kwargs)
            finally:
                self.paused -= 1
                self._inside, self._styled, self._own_samples, self._rows, self._ways, self._kept = before
            if rows is not None and rows.problem is not None:
                self._reached.add(self._find(rows.problem, "from_local"))
            return result

        return run


def _bound(op: Any, func: Any, args: tuple, kwargs: dict) -> tuple[tuple, Any] | None:
    """Return the operands and static arguments of a call, or None for arguments that its row does not cover. The
    operation itself raises the best error."""
    try:
        operands, static = bind_of(op)(func, args, kwargs)
    except Exception:
        return None
    return operands, static
