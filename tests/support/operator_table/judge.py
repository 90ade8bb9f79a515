"""The work of the ranks: call operators on distributed tensors placed in several ways, and compare with plain ones.

One verdict for each form of an operator and for its gradients, the worst that was seen (`ORDER`). The findings of a
rank are compared with those of the others. An exception on some ranks only leaves the others waiting, which counts as
hanging: the exchange tells those at once that they wait in vain. A rank that gets no further for another reason ends,
so that the pool starts anew.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import linecache
import logging
import math
import random
import traceback
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hyper_parallel import DTensor, Partial, Replicate, Shard
from hyper_parallel.core.communication.collectives import all_gather_object
from hyper_parallel.core.layouts.layout import get_layout
from hyper_parallel.core.operations import dispatch as dispatch_module
from hyper_parallel.testing import spmd
from hyper_parallel.testing.fuzz.exchange import installed
from tests.support.operator_table.side import Call, Side, side_of
from tests.support.operator_table.table import ORDER
from tests.support.operator_table.trees import leaves_of, mapped

__all__ = ["judge", "names_of"]

#: Seconds after which a call counts as hanging though it waits for no rank.
PATIENCE = 60
#: Number of ranks -> shapes of their meshes: a line, and where they make one, a grid.
MESHES = {4: ((4,), (2, 2)), 2: ((2,),)}
_BAD = ("wrong", "hanging")
#: How cotangents lie in memory, see `Side.loss`.
WAYS = ("dense", "stretched", "transposed")


class WrongError(AssertionError):
    """A result differs from that of one device."""


# ------------------------------------------------------------------------------------------------ the job
def judge(platform: str, names: list[str], count: int, many: bool, results: str) -> None:
    """Try the operators ``names`` and append a line for each to ``results``: first its name, then the findings.

    Args:
        platform: the backend.
        names: of operators.
        count: samples of each.
        many: whether to try many placements.
        results: path of a file that the first rank writes.
    """
    side = side_of(platform)
    meshes = [spmd.device_mesh(*shape) for shape in MESHES[spmd.world_size]]
    logging.getLogger("hyper_parallel").setLevel(logging.ERROR)
    out = Path(results) if spmd.rank == 0 else None
    for name in names:
        _say(out, {"begun": name})
        _say(out, {"name": name, **_Operator(side, name, meshes, many).verdicts(count)})


def names_of(platform: str) -> tuple[str, list[str]]:
    """The module and the names of a backend's operators; a job."""
    side = side_of(platform)
    return side.TITLE, side.names()


def _say(out: Path | None, line: dict) -> None:
    if out is not None:
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


@functools.cache
def _count_gathered() -> list[str]:
    """Have core note the names of operations that it runs on gathered operands."""
    noted: list[str] = []
    original = dispatch_module.run_gathered

    def run_gathered(func: Any, args: tuple, kwargs: dict, op: Any = None) -> Any:
        noted.append(op.name if op else getattr(func, "__name__", str(func)))
        return original(func, args, kwargs, op)

    dispatch_module.run_gathered = run_gathered
    return noted


