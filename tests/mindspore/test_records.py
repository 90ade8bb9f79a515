"""Runs on torch and on MindSpore: the same programs agree, and a changed operator is named."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

from hyper_parallel.debug import compare, record
from hyper_parallel.testing.extent import in_gate
from tests.support.programs import ROOT, program_of


def run(script: str, folder: Path, platform: str, *arguments: str) -> None:
    environment = {**os.environ, "HYPER_PARALLEL_PLATFORM": platform, "PYTHONPATH": str(ROOT), "GLOG_v": "3"}
    command = [sys.executable, script, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def without_numbers(line: str) -> str:
    return re.sub(r"[0-9.]+e-[0-9]+", "", line)


@pytest.mark.parametrize("same", in_gate([False, True], [False]))
def test_program_of_the_page(tmp_path: Path, same: bool) -> None:
    """The page's MLP: its activation is named, and nothing where both have one activation."""
    page = ROOT / "docs" / "compare.md"
    program = program_of(page, "mlp_recorded.py")
    assert program.count("approximate=True") == 1
    (tmp_path / "mlp_recorded.py").write_text(program.replace("approximate=True", f"approximate={not same}"))
    run("mlp_recorded.py", tmp_path, "torch-cpu", "on-torch")
    run("mlp_recorded.py", tmp_path, "mindspore", "on-mindspore")
    found = compare(tmp_path / "on-torch", tmp_path / "on-mindspore")
    assert not (found.only_a or found.only_b or found.unfit or found.notes), str(found)
    assert found.culprit == (None if same else "act")
    if not same:
        (shown,) = re.findall(r"    The runs part at act.\n    (First to depart.*)\n", page.read_text(encoding="utf-8"))
        assert without_numbers(shown) == without_numbers(str(found).splitlines()[1])


def changed(folder: Path, old: str, new: str) -> Path:
    """The example, with other code in MindSpore's model."""
    shutil.copytree(ROOT / "examples" / "train_llama", folder, ignore=shutil.ignore_patterns("runs", "__pycache__"))
    model = folder / "model_mindspore.py"
    text = model.read_text(encoding="utf-8")
    assert text.count(old) == 1
    model.write_text(text.replace(old, new), encoding="utf-8")
    return folder


#: name of a change -> the code, that in its place, and the module that is to be named.
CHANGES: dict[str, tuple[str, str, str]] = {
    "nothing": ("class LlamaMLP(nn.Cell):", "class LlamaMLP(nn.Cell):", ""),
    "activation": (
        "mint.nn.functional.silu(self.gate_proj(x)) * self",
        "mint.nn.functional.relu(self.gate_proj(x)) * self",
        "model.layers.0.mlp",
    ),
    "epsilon": (
        "self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)",
        "self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps * 10)",
        "model.norm",
    ),
}


@pytest.mark.nightly
def test_example(tmp_path: Path) -> None:
    """train_llama: torch on two ranks of "tp", and MindSpore on one."""
    folder, out = ROOT / "examples" / "train_llama", str(tmp_path / "losses.json")
    steps = ("--until", "2", "--out", out, "--record")
    run("train.py", folder, "torch-cpu", "--tp", "2", *steps, str(tmp_path / "right"))
    named: dict[str, Any] = {}
    for i, (name, (old, new, _)) in enumerate(CHANGES.items()):
        copied = changed(tmp_path / f"example{i}", old, new)
        run("train.py", copied, "mindspore", "--tp", "1", *steps, str(tmp_path / name))
        found = compare(tmp_path / "right", tmp_path / name)
        named[name] = found.culprit or ""
        assert not (found.only_a or found.unfit), str(found)
    assert named == {name: culprit for name, (_, _, culprit) in CHANGES.items()}


def test_a_cell_that_trains_another(tmp_path: Path) -> None:
    """`nn.TrainOneStepCell` has longer paths, parameters under names that are no paths, and its optimizer is a cell."""
    rng = np.random.default_rng(0)
    x = ms.Tensor(rng.standard_normal((4, 8)).astype(np.float32))
    weight = rng.standard_normal((8, 8)).astype(np.float32)
    for name in ("plain", "cell"):
        model = nn.SequentialCell(nn.LayerNorm((8,)), nn.Dense(8, 8, has_bias=False))
        model[1].weight.set_data(ms.Tensor(weight.copy()))
        optimizer = nn.Momentum(model.trainable_params(), 0.1, 0.9)
        if name == "plain":
            step = ms.value_and_grad(lambda x, y, model=model: nn.MSELoss()(model(x), y), None, optimizer.parameters)
            with record(tmp_path / name, model):
                optimizer(step(x, x)[1])
        else:
            train = nn.TrainOneStepCell(nn.WithLossCell(model, nn.MSELoss()), optimizer)
            with record(tmp_path / name):
                train(x, x)
    found = compare(tmp_path / "plain", tmp_path / "cell")
    assert not (found.departs or found.only_a or found.unfit) and found.names["added"] == "network._backbone", str(
        found
    )
    kinds = {row.kind for row in found.rows}
    assert kinds == {"parameter", "input", "output", "gradient", "parameter gradient", "update"}


class Odd(nn.Cell):
    """Gives a dictionary of tensors of several dtypes, one of which NumPy lacks, and a text."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Dense(8, 8, has_bias=False)

    def construct(self, x: Any) -> dict[str, Any]:
        y = self.dense(x)
        return {"half": y.astype(ms.bfloat16), "pair": (y, y.astype(ms.complex64)), "text": "none"}


def test_cells_without_an_optimizer(tmp_path: Path) -> None:
    """Two cells of one class are told apart; dtypes that NumPy lacks, and gradients that the program gives."""
    rng = np.random.default_rng(0)
    x, weight = (rng.standard_normal((8, 8)).astype(np.float32) for _ in range(2))
    for name, factor in (("one", 1), ("other", 2)):
        cells = [Odd(), Odd()]
        for cell, scale in zip(cells, (1, factor), strict=True):
            cell.dense.weight.set_data(ms.Tensor(weight * scale))
        with record(tmp_path / name) as recorder:
            for cell in cells:
                cell(ms.Tensor(x))
            recorder.step()
            cells[0](ms.Tensor(x))
    found = compare(tmp_path / "one", tmp_path / "other")
    assert str(found.culprit).startswith("Odd"), str(found)
    assert {row.slot for row in found.rows if row.kind == "output"} >= {"half", "pair.1"}

    model = Odd()
    step = ms.value_and_grad(lambda x: model(x)["pair"][0].square().mean(), None, model.trainable_params())
    with record(tmp_path / "gradients", model) as recorder:
        _, (gradient,) = step(ms.Tensor(x))
        recorder.step({"dense.weight": gradient})
    again = compare(tmp_path / "gradients", tmp_path / "gradients")
    assert "parameter gradient" in {row.kind for row in again.rows} and not again.departs

    for arguments, error, words in (((None, 0), ValueError, "largest"), ((3, 1), TypeError, "takes a module")):
        with pytest.raises(error, match=words), record(tmp_path / "none", arguments[0], largest=arguments[1]):
            pass
