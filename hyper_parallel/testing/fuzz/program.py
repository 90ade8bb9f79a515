"""Programs as data: generated from a seed, equal on every rank, printed in a few lines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from hyper_parallel import PackedShard, Partial, Replicate, Shard, StridedShard
from hyper_parallel.testing.fuzz.words import WORDS, apply, has_step

__all__ = ["Leaf", "Limits", "Program", "Step", "generate", "values_of", "written_leaves"]

MESHES = ((4,), (2,), (3,), (2, 2))
#: Limit of float16 numbers: with larger ones, a summand alone may overflow, or a product of it.
MOST_HALF = 256
#: One in this many seeds makes a program about memory order.
OF_MEMORY = 10
DTYPES = ("float32", "float32", "float32", "float32", "float64", "float16", "int64", "bool")


@dataclass(frozen=True)
class Leaf:
    """An input tensor of a program.

    Attributes:
        shape, dtype: global shape and dtype.
        placements: placements on the mesh.
        requires_grad: whether its gradient is compared.
        seed: seed of its values.
        has_nan: whether some values are NaN.
    """

    shape: tuple[int, ...]
    dtype: str
    placements: tuple[Any, ...]
    requires_grad: bool
    seed: int
    has_nan: bool = False

    def values(self, shaken: int = 0) -> np.ndarray:
        """Return the full values. A positive ``shaken`` adds random errors like rounding, different for each number."""
        values = self._values()
        return _shaken(values, np.random.default_rng((self.seed, shaken))) if shaken else values

    def _values(self) -> np.ndarray:
        rng = np.random.default_rng(self.seed)
        if self.dtype == "bool":
            return rng.random(self.shape) < 0.5
        if self.dtype == "int64":
            return np.asarray(rng.integers(-3, 4, self.shape), np.int64)
        values = np.asarray(rng.standard_normal(self.shape), self.dtype)
        if self.has_nan and values.size:
            values.flat[int(rng.integers(0, values.size))] = np.nan
        return values


def _shaken(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return ``values`` with errors like rounding, if they are floating point."""
    if not np.issubdtype(values.dtype, np.floating):
        return values
    error = (1e-3 if values.dtype == np.float16 else 1e-6) * (1 + np.abs(values))
    return np.asarray(values + error * rng.standard_normal(values.shape), values.dtype)


@dataclass(frozen=True)
class Step:
    """An operation, named by its word or ``redistribute``, with the indices of its input values and its other
    arguments."""

    word: str
    inputs: tuple[int, ...]
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Program:
    """A chain of operations.

    Attributes:
        seed: seed that generated the program.
        mesh: shape of the mesh.
        leaves: input tensors, which are the first values.
        steps: operations; each appends its results to the values.
        outputs: indices of the values that are compared; the floating point ones also form a loss.
        second_order: whether gradients of gradients are compared.
        row_major: see `Limits`.
    """

    seed: int
    mesh: tuple[int, ...]
    leaves: tuple[Leaf, ...]
    steps: tuple[Step, ...]
    outputs: tuple[int, ...]
    second_order: bool = False
    row_major: bool = False

    @property
    def writes(self) -> bool:
        """Return whether the program writes in place."""
        return any(step.word != "redistribute" and WORDS[step.word].writes for step in self.steps)

    def __str__(self) -> str:
        lines = [f"# seed {self.seed}, mesh {self.mesh}" + (", gradients of gradients" if self.second_order else "")]
        for i, leaf in enumerate(self.leaves):
            grad = ", requires_grad" if leaf.requires_grad else ""
            nan = ", NaN" if leaf.has_nan else ""
            lines.append(f"v{i} = {leaf.dtype}{list(leaf.shape)} placed {list(leaf.placements)}{grad}{nan}")
        known = len(self.leaves)
        for step, count in zip(self.steps, _counts(self), strict=True):
            names = ", ".join(f"v{known + i}" for i in range(count))
            known += count
            taken = ", ".join([*(f"v{i}" for i in step.inputs), *map(repr, step.args)])
            lines.append(f"{names} = {step.word}({taken})")
        lines.append("compare " + ", ".join(f"v{i}" for i in self.outputs))
        return "\n".join(lines)


@dataclass(frozen=True)
class Limits:
    """Features that random programs may use with one framework.

    Attributes:
        writes_with_gradients: whether a program may have both in-place writes and gradients.
        nan: whether values may be NaN.
        second_order: whether programs may compare gradients of gradients.
        dtypes: dtypes of leaves.
        without: words that the framework does not have.
        shortest: least length of a dimension of a softmax, and of a sequence.
        gradients_of_nothing: whether the framework's gradients of empty tensors are right.
        gradients_of_steps: whether slices with a step have gradients.
        copies_offsets: whether `contiguous` copies a contiguous view that starts after the first element of its base.
        gradient_shapes: whether the framework's gradients have the shapes of their tensors.
        row_major: whether results other than views are in row-major order, whatever the order of the operands.
    """

    writes_with_gradients: bool = True
    nan: bool = True
    second_order: bool = True
    dtypes: tuple[str, ...] = DTYPES
    without: frozenset[str] = frozenset()
    shortest: int = 1
    gradients_of_nothing: bool = True
    copies_offsets: bool = False
    row_major: bool = False
    gradient_shapes: bool = True
    gradients_of_steps: bool = True