# ------------------------------------------------------------------------------------------------ one operator
class _Operator:
    """The trials of one operator."""

    def __init__(self, side: Side, name: str, meshes: list[Any], many: bool) -> None:
        self.side, self.name, self.meshes, self.many = side, name, meshes, many
        self.found: dict[str, dict[str, list[str]]] = {}
        #: Column, place, the call's `unsteady`, and (verdict, reason, problem of the gradients, `_Trial.seen`).
        self.tried: list[tuple[str, str, str, tuple]] = []
        self.gathered = _count_gathered()
        exchange = installed()
        assert exchange is not None, "operators are tried on an OperatorPool"
        self.exchange = exchange

    def verdicts(self, count: int) -> dict[str, Any]:
        """Form -> verdict -> findings, a few of each."""
        try:
            calls = self.side.calls(self.name, count)
        except Exception as error:
            return {"untried": f"no samples: {_first_line(error)}"}
        if not calls:
            return {"untried": "no samples, or none with a tensor"}
        why_not = ""
        for number, call in enumerate(calls):
            for form in self._forms(call, number):
                ways = [way for way in WAYS if way != "transposed" or self.name not in self.side.READS_ROW_MAJOR]
                which = zlib.crc32(f"{self.name} {number}".encode()) % len(ways)
                for way in ways if self.many and form in ("forward", "method") else (ways[which],):
                    why_not = self._try(call, form, number, way) or why_not
        if self.tried:
            self._agree()
        return {"found": self.found} if self.found else {"untried": why_not}

    def _forms(self, call: Call, number: int) -> Iterator[str]:
        yield "method" if number % 2 and "method" in call.forms else "forward"
        yield from (form for form in ("in place", "out=") if form in call.forms)

    def _try(self, call: Call, form: str, number: int, way: str) -> str:
        """Try one call in one form, or say why that cannot be."""
        tensors = [x for x in leaves_of((call.args, call.kwargs)) if self.side.is_tensor(x)]
        if not tensors:
            return "no tensors"
        trial = _Trial(self.side, call, form, tensors, way)
        try:
            trial.alone()
        except Exception:
            trial.places = []  # an operator may have no gradient although the framework claims one
            try:
                trial.alone()
            except Exception as error:
                return f"one device: {_first_line(error)}"  # this sample is not for this form, or for this device
        chance = random.Random(f"{self.name} {form} {number}")
        as_sums = self.many or zlib.crc32(self.name.encode()) % 3 == 0
        for mesh, placements in _placements(tensors, self.side, self.meshes, chance, self.many, form, as_sums):
            self._one(trial, form, mesh, placements)
        return ""

    def _one(self, trial: _Trial, form: str, mesh: Any, placements: list[tuple]) -> None:
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        self.gathered.clear()
        text = ""
        try:
            backward = trial.distributed(mesh, placements)
            verdict = "gathered" if self.gathered else "own rule"
        except WrongError as error:
            verdict, text, backward = "wrong", str(error), None
        except Exception as error:
            verdict, text, backward = "refused" if _is_refusal(error) else "wrong", _first_line(error), None
        problem = self.exchange.end_program()
        faulthandler.cancel_dump_traceback_later()
        if problem:
            verdict, text, backward = "hanging", problem, None
        shapes = [tuple(x.shape) for x in trial.tensors]
        where = f"{tuple(mesh.shape)} {_words(placements)} of {shapes}, cotangents {trial.way}: "
        column = "forward" if form == "method" else form
        if form == "in place" and any(p.is_partial() for p in placements[0]):
            column = "sum in place"
        self.tried.append((column, where, trial.call.unsteady, (verdict, text, backward, trial.seen)))

    def _agree(self) -> None:
        """Put together the findings of all ranks, once for the operator: ranks that share a processor wait long for one
        another."""
        by_rank = all_gather_object([outcome for *_, outcome in self.tried], self.meshes[0], 0)
        self.exchange.end_program()
        for (column, where, unsteady, _), everyone in zip(self.tried, zip(*by_rank, strict=True), strict=True):
            self._judge(column, where, unsteady, everyone)

    def _judge(self, column: str, where: str, unsteady: str, everyone: tuple) -> None:
        verdict, text, backward, seen = max(everyone, key=lambda o: (ORDER.index(o[0]), bool(o[2])))
        if verdict not in _BAD and any(o[3] != seen for o in everyone):
            verdict, text = "wrong", "the ranks have different values"
        if verdict == "hanging":
            text = "; ".join(dict.fromkeys(f"{o[0]}: {o[1]}" for o in everyone if o[1]))
        if verdict not in _BAD and len({o[0] == "refused" for o in everyone}) > 1:
            verdict, text = "wrong", f"only some ranks: {text}"
        where += text
        if verdict in _BAD:
            self._note(column, verdict, where)
            return
        self._note(column, "unsteady" if unsteady == "forward" else verdict, where)
        if unsteady == "backward":
            self._note(unsteady, "unsteady", where)
        if backward is not None:
            wrong = next((o[2] for o in everyone if o[2]), "")
            self._note("backward" if column == "forward" else column, "wrong" if wrong else verdict, where + wrong)

    def _note(self, form: str, verdict: str, text: str) -> None:
        texts = self.found.setdefault(form, {}).setdefault(verdict, [])
        texts.append(text[:600] if len(texts) < 3 and verdict in ORDER[2:] else "")


