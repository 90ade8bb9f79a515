"""Pending collectives of `fully_shard`, their order, and how much memory is whole at a time."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hyper_parallel import CommDebugMode, fully_shard, get_platform
from hyper_parallel.core.data_parallel.fully_shard import buffers_of
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import close, device

SIZE = 6


class Layer(nn.Module):
    """Notes the events when it computes."""

    def __init__(self, name: str, notes: list[str]) -> None:
        super().__init__()
        self.name, self.notes = name, notes
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: Any) -> Any:
        self.notes.append(f"compute {self.name}")
        return torch.tanh(self.linear(x))


class Model(nn.Module):
    def __init__(self, notes: list[str], checkpointed: str = "") -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(str(i), notes) for i in range(4))
        self.last = nn.Linear(SIZE, SIZE)
        self.checkpointed = checkpointed

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            if self.checkpointed:
                x = checkpoint(layer, x, use_reentrant=self.checkpointed == "reentrant")
            else:
                x = layer(x)
        return self.last(x)


def shard(model: Any, mesh: Any) -> Any:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


class Late:
    """Work whose result is NaN until it is waited for, and whose operand must not be written to before."""

    def __init__(self, what: str, out: Any, result: Any, local: Any, notes: list[str], done: bool) -> None:
        self.what, self.out, self.result, self.notes, self.done = what, out, result, notes, done
        self.local, self.given = local, local.clone()

    def is_completed(self) -> bool:
        return self.done

    def wait(self) -> None:
        if self.result is not None:
            assert self.what == "reduce_scatter" or torch.equal(self.local, self.given)
            self.notes.append(f"wait {self.what}")
            self.out.copy_(self.result)
            self.result = None


def late(platform: Any, notes: list[str], done: bool = False) -> Any:
    """Replace `start_collective`: the collective is done at once, and its result shown when it is waited for. It says
    that it is ``done`` before that, or not."""
    native = type(platform).start_collective

    def start(collective: str, out: Any, local: Any, op: str, group: Any, size: int) -> Any:
        result = torch.empty_like(out)
        native(platform, collective, result, local, op, group, size).wait()
        notes.append(f"start {collective}")
        work = Late(collective, out, result, local, notes, done)
        out.fill_(float("nan"))
        if collective == "reduce_scatter":  # the gathered result may be the shards themselves
            local.fill_(float("nan"))  # may not be read before the wait
        return work

    return start


@on_mesh()
def overlapped(mesh: Any) -> None:
    """Nothing is read early. In the second step gather i + 1 starts before compute i. A reduction is waited for before
    the next one starts, or at the end of backward."""
    platform: Any = get_platform()
    torch.manual_seed(0)
    notes: list[str] = []
    single = Model([]).to(device())
    torch.manual_seed(0)
    sharded = shard(Model(notes).to(device()), mesh)
    x = torch.randn(2, SIZE).to(device())
    platform.start_collective = late(platform, notes)
    steps: list[list[str]] = []
    try:
        for step in range(3):
            sharded.set_reduce_scatter_max_input_buffers(2 if step == 2 else 1)
            single(x).square().sum().backward()
            notes.clear()
            sharded(x).square().sum().backward()
            for (name, p), q in zip(single.named_parameters(), sharded.parameters(), strict=True):
                close(q.grad, p.grad, f"{name} at step {step}")
            steps.append(list(notes))
    finally:
        del platform.start_collective
    reductions = [note.split()[0] for note in steps[2] if note.endswith("reduce_scatter")]
    at_once = platform.fast is None  # a function of autograd returns the reduced gradients
    two = ["start", "wait"] * 5 if at_once else ["start", "start", *["wait", "start"] * 3, "wait", "wait"]
    # A reduction whose average a backend lacks is done before it goes on.
    begun = platform.supports("reduce_scatter", "avg", x)
    assert reductions == (two if begun else []), reductions
    notes = steps[1]
    forward = notes[: notes.index("compute 3") + 1]
    wanted = ["start all_gather", "wait all_gather", "start all_gather"]  # the model, and the first layer
    for i in range(4):
        wanted += ["wait all_gather", *(["start all_gather"] if i < 3 else []), f"compute {i}"]
    assert forward == wanted, forward
    # The model is whole still, and its gradients come last. The gather of a layer starts when backward comes to the
    # unit before, also where that is the model. One reduction is under way at a time, while the next layer computes.
    backward = ["start all_gather"]
    for i in reversed(range(4)):
        backward += ["wait all_gather", *(["start all_gather"] if i else [])]
        backward += [*(["wait reduce_scatter"] if i < 3 and not at_once else []), "start reduce_scatter"]
        backward += ["wait reduce_scatter"] if at_once else []
    backward += [*([] if at_once else ["wait reduce_scatter"]), "start reduce_scatter", "wait reduce_scatter"]
    backward = [note for note in backward if begun or note.endswith("all_gather")]
    assert notes[len(forward) :] == backward, notes[len(forward) :]


@on_mesh()
def done_early(mesh: Any) -> None:
    """A reduction that is done when backward reaches the next unit is waited for there, which frees its buffer. The
    last one of a layer is waited for before that of the model starts."""
    platform: Any = get_platform()
    torch.manual_seed(0)
    notes: list[str] = []
    single, sharded = Model([]).to(device()), Model(notes).to(device())
    sharded.load_state_dict(single.state_dict())
    for layer in shard(sharded, mesh).layers:
        layer.set_force_sum_reduction_for_comms(True)  # of which gloo can begin a reduction
    x = torch.randn(2, SIZE).to(device())
    platform.start_collective = late(platform, notes, True)
    try:
        for step in range(2):
            single(x).square().sum().backward()
            notes.clear()
            sharded(x).square().sum().backward()
            for (name, p), q in zip(single.named_parameters(), sharded.parameters(), strict=True):
                close(q.grad, p.grad, f"{name} at step {step}")
    finally:
        del platform.start_collective
    after = [notes[i + 1 : i + 2] for i, note in enumerate(notes) if note == "start reduce_scatter"]
    assert len(after) >= 4 and after[:3] == [["wait reduce_scatter"]] * 3, notes


class Pair(nn.Module):
    """Two units in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = nn.Linear(SIZE, SIZE), nn.Parameter(torch.ones(SIZE))

    def forward(self, x: Any) -> Any:
        return torch.tanh(self.first(x) * self.scale)


