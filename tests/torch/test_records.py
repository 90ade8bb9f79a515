"""Records on torch: recomputed and compiled forwards, other dtypes, samples, and modules of many kinds."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hyper_parallel.debug import Comparison, compare, record
from hyper_parallel.debug.records.files import read_record
from hyper_parallel.testing.extent import in_gate


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Pair(nn.Module):
    """A module with a mapping and a tuple as output, and keywords."""

    def forward(self, x: Tensor, *, factor: Tensor) -> Any:
        return {"scaled": x * factor, "both": (x, x.square(), "no tensor")}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.pair, self.unused = Layer(), Pair(), nn.Linear(8, 8)
        self.factor = nn.Parameter(torch.full((8,), 0.5))
        self.mode: Any = None

    def again(self, x: Tensor) -> Tensor:
        x = x + self.layer(x)
        return self.layer(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(x) if self.mode is None else checkpoint(self.again, x, use_reentrant=self.mode)
        parts = self.pair(x, factor=self.factor)
        return parts["scaled"] + parts["both"][1]


def model_and_input() -> tuple[Model, Tensor]:
    torch.manual_seed(0)
    return Model(), torch.randn(4, 8, requires_grad=True)


def run(path: Path, model: Any, x: Tensor, **options: Any) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    with record(path, model, **options):
        for _ in range(2):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


def complete(found: Comparison) -> bool:
    return not (found.departs or found.only_a or found.only_b or found.unfit or found.notes)


def test_calls_and_outputs_of_many_kinds(tmp_path: Path) -> None:
    """A module that is called twice, a mapping of tuples, keywords, and a module that is not called."""
    model, x = model_and_input()
    run(tmp_path / "a", copy.deepcopy(model), x)
    model.pair.forward = lambda x, factor: {"scaled": x * factor, "both": (x, x.square() * 1.01, "")}  # type: ignore
    run(tmp_path / "b", model, x)
    assert complete(compare(tmp_path / "a", tmp_path / "a"))
    found = compare(tmp_path / "a", tmp_path / "b")
    assert found.culprit == "pair" and found.first is not None
    assert found.first.name == "output [both.1] of pair" and "output [both.1] of pair" in str(found)
    names = {row.name for row in found.rows}
    assert "output of layer.down, call 2" in names and "gradient of the input [1] of pair" in names
    assert not [name for name in names if "unused" in name and name.startswith(("output", "grad"))]


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_forwards_count_once(tmp_path: Path, reentrant: bool) -> None:
    model, x = model_and_input()
    run(tmp_path / "a", copy.deepcopy(model), x)
    model.mode = reentrant
    run(tmp_path / "b", model, x)
    found = compare(tmp_path / "a", tmp_path / "b")
    assert not found.departs and not found.only_b and not found.unfit
    # A reentrant forward is first run without gradients.
    assert bool(found.only_a) is reentrant and all("gradient of" in name for name in found.only_a)
    assert sum(row.kind == "parameter gradient" for row in found.rows) == 10


@pytest.mark.nightly  # it compiles; the gate compiles elsewhere
def test_compiled_beside_eager(tmp_path: Path) -> None:
    model, x = model_and_input()
    run(tmp_path / "a", copy.deepcopy(model), x)
    compiled: Any = torch.compile(model, backend="aot_eager")
    run(tmp_path / "b", compiled, x)
    found = compare(tmp_path / "a", tmp_path / "b")
    assert not found.departs and not found.only_b
    seen = {(row.kind, row.path) for row in found.rows}
    assert ("output", "") in seen and ("update", "layer.up.weight") in seen


@pytest.mark.parametrize("faulty", [False, True])
def test_bfloat16_beside_float32(tmp_path: Path, faulty: bool) -> None:
    """Rounding to bfloat16 is no departure, and a fault is, with a run in float64 and without."""
    model, x = model_and_input()
    run(tmp_path / "a", copy.deepcopy(model), x)
    run(tmp_path / "c", copy.deepcopy(model).double(), x.detach().double().requires_grad_())
    narrow, given = copy.deepcopy(model).bfloat16(), x.detach().bfloat16().requires_grad_()
    if faulty:
        narrow.layer.act.forward = lambda x: nn.functional.gelu(x) * 1.2
    run(tmp_path / "b", narrow, given)
    for reference in (None, tmp_path / "c"):
        found = compare(tmp_path / "a", tmp_path / "b", reference)
        assert found.culprit == ("layer.act" if faulty else None), str(found)


@pytest.mark.parametrize("place", in_gate([0, 7, 100, 255], [7]))
def test_samples_and_sums(tmp_path: Path, place: int) -> None:
    """A tensor of which there are samples: one other element is found, whether it is a sample or not."""
    model, x = model_and_input()
    run(tmp_path / "a", copy.deepcopy(model), x, largest=20)
    run(tmp_path / "same", copy.deepcopy(model), x, largest=20)
    model.layer.up.weight.data.view(-1)[place] += 0.1
    run(tmp_path / "b", model, x, largest=20)
    assert complete(compare(tmp_path / "a", tmp_path / "same"))
    assert compare(tmp_path / "a", tmp_path / "b").culprit == "layer.up.weight"
    size = sum(file.stat().st_size for file in (tmp_path / "a").glob("*.bin"))
    run(tmp_path / "whole", model, x, largest=None)
    assert 2 * size < sum(file.stat().st_size for file in (tmp_path / "whole").glob("*.bin"))


def test_without_a_model_and_without_an_optimizer(tmp_path: Path) -> None:
    """The outermost modules are found. A loss that is a module has its class as its name."""
    model, x = model_and_input()
    for name in "ab":
        for p in model.parameters():
            p.grad = None
        with record(tmp_path / name) as recorder:
            nn.MSELoss()(model(x), x.detach()).backward()
            recorder.step()
            model(x)
    found = compare(tmp_path / "a", tmp_path / "b")
    assert complete(found)
    seen = {(row.kind, row.path, row.step) for row in found.rows}
    assert {("output", "MSELoss", 0), ("parameter gradient", "factor", 0), ("output", "", 1)} <= seen
    assert ("input", "layer", 0) in seen  # of the model, whose own hooks come too late for its first call


def test_a_failed_call_leaves_a_record(tmp_path: Path) -> None:
    """A forward that fails inside is left, and the next call counts as one of the model."""
    model, x = model_and_input()
    with pytest.raises(ZeroDivisionError), record(tmp_path / "a", model):
        with pytest.raises(RuntimeError):
            model(x[:, :3])
        model(x)
        raise ZeroDivisionError
    calls = read_record(tmp_path / "a").calls
    assert [(call.number, call.parent) for call in calls if not call.path] == [(0, -1), (1, -1)]
    assert [call.number for call in calls if call.outputs and not call.path] == [1]
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="takes a module of the platform"):
        record(tmp_path, "model").__enter__()
    for largest in (0, True, 1.5):
        with pytest.raises(ValueError, match="number of elements, at least 1"):
            record(tmp_path, largest=largest)  # type: ignore[arg-type]


def test_tensors_that_are_not_recorded(tmp_path: Path) -> None:
    """They are named, and everything else is there."""

    class Odd(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x.to_sparse(), x.to(torch.float8_e4m3fn)

    with record(tmp_path, Odd()) as recorder:
        recorder._model(torch.ones(2, 2))
    found = compare(tmp_path, tmp_path)
    assert [row.kind for row in found.rows] == ["input"]
    assert sum("output of the model" in note for note in found.notes) == 4 and "float8" in str(found)