# ------------------------------------------------------------------------------------------------ one call
class _Trial:
    """One call in one form, alone and distributed."""

    def __init__(self, side: Side, call: Call, form: str, tensors: list[Any], way: str) -> None:
        self.side, self.call, self.form, self.tensors, self.way = side, call, form, tensors, way
        self.places = (
            [i for i, x in enumerate(tensors) if side.requires_grad(x)]
            if call.differentiable and call.compared == "values" and not call.unsteady
            else []
        )
        self.wanted: list[Any] = []
        self.wanted_grads: list[Any] = []
        #: The facts that ranks must agree about.
        self.seen: list[Any] = []

    def _call(self, tensors: list[Any]) -> list[Any]:
        """The outputs with ``tensors`` in the places of tensors: all leaves."""
        remaining = iter(tensors)

        def place(x: Any) -> Any:
            return next(remaining) if self.side.is_tensor(x) else x

        args, kwargs = mapped((self.call.args, self.call.kwargs), place)
        self.side.seed()
        if self.form == "in place":
            self.call.forms[self.form](*args, **kwargs)
            return [args[0]]
        return list(leaves_of(self.call.forms[self.form](*args, **kwargs)))

    def alone(self) -> None:
        """Compute the results of one device."""

        def run(xs: list[Any]) -> tuple[list[Any], Any]:
            if self.form == "in place":
                xs = [self.side.copied(x) for x in xs]
            outputs = self._call(xs)
            tensors = [y for y in outputs if self.side.is_tensor(y)]
            return outputs, self.side.loss(tensors, self._weight, self.way) if self.places else None

        outputs, self.wanted_grads = self.side.differentiate(run, self.tensors, self.places)
        self.wanted = [self._value(y) for y in outputs]

    def distributed(self, mesh: Any, placements: list[tuple]) -> str | None:
        """Compare the results of the ranks of ``mesh``: returns the problem of the gradients, None where there are
        none.

        Raises:
            WrongError: when a result is wrong.
        """
        self.seen = []
        layouts = [get_layout(mesh, p, tuple(x.shape)) for p, x in zip(placements, self.tensors, strict=True)]
        rng = np.random.default_rng(zlib.crc32(repr(placements).encode()))
        locals_ = [
            self.side.tensor(_local_part(self.side.array(x), layout, rng), x)
            for x, layout in zip(self.tensors, layouts, strict=True)
        ]

        def run(xs: list[Any]) -> tuple[list[Any], Any]:
            if self.form == "in place":
                xs = [self.side.copied(x) for x in xs]
            xs = [DTensor._of_part(x, layout) for x, layout in zip(xs, layouts, strict=True)]
            outputs = self._call(xs)
            self._compare(outputs)
            if not self.places or not self.wanted_grads:
                return outputs, None
            tensors = [y for y in outputs if self.side.is_tensor(y)]

            def weigh(y: Any) -> Any:
                return DTensor.from_local(self._weight(y), mesh, (Replicate(),) * mesh.ndim)

            loss = self.side.loss(tensors, weigh, self.way)
            return outputs, loss.full_tensor() if isinstance(loss, DTensor) else loss

        _, grads = self.side.differentiate(run, locals_, self.places)
        if not self.wanted_grads:
            return None
        return self._compare_grads(grads, layouts)

    def _compare(self, outputs: list[Any]) -> None:
        if len(outputs) != len(self.wanted):
            raise WrongError(f"{len(outputs)} results, wanted {len(self.wanted)}")
        values = self.call.compared == "values" and self.call.unsteady != "forward"
        for i, (y, wanted) in enumerate(zip(outputs, self.wanted, strict=True)):
            got = self._value(y.full_tensor() if isinstance(y, DTensor) else y)
            wrong = _difference(got, wanted, values, "float16" in str(getattr(y, "dtype", "")))
            if self.call.compared == "ranks":
                self.seen.append(got.tobytes() if isinstance(got, np.ndarray) else repr(got))
            if wrong:
                placed = list(y.placements) if isinstance(y, DTensor) else type(y).__name__
                raise WrongError(f"result {i} ({placed}): {wrong}")

    def _compare_grads(self, grads: list[Any], layouts: list[Any]) -> str:
        for k, i in enumerate(self.places):
            layout, wanted = layouts[i], self.wanted_grads[k]
            got = grads[k] if grads else None
            if wanted is None:
                wanted = np.zeros(layout.shape)
            wanted = np.asarray(wanted[layout.cotangent.local_index()])
            got = np.zeros(wanted.shape) if got is None else got
            wrong = _difference(got, wanted, True)
            if wrong:
                return f"gradient of operand {i}: {wrong}"
        return ""

    def _weight(self, y: Any) -> Any:
        """A weight for each element of the output ``y``."""
        shape = tuple(y.shape)
        flat = np.arange(math.prod(shape)) % 7
        return self.side.tensor((flat * 0.25 + 0.5).reshape(shape), self.side.weight_like(y))

    def _value(self, y: Any) -> Any:
        return self.side.array(y) if self.side.is_tensor(y) else y


