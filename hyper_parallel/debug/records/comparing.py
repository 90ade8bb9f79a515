"""`compare`: find the first tensor at which two recorded runs differ by more than rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from hyper_parallel.debug.records import texts
from hyper_parallel.debug.records.aligning import Key, Names, names_between
from hyper_parallel.debug.records.culprits import Culprits, Links
from hyper_parallel.debug.records.files import Record, read_record
from hyper_parallel.debug.records.picture import picture
from hyper_parallel.debug.records.rounding import GROWTH, Rounding, roundoff
from hyper_parallel.debug.records.wholes import Tensor, Whole, difference, tensors_of

__all__ = ["Comparison", "Row", "compare"]

#: The order of kinds within a step: outputs of a module come after its parameters.
_PHASES = {"parameter": 0, "buffer": 0, "input": 1, "output": 1, "gradient": 2, "parameter gradient": 2, "update": 3}


@dataclass(frozen=True)
class Row:
    """A tensor that both records have.

    Attributes:
        kind, step, path, number, slot, of: fields of `files.Entry`.
        shape: shape of the full tensor.
        dtypes: its dtypes in the first and the second record.
        difference: norm of the difference over the larger norm. With a reference it is the difference from the
            reference.
        bound: largest difference that rounding explains.
        departs: whether ``difference`` exceeds ``bound``.
        culprit: module or parameter that caused the first departure; set on the first departing row only.
        how: assumptions with which the full tensor was assembled, and replicas that differ.
    """

    kind: str
    step: int
    path: str
    number: int
    slot: str
    of: str
    shape: tuple[int, ...]
    dtypes: tuple[str, str]
    difference: float
    bound: float
    departs: bool
    culprit: str = ""
    how: str = ""

    @property
    def name(self) -> str:
        """Return a description of the tensor for people."""
        what = f"gradient of the {self.of}" if self.kind == "gradient" else self.kind
        call = f", call {self.number + 1}" if self.number else ""
        slot = f" [{self.slot}]" if self.slot else ""
        return f"{what}{slot} of {self.path or 'the model'}{call}"

    def as_dict(self) -> dict[str, Any]:
        """Return the row as JSON values. JSON has no infinity, so an infinite difference is None."""
        return {**asdict(self), "difference": self.difference if math.isfinite(self.difference) else None}


@dataclass
class Comparison:
    """Comparison of two runs, tensor by tensor. ``str`` and ``print`` show where they first differ.

    Attributes:
        a, b: paths of the records.
        reference: path of the third record, or None.
        rows: tensors of both records, in the order in which the first run computed them.
        only_a, only_b: names of tensors that only one record has.
        unfit: names of tensors that could not be assembled to one shape, with the reasons.
        names: how paths of one record were matched to paths of the other.
        notes: tensors that were not recorded.
    """

    a: str
    b: str
    reference: str | None
    rows: list[Row]
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    unfit: list[str] = field(default_factory=list)
    names: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def departs(self) -> bool:
        """Return whether a tensor differs by more than rounding explains."""
        return self.first is not None

    @property
    def first(self) -> Row | None:
        """Return the first tensor that departs, in forward, backward or updates; None if the runs agree."""
        return next((row for row in self.rows if row.departs), None)

    @property
    def first_gradient(self) -> Row | None:
        """Return the first gradient that departs, or None."""
        kinds = ("gradient", "parameter gradient")
        return next((row for row in self.rows if row.departs and row.kind in kinds), None)

    @property
    def culprit(self) -> str | None:
        """Return the module or parameter that caused the first departure; None if the runs agree."""
        return None if self.first is None else self.first.culprit

    def as_dict(self) -> dict[str, Any]:
        """Return the data as JSON values. Infinite differences, such as that of a missing gradient, are None."""
        first, gradient = self.first, self.first_gradient
        return {
            **{name: value for name, value in asdict(self).items() if name != "rows"},
            "departs": self.departs,
            "culprit": self.culprit,
            "first": None if first is None else first.as_dict(),
            "first_gradient": None if gradient is None else gradient.as_dict(),
            "rows": [row.as_dict() for row in self.rows],
        }

    def svg(self) -> str:
        """Return an SVG picture of the difference and the bound of each tensor, forward above and backward below."""
        return picture(self)

    def table(self) -> str:
        """Return all rows as a table for a terminal."""
        return texts.table(self.rows)

    def __str__(self) -> str:
        return texts.report(self)


def compare(
    a: str | Path, b: str | Path, reference: str | Path | None = None, names: Mapping[str, str] | None = None
) -> Comparison:
    """Compare two records of `record`, and find where the runs first differ. No framework is needed.

    A tensor departs if its relative difference (norm over norm) exceeds the bound of `rounding.Rounding`. With a
    reference, such as a run in float64, ``b`` is compared to the reference. The bound follows from the difference
    between ``a`` and the reference.

    Args:
        a: folder of the run that is assumed to be right.
        b: folder of the other run.
        reference: folder of a third run.
        names: paths of ``a``, or their prefixes, -> paths of ``b``. ``*`` matches one component of a path. Other paths
            are matched automatically.

    Raises:
        RecordError: if a folder holds no record, or a damaged one. ValueError: if the records have no tensor in common.
    """
    records = [read_record(path) for path in (a, b)]
    tensors = [tensors_of(record) for record in records]
    found = names_between(tensors[0], tensors[1], names)
    third = None
    if reference is not None:
        there = tensors_of(read_record(reference))
        third = (there, names_between(tensors[0], there, names))
    made = _Comparing(records, tensors[0], tensors[1], found, third)
    made.run()
    if not made.rows:
        raise ValueError(
            f"{a} and {b} have no tensor in common: the first has {len(tensors[0])}, such as {_some(tensors[0])}, and "
            f"the second has {len(tensors[1])}, such as {_some(tensors[1])}. Map the paths with names=, and record "
            "both runs with the same model"
        )
    notes = [f"{record.path}: {note}" for record in records for note in record.notes]
    return Comparison(
        str(a),
        str(b),
        None if reference is None else str(reference),
        made.rows,
        made.only_a,
        made.only_b,
        made.unfit,
        found.as_dict(),
        notes,
    )


def _some(tensors: Mapping[Key, Tensor]) -> str:
    return ", ".join(repr(path) for path in list(dict.fromkeys(key[2] for key in tensors))[:3]) or "none"


class _Comparing:
    def __init__(
        self,
        records: Sequence[Record],
        a: dict[Key, Tensor],
        b: dict[Key, Tensor],
        names: Names,
        third: tuple[dict[Key, Tensor], Names] | None,
    ) -> None:
        self._a, self._b, self._names, self._third = a, b, names, third
        self._record = records[0]
        self._links = [Links(record, tensors) for record, tensors in zip(records, (a, b), strict=True)]
        self._culprits = Culprits(self._record, a)
        self._rounding = Rounding()
        self._wholes: dict[Key, tuple[Whole, Whole]] = {}
        #: Parameter -> element-wise relative differences of its gradients so far.
        self._uncertain: dict[str, np.ndarray] = {}
        self._drifts: dict[str, float] = {}
        self.rows: list[Row] = []
        self.only_a: list[str] = []
        self.only_b: list[str] = []
        self.unfit: list[str] = []

    def run(self) -> None:
        steps = [{key[1] for key in tensors} for tensors in (self._a, self._b)]
        namesakes = {key: (key[0], key[1], self._names(key[2]), *key[3:]) for key in self._a}
        backwards = {other: key for key, other in namesakes.items()}
        paths = {self._names(call.path): call.path for call in self._record.calls}
        # An input in one record may be the output of a module in the other, if no code runs in between.
        also: dict[Key, list[tuple[Key, Key]]] = {}
        for other in self._b:
            if other not in backwards and other[1] in steps[0]:
                path = paths.get(other[2])
                key = (other[0], other[1], path or "", *other[3:])
                there = None if path is None else self._links[1].same(other, self._links[0], key)
                if there is None:
                    self.only_b.append(_name(other))
                else:
                    also.setdefault(there, []).append((key, other))
        for key in sorted(self._a, key=self._order):
            namesake: Key | None = namesakes[key]
            if namesake not in self._b:
                namesake = self._links[0].same(key, self._links[1], namesakes[key])
            if namesake is not None:
                self._compare(key, key, namesake)
            elif key[0] == "parameter gradient" and self._lacks(namesakes[key]):
                entry = self._a[key].entry
                self._append(key, -1, entry.local, (entry.dtype, ""), math.inf, 0.0, "B: no gradient")
            elif key[1] in steps[1]:
                self.only_a.append(_name(key))
            for named, other in also.get(key, ()):
                self._compare(named, key, other)

    def _order(self, key: Key) -> tuple[float, ...]:
        kind, step = key[0], key[1]
        tensor = self._a[key]
        if kind != "parameter gradient":
            return (step, _PHASES[kind], tensor.order, 0)
        return (step, _PHASES[kind], self._culprits.backward_of(step, key[2]), 1, tensor.order)

    def _compare(self, key: Key, own: Key, other: Key) -> None:
        """Compare two tensors, and add a row with the key ``key``."""
        a, b = self._a[own], self._b[other]
        pair = _pair(a, b)
        if pair is None and a.ways() and b.ways():
            shapes = f"shapes {_shapes(a)} and {_shapes(b)}"
            self._append(key, a.entry.tensor, a.ways()[0].shape, (a.entry.dtype, b.entry.dtype), math.inf, 0.0, shapes)
        if pair is None:
            if not a.ways() or not b.ways():
                self.unfit.append(f"{_name(key)}: {_shapes(a)} and {_shapes(b)}")
            return
        x, y = pair
        self._wholes[key] = pair
        dtypes = (a.entry.dtype, b.entry.dtype)
        self._rounding.see(dtypes, x.shape)
        bound, floor = self._rounding.bound, self._floor(key)
        found = difference(x, y, floor)
        if key[0] == "update":
            bound = max(bound, self._of_update(key, x, y, a, b))
        third = self._of_third(key, x, y, floor, dtypes)
        if third is not None:
            found, bound = third
        how = [text for text in (x.how and f"A: {x.how}", y.how and f"B: {y.how}") if text]
        for letter, tensor, whole in (("A", a, x), ("B", b, y)):
            found = max(found, whole.spread)
            stray = tensor.strays()
            if stray is not None:
                how.append(f"{letter}: the copy of rank {stray[0]} differs by {stray[1]:.1e}")
                found = max(found, stray[1])
        departs = self._append(key, a.entry.tensor, x.shape, dtypes, found, bound, "; ".join(how))
        if not departs:
            self._rounding.agree(found if key[0] != "update" else self._drift(key, x, y, a.entry.scale))

    def _lacks(self, key: Key) -> bool:
        """Return whether a parameter of the second record has no gradient, in a step in which other parameters have
        one."""
        others = (other for other in self._b if other[:2] == key[:2])
        return ("parameter", 0, *key[2:]) in self._b and next(others, None) is not None

    def _append(
        self,
        key: Key,
        tensor: int,
        shape: tuple[int, ...],
        dtypes: tuple[str, str],
        found: float,
        bound: float,
        how: str,
    ) -> bool:
        """Add a row for the tensor with number ``tensor``, and return whether it departs."""
        departs = not found <= bound
        culprit = self._culprits.of(key, tensor) if departs and not self._departed() else ""
        self.rows.append(Row(*key, tuple(shape), dtypes, found, bound, departs, culprit, how))
        return departs

    def _departed(self) -> bool:
        return any(row.departs for row in self.rows)

    def _floor(self, key: Key) -> float:
        """Return the size that a bias gradient would have if its terms did not cancel.

        A gradient below this size is rounding noise.
        """
        if key[0] != "parameter gradient" or len(self._a[key].entry.local) > 1:
            return 0.0
        above = self._wholes.get(self._culprits.gradient_of(key[1], key[2]) or key)
        if above is None or not above[0].size:
            return 0.0
        g = above[0]
        rows = g.size / max(g.shape[-1] if g.shape else 1, 1)
        return math.sqrt(g.squares / g.size * rows) if g.squares == g.squares else 0.0

    def _of_update(self, key: Key, x: Whole, y: Whole, a: Tensor, b: Tensor) -> float:
        """Return the difference between two updates that rounding explains: rounding of the parameter and of its
        gradients so far."""
        size = max(math.sqrt(x.squares / x.size), math.sqrt(y.squares / y.size)) if x.size else 0.0
        if not size:
            return 0.0
        units = max(roundoff(a.entry.dtype), roundoff(b.entry.dtype))
        bound = 4 * units * max(a.entry.scale, b.entry.scale) / size
        gradients = self._wholes.get(("parameter gradient", key[1], *key[2:]))
        if gradients is not None and gradients[0].values.shape == gradients[1].values.shape == x.values.shape:
            g, h = (w.values for w in gradients)
            largest = np.maximum(np.abs(g), np.abs(h))
            relative = np.divide(np.abs(g - h), largest, out=np.zeros_like(largest), where=largest > 0)
            before = self._uncertain.get(key[2])
            relative = relative if before is None else np.maximum(before, relative)
            self._uncertain[key[2]] = relative
            norm = float(np.linalg.norm(x.values))
            if norm:
                bound += 4 * float(np.linalg.norm(np.maximum(np.abs(x.values), np.abs(y.values)) * relative)) / norm
        return bound + self._rounding.bound

    def _drift(self, key: Key, x: Whole, y: Whole, scale: float) -> float:
        """Return the relative difference of a parameter at the start of the next step, after all updates so far."""
        if not x.size or not scale:
            return 0.0
        size = math.sqrt(max(x.squares, y.squares) / x.size)
        drift = self._drifts.get(key[2], 0.0) + difference(x, y) * size / scale
        self._drifts[key[2]] = drift
        return drift

    def _of_third(
        self, key: Key, x: Whole, y: Whole, floor: float, dtypes: tuple[str, str]
    ) -> tuple[float, float] | None:
        """Return the difference of the second record from the reference, and a bound from the first record's
        difference."""
        if self._third is None:
            return None
        tensors, names = self._third
        other = tensors.get((key[0], key[1], names(key[2]), *key[3:]))
        z = None if other is None else other.like(x)
        if z is None:
            return None
        units = [roundoff(dtype) or 2.0**-24 for dtype in dtypes]
        measure = difference(x, z, floor) * max(units[1] / units[0], 1.0)
        return difference(y, z, floor), GROWTH * measure + 4 * units[1]


def _pair(a: Tensor, b: Tensor) -> tuple[Whole, Whole] | None:
    """Return the full tensors of ``a`` and ``b`` in one shape.

    If the parts of a tensor can be assembled in several ways, choose the assemblies that differ least.
    """
    found = [(x, y) for x in a.ways() for y in b.ways() if x.shape == y.shape]
    if not found:
        found = [(x, z) for x in a.ways() for y in b.ways() if (z := _squeezed(y, x)) is not None]
    return min(found, key=lambda pair: max(difference(*pair), pair[0].spread, pair[1].spread), default=None)


def _squeezed(y: Whole, x: Whole) -> Whole | None:
    """Return ``y`` in the shape of ``x`` if only dimensions of size 1 differ, as in convolution kernels; else None."""
    if [n for n in x.shape if n != 1] != [n for n in y.shape if n != 1] or y.values.size != y.size != x.values.size:
        return None
    grid = tuple(np.arange(n) for n in x.shape)
    return Whole(x.shape, grid, y.values.reshape(x.shape), y.squares, y.not_finite, None, y.how)


def _shapes(tensor: Tensor) -> str:
    shapes = sorted({way.shape for way in tensor.ways()})
    return " or ".join(map(str, shapes)) or (
        f"parts of shape {tensor.entry.local} whose positions in the full tensor are unknown"
    )


def _name(key: Key) -> str:
    return Row(*key, (), ("", ""), 0.0, 0.0, False).name + (f" in step {key[1]}" if key[1] else "")