def generate(seed: int, limits: Limits) -> Program:
    """Return the program of a seed."""
    rng = np.random.default_rng((seed, 4421))
    mesh = MESHES[int(rng.choice(len(MESHES), p=(0.4, 0.15, 0.1, 0.35)))]
    second_order = limits.second_order and rng.random() < 0.1
    base = tuple(int(n) for n in rng.choice((0, 1, 2, 3, 4, 5, 6, 7, 8), int(rng.integers(1, 4)), p=_SIZES))
    dtype = "float32" if second_order else str(rng.choice(limits.dtypes[:-2]))
    nan = limits.nan and not second_order and rng.random() < 0.06
    leaves = tuple(_leaf(rng, base, dtype, mesh, second_order, nan, limits) for _ in range(int(rng.integers(1, 4))))
    writes = not second_order and rng.random() < 0.4
    of_memory = seed % OF_MEMORY == 1 and not second_order
    writes = writes or of_memory
    if writes and not limits.writes_with_gradients:
        leaves = tuple(replace(leaf, requires_grad=False) for leaf in leaves)
    program = Program(seed, mesh, leaves, (), (), second_order, limits.row_major)
    values = values_of(program)
    steps: list[Step] = []
    for _ in range(int(rng.integers(2, 9))):
        weights = (_FIRST if len(values) == len(leaves) else _MEMORY) if of_memory else _WEIGHTS
        step = _step(rng, program, values, writes, limits, weights)
        if step is not None:
            steps.append(step)
    results = range(len(leaves), len(values))
    if not results:
        return replace(program, outputs=tuple(range(len(leaves))))
    outputs = {len(values) - 1, *(int(i) for i in rng.choice(results, min(2, len(results)), replace=False))}
    if writes:
        outputs |= {int(rng.integers(0, len(leaves)))}
    return replace(program, steps=tuple(steps), outputs=tuple(sorted(outputs)))


_SIZES = (0.03, 0.12, 0.15, 0.15, 0.2, 0.1, 0.1, 0.05, 0.1)


def _leaf(
    rng: np.random.Generator,
    base: tuple[int, ...],
    dtype: str,
    mesh: tuple[int, ...],
    second_order: bool,
    nan: bool,
    limits: Limits,
) -> Leaf:
    kind = rng.random()
    shape = base
    if kind < 0.25:  # the second factor of a product
        shape = (base[-1], int(rng.integers(1, 6)))
    elif kind < 0.4:  # a tensor that broadcasts
        shape = tuple(1 if rng.random() < 0.4 else n for n in base[int(rng.integers(0, len(base) + 1)) :])
    elif kind < 0.46:  # the weight of a norm
        shape = base[-1:]
    elif kind < 0.56:  # indices of rows or of classes
        shape, dtype = base[: int(rng.integers(1, len(base) + 1))], "int64"
    if not second_order and dtype != "int64" and rng.random() < 0.15:
        dtype = str(rng.choice(limits.dtypes))
    floating = dtype.startswith("float")
    requires_grad = floating and (second_order or rng.random() < 0.7)
    kinds = ("sum",) if second_order else ("sum", "sum", "avg", "max", "min")
    placements = _placements(rng, shape, mesh, kinds if floating and not nan else ())
    return Leaf(shape, dtype, placements, requires_grad, int(rng.integers(0, 1 << 31)), nan and floating)


def _placements(
    rng: np.random.Generator, shape: tuple[int, ...], mesh: tuple[int, ...], reductions: tuple[str, ...] = ()
) -> tuple:
    partial = [Partial(str(rng.choice(reductions)))] if reductions else []
    found: list[Any] = []
    packed = False
    for size in mesh:
        draw = rng.random()
        if packed and draw < 0.3:
            found.append(Shard(found[0].dim))  # a rank's shard of all packed matrices is sharded as one piece
        elif shape and draw < 0.55 and not packed:
            found.append(Shard(int(rng.integers(0, len(shape)))))
        elif shape and draw < 0.62 and not any(p.is_shard() for p in found):
            dim = int(rng.integers(0, len(shape)))
            first = int(rng.integers(0, shape[dim] + 1))
            found.append(PackedShard(dim, (first, shape[dim] - first)) if 0 < first < shape[dim] else Replicate())
            packed = isinstance(found[-1], PackedShard)
        elif draw < 0.8 and partial and size > 1:
            found += partial
        else:
            found.append(Replicate())
        last_first = int(draw * 1000) % 2
    if len(mesh) == 2 and last_first and found[0].is_shard() and found[1].is_shard(found[0].dim):
        # The second mesh dimension shards first.
        return StridedShard(found[0].dim, mesh[1]), found[0] if packed else found[1]
    return tuple(found)