class Outer(nn.Module):
    """Units in units, of which one is called twice, one gets no gradients, and one is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Pair() for _ in range(3))
        self.frozen = nn.Linear(SIZE, SIZE).requires_grad_(False)
        self.left_out, self.last = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.reentrant: bool | None = None

    def forward(self, x: Any) -> Any:
        x = self.frozen(x)
        if self.reentrant:
            x = x.requires_grad_()
        for block in (*self.blocks, self.blocks[1]):
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


@on_mesh()
def nothing_in_vain(mesh: Any) -> None:
    """Each call of a unit, from the second step on, is gathered once in forward and once in backward, prefetched. No
    unneeded unit is gathered: without checkpointing, and with both kinds."""
    platform: Any = get_platform()
    for reentrant in (None, False, True):
        torch.manual_seed(0)
        single = Outer().to(device())
        sharded = copy.deepcopy(single)
        single.reentrant = sharded.reentrant = reentrant
        for block in sharded.blocks:
            fully_shard(block.first, mesh=mesh)
            fully_shard(block, mesh=mesh)
        fully_shard(sharded.frozen, mesh=mesh)
        fully_shard(sharded.left_out, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
        x = torch.randn(2, SIZE).to(device())
        notes: list[str] = []
        for step in range(3):
            single(x).square().sum().backward()
            platform.start_collective = late(platform, notes)
            try:
                with CommDebugMode() as comm:
                    y = sharded(x).square().sum()
                    notes.clear()
                    y.backward()
            finally:
                del platform.start_collective
            for (name, p), q in zip(single.named_parameters(), sharded.named_parameters(), strict=True):
                assert (p.grad is None) is (q[1].grad is None), name
                if p.grad is not None:
                    close(q[1].grad, p.grad, f"{name} at step {step}, {reentrant}")
        # In forward the frozen one, the outermost one, and the two of each of four calls, which backward gathers again.
        # So does computing anew: the inner one, and both where backward begins after it, as reentrant checkpointing has
        # it.
        backward = {None: 8, False: 12, True: 16}[reentrant]
        counts = {"all_gather": 10 + backward, "reduce_scatter": 9}
        assert comm.get_comm_counts() == counts, (reentrant, comm.get_comm_counts())
        gathers = [note.split()[0] for note in notes if note.endswith("all_gather")]
        assert len(gathers) == 2 * backward  # each is waited for
        if reentrant is not True:
            assert gathers == ["start", *["wait", "start"] * (backward - 1), "wait"], gathers


def whole_bytes(model: Any) -> list[int]:
    """Bytes of the storage of whole parameters of each layer, and of the model itself."""
    modules = [*model.layers, model]
    return [
        sum(b.whole.untyped_storage().nbytes() for b in buffers_of(module) if b.whole is not None) for module in modules
    ]


class Census(torch.autograd.Function):
    """Notes which layers are whole when forward and backward come by."""

    @staticmethod
    def forward(ctx: Any, x: Any, note: Any) -> Any:
        ctx.note = note
        note()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        ctx.note()
        return g, None


class Keeps(torch.autograd.Function):
    """A linear function that keeps the weight itself."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.x, ctx.weight = x, weight
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g @ ctx.weight, g.T @ ctx.x


