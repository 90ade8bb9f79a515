"""Training of a model with experts against a single device: losses, outputs, gradients, clipping, weights."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    ExpertParallel,
    PackedShard,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    distribute_tensor,
    fully_shard,
    parallelize_module,
    replicate,
)
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.contract import Platform
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.extent import everything, in_gate

VOCABULARY, FEATURES, HIDDEN, HEAD, EXPERTS, LENGTH = 11, 8, 6, 4, 5, 4
#: Every moment of an optimizer has been used after two steps, which is enough for a change.
STEPS, NORM = 10 if everything() else 2, 0.5
#: Sequences of each data-parallel rank.
SHARES = (2, 1, 3, 1)
TOLERANCE = {np.float64: 1e-12, np.float32: 1e-5}


class Case(NamedTuple):
    """How a model is trained.

    Attributes:
        shape: shape of the mesh ("rest", "ep"). "rest" has one rank if data parallelism uses the ranks of the experts.
        how: ``"fully_shard"`` or ``"replicate"``.
        by_index: whether experts are called with indices, or else with sorted tokens.
        one_batch: whether the batch is a DTensor.
        accumulate: ``"sum"``: each step has two backward passes; ``"keep"``: the first of them sends no gradients.
        optimizer: name of an optimizer of the adapter.
        dtype: dtype of all parameters.
        tp: ``"common"``, ``"inside"`` or ``"sequence"``: placement of tokens and experts under tensor parallelism. Then
            the mesh is ("dp", "tp").
    """

    shape: tuple[int, int]
    how: str = "fully_shard"
    by_index: bool = True
    one_batch: bool = False
    accumulate: str = ""
    optimizer: str = "adamw"
    dtype: Any = np.float64
    tp: str = ""


CASES = {
    "dp = ep": Case((1, 2), by_index=False),
    "dp = ep, replicated": Case((1, 2), "replicate", accumulate="sum"),
    "dp = ep, kept gradients": Case((1, 4), accumulate="keep"),
    "dp = ep, one batch": Case((1, 2), one_batch=True),
    "dp = rest x ep": Case((2, 2), accumulate="keep"),
    "dp = rest x ep, sums": Case((2, 2), by_index=False, accumulate="sum"),
    "dp = rest x ep, replicated": Case((2, 2), "replicate", by_index=False, accumulate="keep"),
    "dp = rest x ep, one batch": Case((2, 2), one_batch=True, accumulate="keep"),
    "dp = rest x ep, one batch, replicated": Case((2, 2), "replicate", one_batch=True),
    "dp x tp, tokens in common": Case((2, 2), tp="common", accumulate="keep"),
    "dp x tp, experts cut inside": Case((2, 2), "replicate", tp="inside"),
    "dp x tp, cut inside, one batch": Case((2, 2), tp="inside", one_batch=True),
    "dp x tp, sequence shards": Case((2, 2), tp="sequence", by_index=False),
    "tp, tokens in common": Case((1, 2), tp="common"),
    "float32": Case((2, 2), accumulate="keep", optimizer="momentum", dtype=np.float32),
    "float32, dp = ep": Case((1, 4), dtype=np.float32),
    "float32, replicated": Case((2, 2), "replicate", by_index=False, dtype=np.float32),
    "float32, one batch": Case((2, 2), one_batch=True, dtype=np.float32),
    "float32, sequence shards": Case((2, 2), tp="sequence", dtype=np.float32),
    "float32, cut inside": Case((2, 2), tp="inside", dtype=np.float32),
}


def near(got: Any, wanted: Any, what: str, tolerance: float, part: Any = ...) -> None:
    """Raise AssertionError unless the difference to ``part`` of the wanted tensor is small relative to the full wanted
    tensor.

    Args:
        got: tensor; of a DTensor this rank's shard is compared.
        wanted: full plain tensor.
        what: name of the tensor in messages.
        tolerance: maximum relative difference of norms.
        part: index of this rank's shard in ``wanted``.
    """
    adapter = get_adapter()
    if isinstance(got, DTensor):
        got, part = got.to_local(), got._layout.local_index()
    got, wanted = (np.asarray(adapter.numpy(x), np.float64) for x in (got, wanted))
    assert got.shape == wanted[part].shape, what
    error, scale = np.linalg.norm(got - wanted[part]), np.linalg.norm(wanted)
    assert error <= tolerance * scale, f"{what}: {error:.2e} of {scale:.2e}"


def build(case: Case) -> Any:
    adapter = get_adapter()
    model = adapter.SparseModel(VOCABULARY, FEATURES, HIDDEN, HEAD, EXPERTS, 2, case.by_index)
    return adapter.load(model, np.random.default_rng(5), case.dtype)


#: How experts lie to tensor parallelism -> arguments of the style.
BESIDE_TP: dict[str, dict[str, Any]] = {
    "common": {"input_layout": Replicate(), "tp_dim": "tp"},
    "inside": {
        "input_layout": Replicate(),
        "tp_dim": "tp",
        "inside": {"gate_up": PackedShard(2, 2), "down": Shard(1)},
    },
    "sequence": {"input_layout": Shard(0), "tp_dim": "tp"},
}
#: Between the layers of a block the features are whole; or each rank has a shard of the sequence.
PLAN = {
    "layers.*.attention.w[qkv]": ColwiseParallel(),
    "layers.*.attention.wo": RowwiseParallel(),
    "layers.*.shared.w[13]": ColwiseParallel(),
    "layers.*.shared.w2": RowwiseParallel(),
}
INTO = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
SEQUENCE_PLAN = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "layers.*.norm?": SequenceParallel(use_local_output=True),
    "layers.*.attention": INTO,
    "layers.*.attention.w[qkv]": ColwiseParallel(),
    "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
    "layers.*.router": SequenceParallel(sequence_dim=0, use_local_output=True),
    "layers.*.shared": INTO,
    "layers.*.shared.w[13]": ColwiseParallel(),
    "layers.*.shared.w2": RowwiseParallel(output_layouts=Shard(1)),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


def distribute_2d(model: Any, mesh: Any, case: Case) -> Any:
    """Apply tensor parallelism, experts over one or both dimensions, and data parallelism.

    Return the data-parallel mesh.
    """
    parallelize_module(model, mesh["tp"], SEQUENCE_PLAN if case.tp == "sequence" else PLAN)
    ep = mesh["dp"] if case.tp == "inside" else mesh["dp", "tp"]._flatten("ep")
    parallelize_module(model, ep, {"layers.*.experts": ExpertParallel(**BESIDE_TP[case.tp])})
    if case.how == "replicate":
        replicate(model, mesh["dp"])
        return mesh["dp"]
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return mesh["dp"]


def distribute(model: Any, mesh: Any, case: Case) -> Any:
    """Apply experts over ep, and data parallelism over both dimensions. Return the data-parallel mesh."""
    if case.tp:
        return distribute_2d(model, mesh, case)
    parallelize_module(model, mesh["ep"], {"layers.*.experts": ExpertParallel()})
    dp = mesh["rest", "ep"]._flatten("dp") if mesh.shape[0] > 1 else mesh["ep"]
    for layer in model.layers:
        if case.how == "replicate":
            if mesh.shape[0] > 1:
                replicate(layer.experts, mesh["rest"])
        else:
            if mesh.shape[0] > 1:
                fully_shard(layer.experts, mesh=mesh["rest"])
            fully_shard(layer, mesh=dp)
    if case.how == "replicate":
        replicate(model, dp)
    else:
        fully_shard(model, mesh=dp)
    return dp


class Run:
    """A model, and the gradients of a step.

    Args:
        model: the model.
        mine: index of this rank's sequences in the batch.
        dp: mesh over which a batch is distributed; None for plain batches.
        share: divisor of losses.
    """

    def __init__(self, model: Any, mine: Any, dp: Any, share: int) -> None:
        self.model, self.mine, self.dp, self.share, self.grads = model, mine, dp, share, None

    def backward(self, ids: np.ndarray, targets: np.ndarray) -> tuple[Any, Any]:
        """Accumulate the gradients; return loss and output."""
        adapter, accumulates = get_adapter(), get_platform().accumulates_gradients
        found: list[Any] = []

        def given(x: Any) -> Any:
            return (
                x if self.dp is None else distribute_tensor(x, self.dp, [Shard(0)] * self.dp.ndim, src_data_rank=None)
            )

        def loss_of(x: Any) -> Any:
            y = adapter.call(self.model, given(x))
            rows = adapter.reshape(y, (-1, VOCABULARY))
            wanted = given(adapter.tensor(targets[self.mine].ravel().astype(adapter.TARGET_DTYPE)))
            loss = adapter.loss(rows, wanted, reduction="sum") * (1.0 / self.share)
            if isinstance(loss, DTensor):
                loss = loss.redistribute(placements=[Replicate()] * self.dp.ndim).to_local()
            found[:] = adapter.detach(loss), y
            return loss, None

        if self.grads is None or not accumulates:
            _, _, grads = adapter.model_value_and_grads(self.model, loss_of, ids[self.mine])
        else:
            adapter.value_and_grads(loss_of, [ids[self.mine]])
            grads = {}
        if accumulates:
            grads = {name: p.grad for name, p in self.model.named_parameters()}
        elif self.grads is not None:
            before = self.grads
            grads = {n: g if before[n] is None else before[n] if g is None else before[n] + g for n, g in grads.items()}
        self.grads = grads
        return found[0], found[1]


def train(case_name: str) -> None:
    case = CASES[case_name]
    mesh = spmd.device_mesh(*case.shape, names=("dp", "tp") if case.tp else ("rest", "ep"))
    if mesh is None:
        return
    if case.dtype is np.float64 and mesh.device_type != "cpu":  # accelerators leave double precision out
        case = case._replace(dtype=np.float32, optimizer="momentum")
    adapter, tolerance = get_adapter(), TOLERANCE[case.dtype]
    single, sharded = build(case), build(case)
    dp = distribute(sharded, mesh, case)
    shares = SHARES[: dp.size()]
    rank = int(np.argwhere(dp.ranks.ravel() == mesh.get_rank())[0][0])
    end = int(np.cumsum(shares)[rank])
    mine = slice(end - shares[rank], end)
    if case.one_batch:
        runs = Run(single, ..., None, 1), Run(sharded, ..., dp, 1)
    else:
        runs = Run(single, ..., None, dp.size()), Run(sharded, mine, None, 1)
    takes = [adapter.optimizer(run.model, case.optimizer, 1e-2)[1] for run in runs]
    for step in range(STEPS):
        rng = np.random.default_rng(step)
        for last in (False, True) if case.accumulate else (True,):
            ids, targets = (rng.integers(0, VOCABULARY, (sum(shares), LENGTH)).astype(np.int64) for _ in range(2))
            what = f"{case_name}, step {step}, {last=}"
            if case.accumulate == "keep":
                sharded.set_requires_gradient_sync(last)
            (loss, y), (got_loss, got_y) = (run.backward(ids, targets) for run in runs)
            if case.one_batch:
                near(got_loss, loss, f"loss, {what}", tolerance)
            near(got_y, y, f"output, {what}", tolerance, mine)
        grads, got = (run.grads or {} for run in runs)
        compare(got, grads, f"gradient, {what}", tolerance)
        grads, got = (adapter.clip(run.model, run.grads, NORM) for run in runs)
        assert abs(sum(np.linalg.norm(adapter.numpy(g)) ** 2 for g in grads.values()) ** 0.5 - NORM) < 1e-4, what
        compare(got, grads, f"gradient that was clipped, {what}", tolerance)
        for take, run, its in zip(takes, runs, (grads, got), strict=True):
            take(its)
            run.grads = None
    compare(held(sharded), held(single), f"weights, {case_name}", tolerance)


def held(model: Any) -> dict[str, Any]:
    platform = get_platform()
    return {
        f"{path}.{name}": p for path, sub in platform.named_modules(model) for name, p in platform.named_parameters(sub)
    }


def compare(got: dict[str, Any], wanted: dict[str, Any], what: str, tolerance: float) -> None:
    assert set(got) == set(wanted)
    for name, x in wanted.items():
        near(got[name], x, f"{name}: {what}", tolerance)


@pytest.mark.parametrize(
    "case",
    in_gate(CASES, ["dp = rest x ep, replicated", "dp = rest x ep, one batch", "dp x tp, sequence shards"]),
)
def test_training(pool: Any, case: str) -> None:
    if type(get_platform()).is_optimizer is Platform.is_optimizer:
        pytest.skip("this platform does not support optimizers")
    pool.run(int(np.prod(CASES[case].shape)), train, case)
