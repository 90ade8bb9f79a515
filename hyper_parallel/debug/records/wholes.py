"""Full tensors, assembled from the local parts that ranks recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import prod

import numpy as np

from hyper_parallel.debug.records.files import Entry, Place, Record
from hyper_parallel.debug.records.samples import grid_of

__all__ = ["Tensor", "Whole", "difference", "tensors_of"]


@dataclass(frozen=True)
class Whole:
    """A tensor, or samples of one.

    Attributes:
        shape: shape of the full tensor.
        grid: for each dimension, the indices whose values are recorded.
        values: values at these indices.
        squares: sum of the squares of all elements.
        not_finite: number of elements that are infinite or NaN.
        sums: `samples.signed_sums` of the full tensor; None if unknown.
        how: how parts without known placements were assembled, for people.
        spread: largest relative difference between the replicas of several ranks, as far as recorded values show it.
    """

    shape: tuple[int, ...]
    grid: tuple[np.ndarray, ...]
    values: np.ndarray
    squares: float
    not_finite: int
    sums: np.ndarray | None
    how: str = ""
    spread: float = 0.0

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))


def difference(a: Whole, b: Whole, floor: float = 0.0) -> float:
    """Return the norm of the difference, divided by the larger norm.

    The result is the larger of two values: one from the common sampled elements, and one estimated from the sums of all
    elements.

    Args:
        a, b: tensors of one shape.
        floor: minimum root mean square for the norm, because smaller values are rounding noise.
    """
    if a.not_finite != b.not_finite:
        return float("inf")
    if not a.size:
        return 0.0
    x, y = _common(a, b)
    finite = np.isfinite(x) & np.isfinite(y)
    if (np.isfinite(x) != np.isfinite(y)).any():
        return float("inf")
    x, y = x[finite], y[finite]
    if not x.size:
        return 0.0
    norm = max(float(np.linalg.norm(x)), float(np.linalg.norm(y)), floor * x.size**0.5)
    found = float(np.linalg.norm(x - y)) / norm if norm else 0.0
    if a.sums is not None and b.sums is not None:
        whole = max(a.squares, b.squares, floor**2 * a.size) ** 0.5
        # The estimate is halved, because it may be too large by chance.
        estimate = float(np.sqrt(np.mean(np.square(a.sums - b.sums)))) / whole if whole else 0.0
        if x.size < a.size:
            found = max(found, estimate / 2)
    return found


def _common(a: Whole, b: Whole) -> tuple[np.ndarray, np.ndarray]:
    """Return the values of two tensors at their common sampled indices."""
    if all(np.array_equal(i, j) for i, j in zip(a.grid, b.grid, strict=True)):
        return a.values.reshape(-1), b.values.reshape(-1)
    own, other = [], []
    for i, j in zip(a.grid, b.grid, strict=True):
        _, first, second = np.intersect1d(i, j, return_indices=True)
        own.append(first)
        other.append(second)
    return a.values[np.ix_(*own)].reshape(-1), b.values[np.ix_(*other)].reshape(-1)


class Tensor:
    """A tensor of a record, with the local parts of ranks.

    Args:
        record: the record of the tensor.
        parts: rank -> its entry, for each rank that has one.
        order: position in the order in which the first of these ranks recorded.
    """

    def __init__(self, record: Record, parts: dict[int, Entry], order: int) -> None:
        self.record, self.parts, self.order = record, parts, order
        self.entry = parts[min(parts)]
        self._ways: list[Whole] | None = None

    def ways(self) -> list[Whole]:
        """Return the candidates for the full tensor. There is one if the placements of the parts are known."""
        if self._ways is None:
            self._ways = list(self._made())
        return self._ways

    def like(self, other: Whole) -> Whole | None:
        """Return the candidate with the shape of ``other`` that differs least from it; None if no shape matches."""
        fitting = [way for way in self.ways() if way.shape == other.shape]
        return min(fitting, key=lambda way: max(difference(way, other), way.spread), default=None)

    def strays(self) -> tuple[int, float] | None:
        """Return the rank whose replica differs most from the first replica, and the relative difference. Return None
        if all replicas are equal."""
        worst: tuple[int, float] | None = None
        for group in self._copies():
            first = self.parts[group[0]]
            for rank in group[1:]:
                other = self.parts[rank]
                if other.digest == first.digest:
                    continue
                a, b = np.array(first.own_sums), np.array(other.own_sums)
                norm = max(float(np.linalg.norm(a)), float(np.linalg.norm(b)))
                found = float(np.linalg.norm(a - b)) / norm if norm else 0.0
                found = float("inf") if first.not_finite != other.not_finite else found
                if worst is None or found > worst[1]:
                    worst = (rank, found)
        return worst

    def _copies(self) -> Iterator[list[int]]:
        """Yield the ranks that hold replicas of one part."""
        for ranks, place in self._groups():
            if place is None:
                continue
            array = np.array(ranks).reshape(place.shape)
            rest = [d for d, letter in enumerate(place.placements) if letter != "R"]
            same = np.moveaxis(array, rest, range(len(rest))).reshape(*[array.shape[d] for d in rest], -1)
            for row in same.reshape(-1, same.shape[-1]):
                if len(row) > 1 and all(int(r) in self.parts for r in row):
                    yield [int(r) for r in row]

    def _groups(self) -> Iterator[tuple[tuple[int, ...], Place | None]]:
        """Yield each group of ranks that share a tensor, and their `Place`."""
        seen: set[tuple[int, ...]] = set()
        for rank, entry in sorted(self.parts.items()):
            place = None if entry.place < 0 else self.record.places[rank][entry.place]
            ranks = (rank,) if place is None else place.ranks
            if ranks not in seen:
                seen.add(ranks)
                yield ranks, place

    def _made(self) -> Iterator[Whole]:
        pieces: list[list[Whole]] = []
        names: set[str] = set()
        for ranks, place in self._groups():
            if any(rank not in self.parts for rank in ranks):
                return
            own = [self.parts[rank] for rank in ranks]
            names |= set(place.names) if place is not None else set()
            if place is not None and own[0].whole is not None:
                if "?" in place.placements:
                    return
                pieces.append([self._of_boxes(ranks)])
            elif place is None:
                pieces.append([self._one(ranks[0])])
            else:
                ones: list[Whole | None] = [
                    None if self.parts[rank].values is None else self._one(rank) for rank in ranks
                ]
                pieces.append(list(self._folded(ones, place.shape, place.placements)))
        if not pieces or not all(pieces):
            return
        if len(pieces) == 1:
            yield from pieces[0]
            return
        root, count = self.record.root, len(pieces)
        shape: tuple[int, ...] = (count,)
        if root is not None:
            rest = tuple(n for n, name in zip(root.shape, root.names, strict=True) if name not in names)
            shape = rest if np.prod(rest, dtype=int) == count else shape
        for way in zip(*pieces, strict=False):
            yield from self._folded(list(way), shape, ("?",) * len(shape))

    def _one(self, rank: int) -> Whole:
        """Return the part of one rank as an independent tensor."""
        entry = self.parts[rank]
        if entry.whole is not None:
            return self._of_boxes((rank,))
        grid = tuple(grid_of(entry.local, self.record.largest))
        shape = tuple(map(len, grid))
        sums = np.array(entry.own_sums) if entry.own_sums else None
        return Whole(entry.local, grid, self._values(rank, shape), entry.squares, entry.not_finite, sums)

    def _values(self, rank: int, shape: Sequence[int]) -> np.ndarray:
        start, count = self.parts[rank].values or (0, 0)
        return np.asarray(self.record.arrays[rank][start : start + count]).reshape(shape)

    def _of_boxes(self, ranks: Sequence[int]) -> Whole:
        """Return the full tensor, assembled from the boxes that the ranks hold.

        If several ranks hold values of one box, these are partial sums.
        """
        entries = [self.parts[rank] for rank in ranks]
        shape = entries[0].whole or ()
        grid = tuple(grid_of(shape, self.record.largest))
        values = np.zeros(tuple(map(len, grid)))
        squares, not_finite, sums = 0.0, 0, np.zeros(len(entries[0].sums))
        for rank, entry in zip(ranks, entries, strict=True):
            if entry.values is None:
                continue
            start = entry.values[0]
            for offsets, sizes, _ in entry.boxes:
                index = tuple(
                    slice(*np.searchsorted(places, (offset, offset + size)))
                    for places, offset, size in zip(grid, offsets, sizes, strict=True)
                )
                box = values[index]
                count = box.size
                values[index] = box + np.asarray(self.record.arrays[rank][start : start + count]).reshape(box.shape)
                start += count
            squares, not_finite = squares + entry.squares, not_finite + entry.not_finite
            sums = sums + np.array(entry.sums)
        return Whole(tuple(shape), grid, values, squares, not_finite, sums if sums.size else None)

    def _folded(self, ones: Sequence[Whole | None], shape: Sequence[int], placements: Sequence[str]) -> Iterator[Whole]:
        """Yield the possible full tensors for the ranks' parts on a mesh of ``shape``.

        The last mesh dimension shards last.
        """
        options = []
        array = np.empty(len(ones), object)
        array[:] = list(ones)
        array = array.reshape(shape)
        for dim, letter in enumerate(placements):
            options.append([letter] if letter != "?" else self._letters(array, dim))
        for chosen in product(*options):
            found: np.ndarray | None = array
            for letter in reversed(chosen):
                found = None if found is None else _fold_last(found, letter)
            if found is None or found.item() is None:
                continue
            told = [c for c, p in zip(chosen, placements, strict=True) if p == "?" and c != "R"]
            made: Whole = found.item()
            yield replace(made, how=", ".join(map(_words, told)))
            if self.entry.kind == "gradient":
                yield from _averaged(
                    made, told, [n for n, c, p in zip(shape, chosen, placements, strict=True) if p == "?" and c != "R"]
                )

    def _letters(self, array: np.ndarray, dim: int) -> list[str]:
        """Return possible placements of parts along a mesh dimension. Equal parts cannot be partial sums."""
        rows = np.moveaxis(array, dim, 0).reshape(array.shape[dim], -1)
        same = all(
            a is not None
            and b is not None
            and a.shape == b.shape
            and np.array_equal(a.values, b.values, equal_nan=True)
            for row in rows[1:]
            for a, b in zip(rows[0], row, strict=True)
        )
        ndim = max((len(one.shape) for one in array.reshape(-1) if one is not None), default=0)
        return ["R", *(f"S{d}" for d in range(ndim)), *(() if same else "P")]


def _averaged(whole: Whole, told: Sequence[str], sizes: Sequence[int]) -> Iterator[Whole]:
    """Yield the gradients divided by numbers of losses, as if the program had averaged separate losses of ranks.

    ``sizes`` are the sizes of the mesh dimensions along which ranks may have separate losses.
    """
    products = {prod(some) for count in range(1, len(sizes) + 1) for some in combinations(sizes, count)}
    for n in sorted(products - {1}):
        yield replace(
            whole,
            values=whole.values / n,
            squares=whole.squares / n**2,
            sums=None if whole.sums is None else whole.sums / n,
            how=f"{', '.join(map(_words, told))}, over {n} losses",
        )


def _words(letter: str) -> str:
    kind = {"P": "summands of ranks added up", "R": "the first of copies"}
    return kind.get(letter) or f"parts of ranks joined along dimension {letter[1:]}"


def _fold_last(array: np.ndarray, letter: str) -> np.ndarray | None:
    """Assemble parts along the last mesh dimension; None if their shapes do not match."""
    made = np.empty(array.shape[:-1], object)
    for index in np.ndindex(made.shape):
        pieces = list(array[index])
        if letter == "R":
            there = [p for p in pieces if p is not None]
            made[index] = _one_of(there) if there else None
            continue
        if any(p is None for p in pieces):
            made[index] = None
            continue
        found = _added(pieces) if letter == "P" else _joined(pieces, int(letter[1:]))
        if found is None:
            return None
        made[index] = found
    return made


def _one_of(copies: Sequence[Whole]) -> Whole:
    """Return the first replica, whose ``spread`` becomes its largest difference from the other replicas."""
    first = copies[0]
    spread = max((difference(first, p) if p.shape == first.shape else float("inf") for p in copies[1:]), default=0.0)
    return replace(first, spread=max(spread, *(p.spread for p in copies)))


def _added(pieces: Sequence[Whole]) -> Whole | None:
    first = pieces[0]
    if any(p.shape != first.shape for p in pieces):
        return None
    values = np.sum([p.values for p in pieces], axis=0)
    found = [p.sums for p in pieces if p.sums is not None]
    sums = np.sum(found, axis=0) if len(found) == len(pieces) else None
    # If all elements are recorded, their squares are exact. Otherwise the sums with random signs estimate them.
    if values.size == first.size or sums is None:
        squares = float(np.square(values[np.isfinite(values)]).sum()) * first.size / max(values.size, 1)
    else:
        squares = float(np.mean(np.square(sums)))
    not_finite, spread = sum(p.not_finite for p in pieces), max(p.spread for p in pieces)
    return replace(first, values=values, squares=squares, not_finite=not_finite, sums=sums, spread=spread)


def _joined(pieces: Sequence[Whole], dim: int) -> Whole | None:
    rest = {p.shape[:dim] + p.shape[dim + 1 :] for p in pieces}
    if len(rest) > 1 or any(len(p.shape) <= dim for p in pieces):
        return None
    start, places = 0, []
    for piece in pieces:
        places.append(piece.grid[dim] + start)
        start += piece.shape[dim]
    grids = [p.grid[:dim] + p.grid[dim + 1 :] for p in pieces]
    if any(not np.array_equal(i, j) for grid in grids[1:] for i, j in zip(grids[0], grid, strict=True)):
        return None
    first = pieces[0]
    return Whole(
        (*first.shape[:dim], start, *first.shape[dim + 1 :]),
        (*first.grid[:dim], np.concatenate(places), *first.grid[dim + 1 :]),
        np.concatenate([p.values for p in pieces], axis=dim),
        sum(p.squares for p in pieces),
        sum(p.not_finite for p in pieces),
        None,
        spread=max(p.spread for p in pieces),
    )


def tensors_of(record: Record) -> dict[tuple, Tensor]:
    """Return the tensors of a record by their keys, in the order of the first rank that has them.

    If a gradient was recorded several times, as in a repeated backward, the last one counts.
    """
    found: dict[tuple, dict[int, Entry]] = {}
    order: dict[tuple, int] = {}
    for rank, entries in record.entries.items():
        for i, entry in enumerate(entries):
            found.setdefault(entry.key, {})[rank] = entry
            order.setdefault(entry.key, i)
    return {key: Tensor(record, parts, order[key]) for key, parts in found.items()}