@on_mesh()
def census(mesh: Any, how: str) -> None:
    """Units that are whole: at most two at a time, besides the model. The largest part of a unit's memory is freed, and
    gradients are right."""
    torch.manual_seed(0)
    single = Model([]).to(device())
    torch.manual_seed(0)
    sharded = shard(Model([], how if "reentrant" in how else "").to(device()), mesh)
    most: list[int] = []

    def note() -> None:
        most.append(sum(n > 0 for n in whole_bytes(sharded)[:-1]))

    for layer in sharded.layers:
        layer.linear.register_forward_hook(lambda m, args, y: Census.apply(y, note))
        if how == "keeps":
            layer.linear.forward = lambda x, linear=layer.linear: Keeps.apply(x, linear.weight) + linear.bias
    parts = [torch.randn(2, SIZE).to(device()).requires_grad_() for _ in range(mesh.size())]
    for step in range(3):
        (sum(single(x).square().sum() for x in parts) / len(parts)).backward()
        with torch.autocast(device().type, torch.bfloat16, enabled=how == "autocast"):
            y = sharded(parts[mesh.get_local_rank()])
        assert whole_bytes(sharded)[:-1] == [0] * 4, (step, whole_bytes(sharded))
        y.float().square().sum().backward()
        assert whole_bytes(sharded) == [0] * 5, (step, whole_bytes(sharded))
        for (name, p), q in zip(single.named_parameters(), sharded.parameters(), strict=True):
            close(q.grad, p.grad, f"{name}, {how}", 6e-2 if how == "autocast" else 2e-5)
    assert most and max(most) <= 2, most