def _difference(got: Any, wanted: Any, values: bool, coarse: bool = False) -> str:
    """The difference between ``got`` and ``wanted``, empty where they agree; ``coarse`` where it has been of 16
    bits."""
    if not isinstance(wanted, np.ndarray):
        if isinstance(wanted, (bool, int, float, complex, str)) and not isinstance(got, np.ndarray):
            same = got == wanted or (isinstance(wanted, float) and np.isclose(got, wanted, equal_nan=True))
            return "" if same else f"{got}, wanted {wanted}"
        return "" if type(got) is type(wanted) else f"a {type(got).__name__}, wanted a {type(wanted).__name__}"
    if not isinstance(got, np.ndarray):
        return f"a {type(got).__name__}, wanted a tensor"
    if got.shape != wanted.shape:
        return f"shape {got.shape}, wanted {wanted.shape}"
    if got.dtype.kind != wanted.dtype.kind:
        return f"dtype {got.dtype}, wanted {wanted.dtype}"
    if not values or not wanted.size:
        return ""
    if wanted.dtype.kind in "fc":
        finite = wanted[np.isfinite(wanted)]
        scale = max(float(np.abs(finite).max()) if finite.size else 0.0, 1e-2)
        tolerance = 5e-2 if coarse else 1e-6 if got.dtype.char in "dD" else 2e-3
        with np.errstate(all="ignore"):
            same = np.isclose(got, wanted, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
    else:
        same = got == wanted
    if np.all(same):
        return ""
    bad = np.argwhere(~np.asarray(same))
    first = tuple(int(i) for i in bad[0])
    return f"{len(bad)} of {wanted.size} elements differ, at {first} {got[first]}, wanted {wanted[first]}"


# ------------------------------------------------------------------------------------------------ placements
def _placements(
    tensors: list[Any], side: Side, meshes: list[Any], chance: random.Random, many: bool, form: str, as_sums: bool
) -> Iterator[tuple[Any, list[tuple]]]:
    """Meshes, each with the placements of all tensors; `Partial` ones among them for ``as_sums``."""
    line, grid = meshes[0], meshes[-1]
    ndims = [len(x.shape) for x in tensors]
    partial = [side.can_be_partial(x) for x in tensors]

    def choice(i: int, sums: float) -> Any:
        if partial[i] and chance.random() < sums:
            return Partial()
        dims: list[Any] = [Replicate(), *(Shard(d) for d in range(ndims[i]))]
        return chance.choice(dims)

    def each(mesh: Any) -> list[tuple]:
        sums = [0.0 if form == "in place" and i == 0 else 0.25 for i in range(len(tensors))]
        return [tuple(choice(i, sums[i]) for _ in range(mesh.ndim)) for i in range(len(tensors))]

    first = [(Shard(0) if n else Replicate(),) for n in ndims]
    last = [(Shard(n - 1) if n else Replicate(),) for n in ndims]
    sums = [(Partial() if p else Replicate(),) for p in partial]
    if form in ("in place", "out=") and not many:
        yield line, first
        yield grid, each(grid)
        return
    yield line, first
    if any(partial) and as_sums:
        yield line, sums
    if grid is not line or not any(partial):
        yield grid, each(grid)
    if not many:
        return
    if last != first:
        yield line, last
    for _ in range(3):
        yield line, each(line)
        yield grid, each(grid)


def _local_part(x: np.ndarray, layout: Any, rng: np.random.Generator) -> np.ndarray:
    """The part of ``x`` on this rank. The parts of a sum are far apart, of both signs, with their extremes
    elsewhere."""
    mesh = layout.mesh
    mine = x
    for mesh_dim, placement in enumerate(layout.placements):
        if placement.is_partial():
            n = mesh.shape[mesh_dim]
            parts = rng.integers(-40, 41, (n, *x.shape)).astype(x.dtype)
            if x.dtype.kind in "fc":
                parts /= 8
            parts[-1] = -parts[:-1].sum(0)
            parts[n // 2] += mine
            mine = parts[mesh.get_coordinate()[mesh_dim]]
    return np.array(mine[layout.local_index()])


def _words(placements: list[tuple]) -> str:
    return "; ".join(
        ",".join("R" if p == Replicate() else f"S{p.dim}" if isinstance(p, Shard) else "P" for p in each)
        for each in placements
    )


# ------------------------------------------------------------------------------------------------ refusals
def _is_refusal(error: BaseException) -> bool:
    """Return whether the library says so itself: the exception comes from a ``raise`` in it."""
    if not isinstance(error, (ValueError, TypeError, NotImplementedError, RuntimeError, IndexError)):
        return False
    frame = traceback.extract_tb(error.__traceback__)[-1]
    line = linecache.getline(frame.filename, frame.lineno or 0)
    return "hyper_parallel" in frame.filename and line.strip().startswith("raise")


def _first_line(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(frame.filename).name}:{frame.lineno}"
    return f"{type(error).__name__} at {where}: {str(error).splitlines()[0] if str(error) else ''}"[:400]
