"""Following a program: every operation on plain tensors with marks is judged, between the styled modules of a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hyper_parallel.core.communication.recorder import LISTENERS, CollectiveEvent
from hyper_parallel.core.layouts.layout import Layout, get_layout
from hyper_parallel.core.layouts.placement_types import Replicate, Shard
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.plain_code.findings import Finding, Problem, place_in_program
from hyper_parallel.core.plain_code.judge import Call, Operand, Verdict, judge
from hyper_parallel.core.plain_code.marks import (
    WHOLE,
    Held,
    Joined,
    Lost,
    Mark,
    Ways,
    describe,
    held,
    is_even,
    mark_of,
    partial_dims,
    same_cut,
    tensors_in,
    ways_of,
)
from hyper_parallel.platform.contract import Platform
from hyper_parallel.platform.contract.interception import name_of

__all__ = ["FOLLOWING", "Following", "follow"]

#: The program that is followed, if one is.
FOLLOWING: list[Following] = []


class Following:
    """A program that is followed. The backend hands over its operations, DTensors the borders of plain code.

    Attributes:
        findings: in the order in which they were met, each once.
        modules: finding -> how many modules have it.
        unknown: names of operations that could not be followed -> how often.
        notes: facts that are no findings -> how often.
        asked: number of operations that were judged.
        paused: whether the program is inside of a styled module.
    """

    def __init__(self, model: Any, platform: Platform) -> None:
        self.platform = platform
        self.paths = {id(module): path for path, module in platform.named_modules(model)}
        self.findings: dict[Finding, int] = {}
        self.unknown: dict[str, int] = {}
        self.notes: dict[str, int] = {}
        self.asked, self.paused, self.mesh = 0, 0, None
        self._verdicts: dict[Any, Verdict] = {}

    # ------------------------------------------------------------------------------------------------ operations
    def operation(self, op: Any, func: Any, args: tuple, kwargs: dict, call: Callable[[], Any]) -> Any:
        """Run ``call()``, an operation of which some argument has marks, and mark its results. ``op`` is its row in the
        op table, None for an operation without one."""
        platform = self.platform
        title = name_of(func)
        if op is None:
            result = call()
            self._lose(result, args, kwargs, title)
            return result
        bound: Any = None
        try:
            bound = op.bind(func, args, kwargs)
        except Exception:  # noqa: BLE001 - the operation itself says better what is wrong with its arguments
            bound = None
        trains = [platform.is_tensor(x) and platform.requires_grad(x) for x in bound[0]] if bound else []
        result = call()
        if bound is None:
            self._lose(result, args, kwargs, title)
            return result
        operands, static = bound
        target = operands[0] if op.in_place else result
        results = list(tensors_in(target, platform.is_tensor))
        if not results:
            return result
        if not op.in_place and any(y is x for y in results for x in operands):
            return result  # it gave its operand back
        self.asked += 1
        described = tuple(
            Operand(tuple(x.shape), ways_of(x), needs, isinstance(x, platform.Parameter)) if platform.is_tensor(x) else None
            for x, needs in zip(operands, trains, strict=True)
        )
        if op.name == "cat":  # an empty tensor of one dimension joins anything in torch: caches begin so
            kept = [i for i, x in enumerate(described) if x is None or x.shape != (0,)]
            described, operands = tuple(described[i] for i in kept), tuple(operands[i] for i in kept)
        mesh = self._mesh_of(described)
        if mesh is None:
            return result
        asked = Call(
            op.name, title, static, described, tuple(tuple(y.shape) for y in results), op.in_place, operands, target
        )
        verdict = self._verdict(asked, mesh)
        source = next((h.source for x in operands if (h := held(x)) is not None), "")
        for problem in (*verdict.problems, *verdict.gradients):
            self._found(problem, title)
        for note in verdict.notes:
            self.notes[note] = self.notes.get(note, 0) + 1
        if verdict.problems:
            lost = Lost(verdict.problems[0].text, found=True)
            self._mark(results, (lost,) * len(results), source)
        else:
            self._mark(results, verdict.results, source)
        if op.in_place:
            self._mark_base(operands[0], source)
        return result

    def _verdict(self, call: Call, mesh: DeviceMesh) -> Verdict:
        scalars = tuple(x if not self.platform.is_tensor(x) else None for x in call.values)
        key: Any = (call.name, call.title, call.static, call.operands, call.shapes, call.in_place, scalars)
        try:
            found = self._verdicts.get(key)
        except TypeError:  # static arguments of element-wise operations are any objects, and do not count
            key = (call.name, call.title, call.operands, call.shapes, call.in_place)
            found = self._verdicts.get(key)
        if found is None:
            found = self._verdicts[key] = judge(call, mesh)
        return found

    def _mesh_of(self, operands: tuple[Operand | None, ...]) -> DeviceMesh | None:
        for x in operands:
            if x is not None and isinstance(x.ways, tuple):
                for mark in x.ways:
                    if mark is not None:
                        return mark.layout.mesh
            elif x is not None and isinstance(x.ways, (Lost, Joined)):
                return self.mesh
        return None

    def _mark(self, tensors: list[Any], ways: tuple[Ways, ...], source: str) -> None:
        for x, found in zip(tensors, ways, strict=False):
            if found != WHOLE or held(x) is not None:
                self.platform.write_mark(x, None if found == WHOLE else Held(found, source))

    def _mark_base(self, view: Any, source: str) -> None:
        """Mark the tensor of which a view was written to: its cut dimension has the stride and size of the view's."""
        base, ways = self.platform.base_of(view), ways_of(view)
        if base is None or ways == WHOLE or held(base) is not None:
            return
        found: Ways = ways if isinstance(ways, Lost) else Lost("a view that was written to")
        if isinstance(ways, tuple):
            marks: list[Mark] = []
            strides, of_view = self.platform.strides(base), self.platform.strides(view)
            for mark in ways:
                marks += [] if mark is None else _in_base(mark, view, base, of_view, strides)
            found = tuple(dict.fromkeys(marks)) or found
        self.platform.write_mark(base, Held(found, source))

    def _lose(self, result: Any, args: tuple, kwargs: dict, title: str) -> None:
        """Note that the results of an operation are not followed. One that gives no tensor, or an argument back, is
        none."""
        given = list(tensors_in((args, kwargs), self.platform.is_tensor))
        results = [y for y in tensors_in(result, self.platform.is_tensor) if not any(y is x for x in given)]
        if not results:
            return
        lost = next((w for x in given if isinstance(w := ways_of(x), Lost)), None)
        if lost is None:
            self.unknown[title] = self.unknown.get(title, 0) + 1
            lost = Lost(f"{title} has no rule")
        self._mark(results, (lost,) * len(results), "")

    def _found(self, problem: Problem, title: str) -> None:
        where, module = place_in_program(self.paths)
        finding = Finding(problem.kind, where, module, title, problem.text, problem.remedy)
        self.findings[finding] = self.findings.get(finding, 0) + 1

    # ------------------------------------------------------------------------------------------------ borders
    def given(self, x: Any, layout: Layout, summed: tuple[int, ...] = ()) -> None:
        """A DTensor of ``layout`` became the plain tensor ``x``. Along the mesh dimensions ``summed`` its gradient is
        taken as one summand a rank."""
        self.mesh = layout.mesh
        mark = mark_of(layout, tuple(d for d in summed if layout.mesh.shape[d] > 1))
        if mark is None:
            if held(x) is not None:
                self.platform.write_mark(x, None)
            return
        ways: Ways = (mark,) if is_even(layout) else Lost("parts of unequal size")
        if isinstance(ways, Lost):
            self.unknown[str(ways.why)] = self.unknown.get(ways.why, 0) + 1
        self.platform.write_mark(x, Held(ways, self._styled, stated=True))

    def cut_of(self, x: Any, mesh: DeviceMesh) -> Shard | None:
        """How the 1-D ``mesh`` cuts a plain tensor, where it is known to be a part; a cut of the last dimension does
        not count."""
        ways = ways_of(x)
        for mark in ways if isinstance(ways, tuple) else ():
            if mark is not None and mark.layout.mesh is mesh:
                placement = mark.layout.placements[0]
                if isinstance(placement, Shard) and placement.dim < mark.layout.ndim - 1:
                    return placement
        return None

    def joined(self, x: Any, pieces: tuple[Any, ...], dim: int) -> None:
        """A style joined pieces to ``x`` along ``dim``, each with marks of its own."""
        sizes = tuple(piece.shape[dim] for piece in pieces)
        found = Joined(dim % len(x.shape), sizes, tuple(ways_of(piece) for piece in pieces))
        self.platform.write_mark(x, Held(found, self._styled, stated=True))

    def taken(self, x: Any, layout: Layout) -> None:
        """A plain tensor became a DTensor of ``layout``: it must be that."""
        ways = ways_of(x)
        if not isinstance(ways, tuple):
            return
        problems = [self._misfit(x, mark, layout) for mark in ways]
        if problems and all(p is not None for p in problems):
            self._found(problems[0], "from_local")  # type: ignore[arg-type]

    def _misfit(self, x: Any, mark: Mark | None, layout: Layout) -> Problem | None:
        """The problem of a tensor with ``mark`` that is taken for ``layout``, None where there is none."""
        trains = self.platform.requires_grad(x)
        shape = tuple(x.shape)
        wanted = f"is taken for {', '.join(map(str, layout.placements))}"
        if mark is None:
            if trains and self.platform.is_made_with(x, x) and any(isinstance(p, Shard) and n > 1 for p, n in zip(layout.placements, layout.mesh.shape, strict=True)):
                text = f"a plain input of shape {shape}, which is the same on all ranks, {wanted}"
                return Problem("input", text, "Say with input_layouts=Replicate() that it is whole")
            return None
        if mark.layout.mesh is not layout.mesh:
            return None
        for d, (have, want) in enumerate(zip(mark.layout.placements, layout.placements, strict=True)):
            if layout.mesh.shape[d] == 1 or (have is want and not mark.merged and d not in mark.summed):
                continue
            if d in mark.summed and want is Replicate():
                if not trains:
                    continue
                text = f"{describe(mark, shape)} {wanted}: its gradient would be summed over the ranks once more"
                return Problem("input", text, "Leave out partial_features= or grad_placements= where the style reads it")
            if same_cut(have, want) and not mark.merged:
                continue
            remedy = f"Say with input_layouts={have} how it lies, or bring it to {want} before"
            return Problem("input", f"{describe(mark, shape)} {wanted}", remedy)
        return None

    def gives(self, output: Any) -> None:
        """The model gives ``output``: a part or a summand of the whole is a finding, unless a style itself gave it."""
        for y in tensors_in(output, self.platform.is_tensor):
            found = held(y)
            if found is None or found.stated or not isinstance(found.ways, tuple):
                continue
            mark = next((m for m in found.ways), None)
            if mark is None or None in found.ways:
                continue
            text = f"the model gives {describe(mark, tuple(y.shape))}, and no style says so"
            remedy = "Give the last module PrepareModuleOutput, or the layer before a style that gathers"
            if partial_dims(mark.layout) or mark.sharded:
                self._found(Problem("output", text, remedy), "the model's output")

    _styled = ""

    def styled(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        """``call`` of a styled module: nothing inside is asked, and what it gives comes from the module ``name``."""

        def run(*args: Any, **kwargs: Any) -> Any:
            before, self._styled = self._styled, name
            self.paused += 1
            try:
                return call(*args, **kwargs)
            finally:
                self.paused -= 1
                self._styled = before

        return run

    # ------------------------------------------------------------------------------------------------ the report
    def __str__(self) -> str:
        lines = [f"{len(self.findings)} findings in plain code; {self.asked} operations asked"]
        lines += [f"  [{f.kind}] {f}" + (f" ({n} times)" if n > 1 else "") for f, n in self.findings.items()]
        lines += [f"  not followed: {name}, {count} times" for name, count in self.unknown.items()]
        lines += [f"  taken as said: {note}, {count} times" for note, count in self.notes.items()]
        return "\n".join(lines)


def _in_base(mark: Mark, view: Any, base: Any, of_view: tuple[int, ...], strides: tuple[int, ...]) -> Iterator[Mark]:
    """What the base of a view may be that has ``mark``."""
    layout = mark.layout
    cut = [(d, p) for d, p in enumerate(layout.placements) if isinstance(p, Shard)]
    if len(cut) != 1:
        return
    (d, p) = cut[0]
    size, stride = view.shape[p.dim], of_view[p.dim]
    for dim, n in enumerate(base.shape):
        if n == size and (strides[dim] == stride or n == 1):
            whole = list(base.shape)
            whole[dim] = layout.shape[p.dim]
            placements = [q if i != d else p.with_dim(dim) for i, q in enumerate(layout.placements)]
            yield Mark(get_layout(layout.mesh, tuple(placements), tuple(whole)))


def refused(platform: Platform) -> Any:
    """Raise TypeError for a backend that cannot follow programs."""
    raise TypeError(f"the platform {platform.name!r} does not hand over the operations of a program: leave the check out")


@contextmanager
def follow(model: Any, platform: Platform) -> Iterator[Following]:
    """Inside, the program is followed. Marks are forgotten with their tensors."""
    following = Following(model, platform)
    FOLLOWING.append(following)
    LISTENERS.append(_hear_nothing)  # with a listener, styles ask whether a program is followed
    try:
        with platform.follow(following) or refused(platform):
            yield following
    finally:
        LISTENERS.remove(_hear_nothing)
        FOLLOWING.remove(following)


def _hear_nothing(event: CollectiveEvent) -> None:
    """Stand in the list of listeners."""