class Twice(nn.Module):
    """A linear layer of which the weight is read once more, where that gives it no cotangent."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: Any) -> Any:
        return torch.tanh(self.linear(x)) @ self.linear.weight.detach()


@on_mesh()
def makes_room(mesh: Any) -> None:
    """Every reader of the whole parameters has run, and their memory is freed, when a reduction begins. This includes
    the first unit, whose input needs no gradient, and a unit with frozen parameters, whose input does."""
    platform: Any = get_platform()
    torch.manual_seed(0)
    single = nn.Sequential(*(Twice() for _ in range(3))).to(device())
    single[1].linear.bias.requires_grad_(False)
    sharded = copy.deepcopy(single)
    for unit in (*sharded, sharded):
        fully_shard(unit, mesh=mesh)
    x = torch.randn(2, SIZE).to(device())
    native, whole = platform.start_collective, []

    def start(collective: str, *args: Any) -> Any:
        if collective == "reduce_scatter":
            of_units = [any(b.whole.untyped_storage().nbytes() for b in buffers_of(unit)) for unit in sharded]
            whole.append([i for i, is_whole in enumerate(of_units) if is_whole])
        return native(collective, *args)

    for unit in sharded:
        unit.set_force_sum_reduction_for_comms(True)  # of which gloo can begin a reduction
    platform.start_collective = start
    try:
        single(x).square().sum().backward()
        sharded(x).square().sum().backward()
    finally:
        del platform.start_collective
    for (name, p), q in zip(single.named_parameters(), sharded.parameters(), strict=True):
        if p.requires_grad:
            close(q.grad, p.grad, name)
    assert whole == ([[2], [1], [0]] if platform.fast is None else [[], [], []]), whole


@pytest.mark.parametrize("how", ["plain", "keeps", "autocast", "non-reentrant", "reentrant"])
def test_census(pool: Any, how: str) -> None:
    pool.run(2, census, how)


@pytest.mark.parametrize("job", [overlapped, done_early, nothing_in_vain, makes_room], ids=lambda job: job.__name__)
def test_overlap(pool: Any, job: Any) -> None:
    pool.run(2, job)


class Sometimes(nn.Module):
    """Uses one, none or both of its two layers, by its argument."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)

    def forward(self, x: Any, use: str) -> Any:
        for name in use:
            x = getattr(self, name)(x)
        return x * 1.0


@on_mesh()
def unused(mesh: Any) -> None:
    """A parameter that no rank has used has no gradient; one that some have used has, on all."""
    rank = mesh.get_local_rank()
    for uses in (["a", "a"], ["ab", "a"], ["a", "b"], ["ab", "ab"]):
        torch.manual_seed(0)
        single = Sometimes().to(device())
        torch.manual_seed(0)
        sharded = fully_shard(Sometimes().to(device()), mesh=mesh)
        parts = [torch.randn(2, SIZE).to(device()) for _ in uses]
        (sum(single(x, use).square().sum() for x, use in zip(parts, uses, strict=True)) / 2).backward()
        with CommDebugMode() as comm:
            sharded(parts[rank], uses[rank]).square().sum().backward()
        assert comm.get_comm_counts() == {"all_gather": 1, "reduce_scatter": 1}
        for (name, p), q in zip(single.named_parameters(), sharded.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), (uses, name)
            if p.grad is not None:
                close(q.grad, p.grad, f"{name}, {uses}")


@on_mesh()
def after_failure(mesh: Any) -> None:
    """A failure in forward or in backward leaves nothing behind."""
    torch.manual_seed(0)
    single = Model([]).to(device())
    torch.manual_seed(0)
    sharded = shard(Model([]).to(device()), mesh)
    x = torch.randn(2, SIZE).to(device())

    def fail(*args: Any) -> None:
        raise ArithmeticError("on all ranks")

    handle = sharded.layers[2].register_forward_pre_hook(fail)
    with pytest.raises(ArithmeticError):
        sharded(x)
    handle.remove()
    y = sharded(x)
    handle = sharded.layers[1].linear.register_full_backward_hook(fail)
    y = sharded(x)
    with pytest.raises(ArithmeticError):
        y.sum().backward()
    handle.remove()
    sharded.reset_iter_state()
    for p in sharded.parameters():
        p.grad = None
    for _ in range(2):
        single(x).sum().backward()
        sharded(x).sum().backward()
        for (name, p), q in zip(single.named_parameters(), sharded.named_parameters(), strict=True):
            close(q[1].grad, p.grad, name)


@pytest.mark.parametrize("job", [unused, after_failure], ids=lambda job: job.__name__)
def test_corners(pool: Any, job: Any) -> None:
    pool.run(2, job)
