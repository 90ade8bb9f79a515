"""Check a sharding rule by brute force: run a NumPy operation on shards and compare with the whole.

Every way to run an operation that its `OpSharding` allows is simulated on meshes of several shapes: each mesh dimension
shards one label, or keeps a partial sum, or replicates. The ranks are threads where the rule calls collectives. The
splitting, the meaning of labels and terms, and the assembly of results are written here once more. They are independent
of `core.operations.strategy` on purpose.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from hyper_parallel.core.layouts.chunking import chunk_sizes
from hyper_parallel.core.layouts.layout import get_layout
from hyper_parallel.core.layouts.placement_types import PackedShard, Partial, Placement, Replicate, Shard, StridedShard
from hyper_parallel.core.rules import OPERATIONS
from hyper_parallel.core.rules.filling import bind_filled
from hyper_parallel.core.rules.op_sharding import LocalCall, OpSharding
from hyper_parallel.platform.contract.attention import AttentionRole
from hyper_parallel.platform.contract.collectives import FINISHED
from hyper_parallel.platform.contract.tensors import TensorRole
from hyper_parallel.testing.summands import summands

#: One mesh dimension of 2, 3 and 4 ranks, and two of 2 x 2, of which both may shard the same tensor dimension, either
#: one first.
MESHES = ((2,), (3,), (4,), (2, 2))

_REDUCTIONS = {"sum": np.add, "max": np.maximum, "min": np.minimum}


@dataclass(frozen=True)
class Case:
    """One call of a canonical operation.

    Attributes:
        op: the canonical operation.
        labels: which dimensions the rule must allow to shard, in the manner of einsum: ``"abi,oi,o->abo"``. ``.`` is a
            dimension that must be whole, ``_`` an operand that is no tensor.
        operands: arrays, scalars or None.
        static_args: static arguments.
        native: ``native(operands, static_args)`` on arrays: the result, or a list of them.
    """

    op: str
    labels: str
    operands: tuple
    static_args: tuple
    native: Callable[[tuple, tuple], Any]

    @property
    def shapes(self) -> tuple:
        """The shapes that the rule gets."""
        return tuple(x.shape if isinstance(x, np.ndarray) else None for x in self.operands)

    def sharding(self) -> OpSharding:
        """The answer of the rule. Where it is not linear for the operands, partial sums are completed first."""
        found = OPERATIONS[self.op].rule(self.shapes, self.static_args)
        assert found is not None, f"{self.op} refuses {self.shapes}, {self.static_args}"
        linear = found.linear_for is None or found.linear_for(self.operands)
        return found if linear else replace(found, terms=())

    def __str__(self) -> str:
        shapes = ";".join("x".join(map(str, s)) if s is not None else "_" for s in self.shapes)
        return f"{self.op}-{self.labels}-{shapes}-{self.static_args}"


# ---------------------------------------------------------------- a world of simulated ranks
class _World:
    """Collectives between threads: everyone writes, waits, and reads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barriers: dict[tuple, threading.Barrier] = {}
        self._slots: dict[tuple, list] = {}
        self._lock = threading.Lock()

    def exchange(self, ranks: tuple[int, ...], rank: int, value: Any) -> list:
        with self._lock:
            barrier = self._barriers.setdefault(ranks, threading.Barrier(len(ranks), timeout=30))
            slots = self._slots.setdefault(ranks, [None] * len(ranks))
        slots[ranks.index(rank)] = value
        barrier.wait()
        received = list(slots)
        barrier.wait()
        return received

    def abort(self) -> None:
        with self._lock:
            for barrier in self._barriers.values():
                barrier.abort()