def _step(
    rng: np.random.Generator,
    program: Program,
    values: list[np.ndarray],
    writes: bool,
    limits: Limits,
    words: np.ndarray,
) -> Step | None:
    """Return a random valid step, and append its results to ``values``. ``words`` has the probability of each word."""
    fixed = [values[i] for i, leaf in enumerate(program.leaves) if leaf.requires_grad]
    if rng.random() < 0.1:
        at = int(rng.integers(0, len(values)))
        placements = _placements(rng, values[at].shape, program.mesh)
        values.append(values[at].copy())
        return Step("redistribute", (at,), (placements,))
    # Later values are drawn more often, so that programs are chains.
    weights = np.arange(1.0, len(values) + 1) ** 2
    weights /= weights.sum()
    for _ in range(40):
        word = WORDS[str(rng.choice(_NAMES, p=words))]
        if (word.writes and not writes) or word.name in limits.without:
            continue
        for _ in range(1 if word.count == 1 else 6):
            inputs = tuple(int(i) for i in rng.choice(len(values), word.count, p=weights))
            arrays = [values[i] for i in inputs]
            if word.writes and any(np.shares_memory(arrays[0], leaf) for leaf in fixed):
                continue  # torch refuses to write to a leaf that requires grad
            args = word.choose(rng, *arrays)
            if args is None or ("softmax" in word.name and arrays[0].shape[args[0]] < limits.shortest):
                continue
            if word.name == "contiguous":
                args = (limits.copies_offsets,)
            if word.name == "index" and not (writes or limits.gradients_of_steps) and has_step(*args):
                continue
            try:
                results = apply(word.name, arrays, args, program.row_major)
            except ValueError:
                continue  # NumPy refuses to write to an expanded array
            if not word.writes and any(r.dtype == np.float16 and (np.abs(r) > MOST_HALF).any() for r in results):
                continue
            values += results
            return Step(word.name, inputs, args)
    return None


_NAMES = list(WORDS)


def _likely(weights: dict[str, float]) -> np.ndarray:
    found = np.array([weights.get(name, 0.0) for name in _NAMES])
    return found / found.sum()


_WEIGHTS = _likely({word.name: word.weight for word in WORDS.values()})
#: Probabilities of the first word, and of later words, in programs about memory order.
_FIRST = _likely({"transpose": 1, "permute": 1})
_MEMORY = _likely(
    {
        **dict.fromkeys(("contiguous",), 6.0),
        **dict.fromkeys(("index", "set", "double"), 4.0),
        **dict.fromkeys(("reshape", "transpose"), 3.0),
        **dict.fromkeys(("permute", "split", "chunk", "accumulate"), 2.0),
        **dict.fromkeys(("unsqueeze", "scaled", "neg", "add"), 1.0),
        **dict.fromkeys(("expand", "square", "sum", "amax", "cat", "detach", "diagonal"), 0.4),
    }
)


def values_of(program: Program, shaken: int = 0) -> list[np.ndarray]:
    """Return all values of a program in NumPy. `Leaf.values` explains ``shaken``. Targets of writes are shaken too,
    so that equal numbers differ after a write."""
    values = [leaf.values(shaken) for leaf in program.leaves]
    for number, step in enumerate(program.steps):
        results = _results(program, step, values)
        if shaken and step.word != "redistribute" and WORDS[step.word].writes:
            results[0][...] = _shaken(results[0], np.random.default_rng((program.seed, shaken, number)))
        values += results
    return values


def _results(program: Program, step: Step, values: list[np.ndarray]) -> list[np.ndarray]:
    """Return the arrays that a step of ``program`` appends to ``values``."""
    arrays = [values[i] for i in step.inputs]
    if step.word == "redistribute":
        return [arrays[0].copy()]
    return apply(step.word, arrays, step.args, program.row_major)


def _counts(program: Program) -> list[int]:
    """Return the number of results of each step."""
    values = [leaf.values() for leaf in program.leaves]
    counts: list[int] = []
    for step in program.steps:
        results = _results(program, step, values)
        values += results
        counts.append(len(results))
    return counts


def written_leaves(program: Program) -> bool:
    """Return whether a leaf is written to, directly or through a view."""
    before = [leaf.values() for leaf in program.leaves]
    after = values_of(program)[: len(before)]
    return any(not np.array_equal(a, b, equal_nan=a.dtype.kind == "f") for a, b in zip(before, after, strict=True))