class _Platform(AttentionRole):
    """The verbs of `Platform` that rules use, on NumPy arrays, for one rank."""

    dtypes: ClassVar[dict[str, Any]] = {"float32": np.dtype("float32")}

    fast = None

    Size = tuple
    device_type = "cpu"
    extremes_keep_nan = True
    keeps_memory_order = False
    copies_offsets = True

    def __init__(self, world: _World, rank: int) -> None:
        self.world, self.current = world, rank

    def shape_of(self, x: np.ndarray) -> tuple:
        return x.shape

    def narrow(self, x: np.ndarray, dim: int, start: int, length: int) -> np.ndarray:
        assert 0 <= start <= start + length <= x.shape[dim]
        return np.take(x, range(start, start + length), axis=dim)

    def chunk(self, x: np.ndarray, count: int, dim: int) -> Sequence[np.ndarray]:
        return np.split(x, count, axis=dim)

    def cat(self, xs: Sequence[np.ndarray], dim: int) -> np.ndarray:
        return np.concatenate(xs, axis=dim)

    def contiguous(self, x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x).reshape(x.shape)

    def clone(self, x: np.ndarray) -> np.ndarray:
        return np.array(x)

    alias = detach = clone

    def zeros(self, shape: Sequence[int], like: np.ndarray) -> np.ndarray:
        return np.zeros(shape, like.dtype)

    def ones(self, shape: Sequence[int], like: np.ndarray) -> np.ndarray:
        return np.ones(shape, like.dtype)

    def with_strides(self, x: np.ndarray, strides: Sequence[int], behind: bool = False) -> np.ndarray:
        return np.array(x)  # the place in memory is not tested here

    def masked_fill(self, x: np.ndarray, mask: np.ndarray, value: float) -> np.ndarray:
        assert mask.dtype == bool
        return np.where(mask, np.asarray(value, x.dtype), x)

    def unsqueeze(self, x: np.ndarray, dim: int) -> np.ndarray:
        return np.expand_dims(x, dim)

    def to_dtype(self, x: np.ndarray, dtype: Any) -> np.ndarray:
        return x.astype(dtype)

    def amax(self, x: np.ndarray, dim: int) -> np.ndarray:
        return x.max(axis=dim, keepdims=True)

    def sum_along(self, x: np.ndarray, dim: int) -> np.ndarray:
        return x.sum(axis=dim, keepdims=True)

    def shifted_exp(self, x: np.ndarray, shift: np.ndarray, scale: Any = None) -> np.ndarray:
        return np.exp(x - shift) / (1.0 if scale is None else scale)

    def log(self, x: np.ndarray) -> np.ndarray:
        return np.log(x)

    def gather(self, x: np.ndarray, dim: int, index: np.ndarray) -> np.ndarray:
        return np.take_along_axis(x, index, axis=dim)

    def scatter_add(self, x: np.ndarray, dim: int, index: np.ndarray, source: np.ndarray) -> np.ndarray:
        assert x.ndim == 1
        np.add.at(x, index, source)
        return x

    def places(self, values: np.ndarray, like: np.ndarray) -> np.ndarray:
        return values

    def bytes_of(self, x: np.ndarray) -> bytes:
        return x.tobytes()

    def is_floating_point(self, x: np.ndarray) -> bool:
        return x.dtype.kind == "f"

    def requires_grad(self, x: np.ndarray) -> bool:
        return False

    def supports(self, collective: str, op: str, local: np.ndarray) -> bool:
        return True

    def all_reduce(self, local: np.ndarray, op: str, group: tuple[int, ...]) -> np.ndarray:
        return _REDUCTIONS[op].reduce(self.world.exchange(group, self.current, local))

    def all_gather(self, local: np.ndarray, group: tuple[int, ...], size: int) -> np.ndarray:
        return np.concatenate(self.world.exchange(group, self.current, local), axis=0)

    join, part = TensorRole.join, TensorRole.part

    def empty(self, shape: tuple[int, ...], like: np.ndarray) -> np.ndarray:
        return np.full(shape, np.nan, like.dtype)

    def all_to_all(self, local: np.ndarray, group: tuple[int, ...], size: int) -> np.ndarray:
        mine = group.index(self.current)
        return np.concatenate([np.split(x, size)[mine] for x in self.world.exchange(group, self.current, local)])

    def start_collective(self, collective: str, out: Any, local: Any, op: str, group: tuple, size: int) -> Any:
        assert collective == "shift"
        out[...] = self.world.exchange(group, self.current, local)[group.index(self.current) - 1]
        return FINISHED

    def broadcast(self, local: np.ndarray, src: int, group: tuple[int, ...]) -> np.ndarray:
        return np.array(self.world.exchange(group, self.current, local)[group.index(src)])

    def is_meta(self, x: np.ndarray) -> bool:
        return False

    def strides(self, x: np.ndarray) -> tuple[int, ...]:
        return tuple(step // x.itemsize for step in x.strides)

    def get_rng_state(self) -> None:
        """Ranks share the noise of a case: there is no state to agree on."""

    def set_rng_state(self, state: None) -> None:
        pass

    def all_gather_object(self, value: Any, group: tuple[int, ...], size: int) -> list:
        return [value] * size

    def autograd_function(self, forward: Callable, backward: Callable) -> Callable:
        return lambda x, *static: forward(SimpleNamespace(save_for_backward=lambda *tensors: None), x, *static)

    #: Only backward uses it, which nothing runs here.
    joint_function = autograd_function


class _Mesh:
    """The part of a `DeviceMesh` that `Layout` and the collectives use, for one rank."""

    mesh_dim_names = None

    def __init__(self, shape: tuple[int, ...], rank: int, world: _World) -> None:
        self.shape, self.ndim = shape, len(shape)
        self.ranks = np.arange(world.size).reshape(shape)
        self.coordinate = tuple(int(i) for i in np.unravel_index(rank, shape))
        self.platform = _Platform(world, rank)

    def size(self) -> int:
        return self.ranks.size

    def get_coordinate(self) -> tuple[int, ...]:
        return self.coordinate

    def get_local_rank(self, mesh_dim: int) -> int:
        return self.coordinate[mesh_dim]

    def require_member(self, what: str) -> None:
        """Every simulated rank is in the mesh."""

    def platform_group(self, mesh_dim: int) -> tuple[int, ...]:
        return self.ranks_along(mesh_dim)

    def dim_label(self, mesh_dim: int) -> str:
        return str(mesh_dim)

    def ranks_along(self, mesh_dim: int) -> tuple[int, ...]:
        index: list[Any] = list(self.coordinate)
        index[mesh_dim] = slice(None)
        return tuple(self.ranks[tuple(index)].tolist())


def mesh_of_rank(shape: tuple[int, ...], rank: int) -> Any:
    """A mesh as one simulated rank sees it, for layouts."""
    return _Mesh(shape, rank, _World(int(np.prod(shape))))


# ---------------------------------------------------------------- ways to run
@dataclass(frozen=True)
class Choice:
    """The choice for one mesh dimension: a placement for each operand and result."""

    operands: tuple[Placement | None, ...]
    results: tuple[Placement, ...]
    label: Any = None
    packed: bool = False


@dataclass(frozen=True)
class Way:
    """One way to run on a mesh."""

    mesh: tuple[int, ...]
    choices: tuple[Choice, ...]

    def placements(self, kind: str, i: int) -> tuple[Placement, ...]:
        """Placements of operand or result ``i``."""
        return tuple(getattr(choice, kind)[i] for choice in self.choices)


def choices(case: Case, sharding: OpSharding) -> Iterator[Choice]:
    """All that `OpSharding` allows on one mesh dimension, but for the sizes."""
    yield from _consecutive_choices(sharding)
    if sharding.call is None:
        yield from _packed_choices(case, sharding)


def _packed_choices(case: Case, sharding: OpSharding) -> Iterator[Choice]:
    """A sharded label whose dimension is two unequal parts, and the results of `OpSharding.unpack`."""
    for choice in _consecutive_choices(sharding):
        sizes = _sizes(case, sharding, choice.label)
        never_packed = choice.label in (None, *sharding.nonempty, *sharding.filled)
        if never_packed or len(sizes) > 1 or max(sizes) < 2:
            continue
        size = max(sizes)
        parts = (size // 3 + 1, size - size // 3 - 1)

        def packed(placement: Any, parts: tuple[int, int] = parts) -> Any:
            return PackedShard(placement.dim, parts) if isinstance(placement, Shard) else placement

        yield Choice(tuple(map(packed, choice.operands)), tuple(map(packed, choice.results)), choice.label, packed=True)
    for dim, parts, result_dim in sharding.unpack:
        results = tuple(Shard(result_dim) for _ in sharding.results)
        yield Choice((PackedShard(dim, parts),), results, packed=True)


def _consecutive_choices(sharding: OpSharding) -> Iterator[Choice]:
    tensors = sharding.operands
    replicated = tuple(Replicate() for _ in sharding.results)
    yield Choice(tuple(None if t is None else Replicate() for t in tensors), replicated)
    if sharding.unread:
        yield Choice(tuple(Partial() if i in sharding.unread else Replicate() for i in range(len(tensors))), replicated)
    for label in sorted({x for t in tensors for x in t or () if x is not None}):
        kept = [label in r for r in sharding.results]
        called = sharding.reduce == "call" or label in sharding.combined
        if not (all(kept) or called or (sharding.reduce is not None and not any(kept))):
            continue
        split_terms = [any(label in tensors[i] for i in term) for term in sharding.terms]
        counted = {t[0] for t, is_split in zip(sharding.terms, split_terms, strict=True) if not is_split}
        once = set() if any(kept) or called else counted
        contracted = Replicate() if called else Partial(sharding.reduce or "sum")
        yield Choice(
            tuple(
                None if t is None else Shard(t.index(label)) if label in t else Partial() if i in once else Replicate()
                for i, t in enumerate(tensors)
            ),
            tuple(Shard(r.index(label)) if label in r else contracted for r in sharding.results),
            label,
        )
    for partial in itertools.product(*sharding.terms) if sharding.terms else ():
        yield Choice(
            tuple(None if t is None else Partial() if i in partial else Replicate() for i, t in enumerate(tensors)),
            tuple(Partial() for _ in sharding.results),
        )


def ways(case: Case, sharding: OpSharding, meshes: Sequence[tuple[int, ...]] = MESHES) -> Iterator[Way]:
    """All ways to run on ``meshes``."""
    found = list(choices(case, sharding))
    for mesh in meshes:
        for combination in itertools.product(found, repeat=len(mesh)):
            packed_fit = all(_packed_fits(sharding, c, combination, n) for n, c in zip(mesh, combination, strict=True))
            if packed_fit and all(
                _fits(case, sharding, label, mesh, combination) for label in {c.label for c in combination}
            ):
                if not (_share_label(combination) and combination[1].packed):
                    yield Way(mesh, combination)
                if _share_label(combination) and not combination[0].packed:
                    yield Way(mesh, _right_first(combination, mesh))


def _share_label(combination: tuple[Choice, ...]) -> bool:
    return len(combination) == 2 and combination[0].label == combination[1].label is not None


def _right_first(combination: tuple[Choice, ...], mesh: tuple[int, ...]) -> tuple[Choice, ...]:
    """The same with the second mesh dimension cutting before the first."""
    first, second = combination

    def strided(kind: str) -> Any:
        return tuple(
            StridedShard(p.dim, mesh[1]) if isinstance(p, Shard) and q.is_shard(p.dim) else p
            for p, q in zip(getattr(first, kind), getattr(second, kind), strict=True)
        )

    return replace(first, operands=strided("operands"), results=strided("results")), second


def _packed_fits(sharding: OpSharding, choice: Choice, combination: tuple, n: int) -> bool:
    """Return whether packed shards are the first cut of their dimension, and parts are cut where the results are."""
    if not choice.packed:
        return True
    dims = {p.dim for p in choice.operands if isinstance(p, Shard)}
    for other in combination:
        nested = choice.label is not None and other.label == choice.label
        dims_of_other = {p.dim for p in other.operands if isinstance(p, Shard)}
        if other is not choice and (other.packed or (dims & dims_of_other and not nested)):
            return False
    if sum(other is choice for other in combination) > 1:
        return False
    if choice.label is not None:
        return True
    parts, result_dim = choice.operands[0].sizes, choice.results[0].dim
    after = tuple(shape[result_dim] for shape in sharding.result_shapes)
    return parts == after or all(size % n == 0 for size in (*parts, *after))


def _sizes(case: Case, sharding: OpSharding, label: Any) -> set[int]:
    return {
        size
        for labels, shape in zip(
            (*sharding.operands, *sharding.results), (*case.shapes, *sharding.result_shapes), strict=True
        )
        for own, size in zip(labels or (), shape or (), strict=True)
        if own == label
    }


def _fits(case: Case, sharding: OpSharding, label: Any, mesh: tuple[int, ...], combination: tuple) -> bool:
    if label is None:
        return True
    splits = [n for n, choice in zip(mesh, combination, strict=True) if choice.label == label]
    sizes = _sizes(case, sharding, label)
    units = {number for own, number in sharding.units if own == label}
    if len(sizes | units) > 1 and any(size % int(np.prod(splits)) for size in sizes | units):
        return False
    if label in sharding.nonempty:
        smallest = min(sizes)
        for n in splits:
            smallest = chunk_sizes(smallest, n)[-1]
        return smallest > 0
    return True


# ---------------------------------------------------------------- splitting, running, assembling
def scatter(x: np.ndarray, placements: tuple[Placement, ...], mesh: tuple[int, ...], rng: Any) -> list[np.ndarray]:
    """The local arrays of all ranks, in row-major order."""
    if len(mesh) == 2 and isinstance(placements[0], StridedShard):
        return _swapped(scatter(x, placements[::-1], mesh[::-1], rng), mesh[::-1])
    parts = [x]
    for placement, n in zip(placements, mesh, strict=True):
        parts = [piece for part in parts for piece in _split(part, placement, n, rng)]
    return parts


def _swapped(parts: list[np.ndarray], mesh: tuple[int, ...]) -> list[np.ndarray]:
    """The local arrays in the order of ranks of the mesh with its two dimensions swapped."""
    assert len(mesh) == 2
    return [parts[i * mesh[1] + j] for j in range(mesh[1]) for i in range(mesh[0])]


def _split(x: np.ndarray, placement: Placement, n: int, rng: Any) -> list[np.ndarray]:
    if isinstance(placement, PackedShard):
        parts = np.split(x, np.cumsum(placement.sizes)[:-1], axis=placement.dim)
        pieces = [_split(part, Shard(placement.dim), n, rng) for part in parts]
        return [np.concatenate(of_rank, axis=placement.dim) for of_rank in zip(*pieces, strict=True)]
    if isinstance(placement, Shard):
        ends = np.cumsum(chunk_sizes(x.shape[placement.dim], n))[:-1]
        return np.split(x, ends, axis=placement.dim)
    if isinstance(placement, Partial):
        return summands(x, n, rng)
    return [x] * n


def assemble(parts: list[np.ndarray], placements: tuple[Placement, ...], mesh: tuple[int, ...]) -> np.ndarray:
    """The global array, from the local ones in row-major order."""
    if not mesh:
        return parts[0]
    if len(mesh) == 2 and isinstance(placements[0], StridedShard):
        return assemble(_swapped(parts, mesh), placements[::-1], mesh[::-1])
    each = len(parts) // mesh[0]
    inner = [assemble(parts[i * each : (i + 1) * each], placements[1:], mesh[1:]) for i in range(mesh[0])]
    placement = placements[0]
    if isinstance(placement, PackedShard):
        cuts = [np.cumsum([chunk_sizes(size, mesh[0])[i] for size in placement.sizes])[:-1] for i in range(mesh[0])]
        pieces = [np.split(x, cut, axis=placement.dim) for x, cut in zip(inner, cuts, strict=True)]
        parts = [np.concatenate(part, axis=placement.dim) for part in zip(*pieces, strict=True)]
        return np.concatenate(parts, axis=placement.dim)
    if isinstance(placement, Shard):
        return np.concatenate(inner, axis=placement.dim)
    if isinstance(placement, Partial):
        return _REDUCTIONS[placement.reduce_op].reduce(inner)
    for other in inner[1:]:
        same(other, inner[0], "replicas differ")
    return inner[0]


def same(found: np.ndarray, expected: np.ndarray, what: str = "") -> None:
    """Compare shapes and values."""
    assert np.shape(found) == np.shape(expected), f"{what}: shape {np.shape(found)}, expected {np.shape(expected)}"
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9, err_msg=what)


def run(case: Case, sharding: OpSharding, way: Way) -> list[np.ndarray]:
    """Simulate and return the global results."""
    size = int(np.prod(way.mesh))
    world = _World(size)
    rng = np.random.default_rng(7)
    locals_ = [
        [x] * size
        if labels is None or not isinstance(x, np.ndarray)
        else scatter(x, way.placements("operands", i), way.mesh, rng)
        for i, (x, labels) in enumerate(zip(case.operands, sharding.operands, strict=True))
    ]
    results: list[Any] = [None] * size

    def on_rank(rank: int) -> None:
        mesh = _Mesh(way.mesh, rank, world)
        operand_layouts = tuple(
            None if labels is None else get_layout(mesh, way.placements("operands", i), shape)
            for i, (labels, shape) in enumerate(zip(sharding.operands, case.shapes, strict=True))
        )
        result_layouts = tuple(
            None if None in shape else get_layout(mesh, way.placements("results", i), shape)
            for i, shape in enumerate(sharding.result_shapes)
        )
        operands = tuple(np.array(x[rank]) if isinstance(x[rank], np.ndarray) else x[rank] for x in locals_)
        for x, layout in zip(operands, operand_layouts, strict=True):
            assert layout is None or x.shape == layout.local_shape
        static_args = case.static_args
        if sharding.localize is not None:
            static_args = sharding.localize(static_args, operand_layouts, result_layouts)
            hash(static_args)
        if sharding.call is None or (sharding.native_if is not None and sharding.native_if(operand_layouts)):
            run = bind_filled(lambda _, xs, others: case.native(xs, others), sharding, operand_layouts, mesh.platform)
            found = run(None, operands, static_args)
        else:
            found = sharding.call(
                LocalCall(mesh.platform, case.native, operands, static_args, operand_layouts, result_layouts)
            )
        results[rank] = found = [*found] if isinstance(found, (list, tuple)) else [found]
        assert len(found) == len(result_layouts)
        for i, (y, layout) in enumerate(zip(found, result_layouts, strict=True)):
            if layout is not None:
                assert np.shape(y) == layout.local_shape, f"result {i} on rank {rank}: {np.shape(y)}, {layout}"

    _on_all_ranks(on_rank, world, threads=sharding.call is not None)
    return [
        assemble([results[rank][i] for rank in range(size)], way.placements("results", i), way.mesh)
        for i in range(len(sharding.results))
    ]


def _on_all_ranks(on_rank: Callable[[int], None], world: _World, threads: bool) -> None:
    if not threads:
        for rank in range(world.size):
            on_rank(rank)
        return
    errors: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            on_rank(rank)
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:
            errors.append(error)
            world.abort()

    running = [threading.Thread(target=guarded, args=(rank,)) for rank in range(world.size)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    if errors:
        raise errors[0]


# ---------------------------------------------------------------- the checks
def check(case: Case, sharding: OpSharding | None = None, meshes: Sequence[tuple[int, ...]] = MESHES) -> int:
    """Run ``case`` in all ways, fail where a result differs from the unsharded one, and return the number of ways."""
    sharding = case.sharding() if sharding is None else sharding
    expected = expected_results(case)
    for y, shape in zip(expected, sharding.result_shapes, strict=True):
        assert np.ndim(y) == len(shape), "result_shapes are wrong"
        assert all(b in (None, a) for a, b in zip(np.shape(y), shape, strict=True)), "result_shapes are wrong"
    count = 0
    for way in ways(case, sharding, meshes):
        for i, (found, wanted) in enumerate(zip(run(case, sharding, way), expected, strict=True)):
            same(found, wanted, f"{case}: result {i} of {way}")
        count += 1
    return count


def expected_results(case: Case) -> list[np.ndarray]:
    """The results without sharding."""
    operands = tuple(np.array(x) if isinstance(x, np.ndarray) else x for x in case.operands)
    found = case.native(operands, case.static_args)
    return found if isinstance(found, list) else [found]


def check_labels(case: Case) -> None:
    """Compare the rule's labels with the pattern of the case, up to their names."""
    sharding = case.sharding()
    inputs, _, outputs = case.labels.partition("->")
    found = [*sharding.operands, *sharding.results]
    wanted = [*inputs.split(","), *outputs.split(",")]
    assert len(sharding.operands) == len(case.operands), f"{len(sharding.operands)} operands"
    assert len(found) == len(wanted), f"{found} is not {case.labels}"
    shapes = [*case.shapes, *sharding.result_shapes]
    letters: dict[Any, str] = {}
    for labels, pattern, shape in zip(found, wanted, shapes, strict=True):
        assert (labels is None) == (pattern == "_") == (shape is None), f"{labels} for {pattern}"
        if labels is None:
            continue
        assert len(labels) == len(pattern) == len(shape), f"{labels} for {pattern}, shape {shape}"
        for label, letter in zip(labels, pattern, strict=True):
            assert (label is None) == (letter == "."), f"{found} is not {case.labels}"
            assert label is None or letters.setdefault(label, letter) == letter, f"{found} is not {case.labels}"
    assert len(set(letters.values())) == len(letters), f"{found} is not {case.labels}"


# ---------------------------------------------------------------- mutants: is the check able to fail?
@dataclass(frozen=True)
class Mutant:
    """A wrong `OpSharding`: the change, and the result."""

    kind: str
    sharding: OpSharding = field(repr=False)


def fails(case: Case, mutant: Mutant) -> bool:
    """Return whether `check` rejects ``mutant``."""
    try:
        with np.errstate(all="ignore"):
            check(case, mutant.sharding)
    except Exception:
        return True
    return False


def mutants(case: Case) -> Iterator[Mutant]:
    """Wrong versions of the rule's answer, each with one thing changed."""
    right = case.sharding()
    for name in ("call", "localize"):
        if getattr(right, name) is not None:
            yield Mutant(name, replace(right, **{name: None}))
    for unit in right.units:
        yield Mutant("units", replace(right, units=tuple(other for other in right.units if other != unit)))
    if right.nonempty:
        yield Mutant("nonempty", replace(right, nonempty=()))
    if right.reduce is not None:
        yield Mutant("reduce", replace(right, reduce="min" if right.reduce == "max" else "max"))
    if right.unread:
        yield Mutant("unread", replace(right, unread=(), terms=((0,),)))
    tensors = tuple(i for i, labels in enumerate(right.operands) if labels is not None)
    for i in set(tensors) - {i for term in right.terms for i in term}:
        if case.operands[i].dtype.kind == "f" and not case.op.endswith("_"):
            yield Mutant(f"linear in operand {i}", replace(right, terms=((i,),), unread=()))
    if not right.terms:
        yield Mutant("terms", replace(right, terms=((tensors[0],),)))
    if any(len(term) > 1 for term in right.terms):
        yield Mutant("terms", replace(right, terms=tuple((i,) for term in right.terms for i in term)))
    if len(right.terms) > 1:
        yield Mutant("terms", replace(right, terms=right.terms[:1]))
    for i in tensors:
        for dim, label in enumerate(right.operands[i]):
            if label is None:
                yield from _freed(right, i, dim)
            elif any(label in (labels or ()) for j, labels in enumerate(right.operands) if j != i):
                yield Mutant("label lost", replace(right, operands=relabelled(right.operands, i, dim, None)))
    for lost in right.results[0]:
        if lost is not None:
            results = tuple(tuple(None if label == lost else label for label in labels) for labels in right.results)
            yield Mutant("contracted", replace(right, results=results, reduce="sum"))
    for j, (labels, shape) in enumerate(zip(right.results, right.result_shapes, strict=True)):
        for a, b in itertools.combinations([d for d, label in enumerate(labels) if label is not None], 2):
            if shape[a] == shape[b] > 1:
                swapped = relabelled(relabelled(right.results, j, a, labels[b]), j, b, labels[a])
                yield Mutant("results swapped", replace(right, results=swapped))


def _freed(right: OpSharding, i: int, dim: int) -> Iterator[Mutant]:
    """Allow to shard a dimension of operand ``i`` that must be whole: as if contracted, or with one of the results."""
    operands = relabelled(right.operands, i, dim, "new")
    yield Mutant("label added", replace(right, operands=operands, reduce="sum"))
    whole = [[d for d, label in enumerate(labels) if label is None] for labels in right.results]
    for dims in itertools.product(*whole):
        results = tuple(relabelled((r,), 0, d, "new")[0] for r, d in zip(right.results, dims, strict=True))
        yield Mutant("label added", replace(right, operands=operands, results=results))


def relabelled(tensors: tuple, i: int, dim: int, label: Any) -> tuple:
    """``tensors`` with another label at dimension ``dim`` of number ``i``."""
    changed = (*tensors[i][:dim], label, *tensors[i][dim + 1 :])
    return (*tensors[:i], changed, *tensors[i + 1 :])
