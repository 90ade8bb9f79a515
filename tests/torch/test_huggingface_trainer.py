"""Trainer, TRL and accelerate over a mesh equal one process: losses, norms, metrics, weights, resumed jobs."""

from __future__ import annotations

import pickle
from importlib.util import find_spec
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hyper_parallel.integrations.huggingface.accelerator import _Steps
from hyper_parallel.integrations.huggingface.division import whole_head
from hyper_parallel.integrations.huggingface.trainer import by_names, load_weights
from hyper_parallel.testing.extent import in_gate
from hyper_parallel.testing.pool import SIZE as POOL
from hyper_parallel.testing.pool import free_port
from tests.support.programs import ROOT, program_of, run_each, run_ranks
from tests.torch.huggingface_trainer_jobs import Job, in_one_process, llama, refuse

pytestmark = pytest.mark.skipif(
    find_spec("accelerate") is None, reason="accelerate is not installed: platform/torch-cpu/requirements.txt has it"
)
needs_trl = pytest.mark.skipif(
    find_spec("trl") is None, reason="trl is not installed: platform/torch-cpu/requirements.txt has it"
)

SETTINGS = {"HYPER_PARALLEL_PLATFORM": "torch-cpu"}
JOBS = "tests.torch.huggingface_trainer_jobs:over_a_mesh"
GRIDS = {
    "data and tensor": {"shape": (2, 2)},
    "replicas": {"shape": (2, 2), "options": {"data_parallel": "replicate"}},
    "tensor alone": {"shape": (1, 4), "options": {"gather_heads": True}},
    "data alone": {"shape": (4,), "names": ("dp",)},
    "replicas of shards": {"shape": (2, 2), "names": ("dp_replicate", "dp_shard")},
    "tensor first": {"shape": (2, 2), "names": ("tp", "dp")},
    "by hand": {"shape": (2, 2), "by_hand": True},
    "sizes": {"shape": (2, 2), "names": ("dp_shard", "tp"), "sizes": "given"},
    "own sizes": {"shape": (2, 2), "names": ("dp_shard", "tp"), "sizes": "own"},
    "two ranks": {"shape": (2,), "names": ("dp",)},
    "two ranks of tensors": {"shape": (2,), "names": ("tp",)},
}


PROGRAM = """
import os, pickle, sys
from pathlib import Path
from tests.torch.huggingface_trainer_jobs import over_a_mesh
folder = Path(sys.argv[1])
way, job = pickle.loads((folder / "job").read_bytes())
found = over_a_mesh(way, job)
(folder / f"found {os.environ['RANK']}").write_bytes(pickle.dumps(found))
"""


def on_ranks(pool: Any, way: str, job: Job) -> Any:
    """Run a job on all ranks of its mesh. Returns the results of each rank. A job on 2 ranks has processes of its own,
    because accelerate takes all ranks of a process group."""
    if (size := int(np.prod(job.shape))) == POOL:
        return pool.run(size, JOBS, way, job)
    folder = Path(job.folder)
    folder.mkdir(exist_ok=True)
    (folder / "job").write_bytes(pickle.dumps((way, job)))
    ended = run_ranks(["-c", PROGRAM, folder], size, **SETTINGS)
    assert [rank.status for rank in ended] == [0] * size, ended
    return [pickle.loads((folder / f"found {rank}").read_bytes()) for rank in range(size)]


def compare(got: Any, wanted: Any, limit: float = 1e-6) -> None:
    """Compare logs and weights. Losses are logged in single precision."""
    rows, weights = got
    assert len(rows) == len(wanted[0])
    for row, other in zip(rows, wanted[0], strict=True):
        assert row.keys() == other.keys()
        for name, value in row.items():
            assert value == pytest.approx(other[name], rel=limit), (name, row, other)
    assert weights.keys() == wanted[1].keys()
    for name, value in weights.items():
        np.testing.assert_allclose(value, wanted[1][name], rtol=0, atol=min(limit, 1e-7), err_msg=name)


def later(rows: Any) -> Any:
    """The rows of a log after the second step, without the mean loss, which counts the steps of one run."""
    return [{k: v for k, v in row.items() if k != "train_loss"} for row in rows if row["step"] > 2]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: Any) -> tuple[str, Any]:
    """The folder and the results of one process."""
    folder = str(tmp_path_factory.mktemp("whole"))
    return folder, in_one_process("trained", Job(folder))


def test_trainer(pool: Any, tmp_path: Path, whole: Any) -> None:
    """The whole way, and resumes: of this job on 2 ranks, of one process on this mesh. Rows of the log have loss, norm,
    learning rate and evaluation."""
    job = Job(str(tmp_path / "one"), **GRIDS["data and tensor"])
    for got in on_ranks(pool, "trained", job):
        compare(got, whole[1])
    assert [sum(name in row for row in whole[1][0]) for name in ("loss", "grad_norm", "eval_accuracy")] == [4, 4, 3]
    for folder, grid in ((job.folder, "two ranks of tensors"), (job.folder, "two ranks"), (whole[0], "sizes")):
        resumed = Job(str(tmp_path / "two"), **GRIDS[grid], resume=f"{folder}/checkpoint-2")
        for rows, weights in on_ranks(pool, "trained", resumed):
            compare((later(rows), weights), (later(whole[1][0]), whole[1][1]))


@pytest.mark.parametrize("grid", in_gate([*GRIDS][1:], ["replicas"]))
def test_meshes(pool: Any, tmp_path: Path, whole: Any, grid: str) -> None:
    for got in on_ranks(pool, "trained", Job(str(tmp_path), **GRIDS[grid])):
        compare(got, whole[1])


@pytest.mark.nightly
@pytest.mark.parametrize(
    "more",
    [
        {"arguments": {"bf16": True}},
        {"arguments": {"gradient_checkpointing": True}},
        {"arguments": {"load_best_model_at_end": True}},
        {"arguments": {"include_num_input_tokens_seen": "all"}},
        {"arguments": {"max_steps": 3}},  # of a dataset without a length
    ],
    ids=["bf16", "checkpointing", "best", "tokens", "stream"],
)
def test_arguments(pool: Any, tmp_path: Path, more: dict[str, Any]) -> None:
    wanted = in_one_process("trained", Job(str(tmp_path / "whole"), **more))
    job = Job(str(tmp_path / "ranks"), **GRIDS["data and tensor"], **more)
    for got in on_ranks(pool, "trained", job):
        compare(got, wanted, 2e-2 if "bf16" in more.get("arguments", {}) else 1e-6)


@pytest.mark.parametrize("grid", in_gate(["data and tensor", "replicas", "data alone"], ["data and tensor"]))
def test_accelerate(pool: Any, tmp_path: Path, grid: str) -> None:
    """A loop with accelerate, and its state on another mesh. Accelerate takes a step of the schedule for each
    batch of the ranks. So the resumed job has as many."""
    grids = {"data alone": "replicas of shards", "replicas": "own sizes", "data and tensor": "two ranks"}
    rows, weights = in_one_process("accelerated", Job(str(tmp_path / "whole")))
    job = Job(str(tmp_path / "ranks"), **GRIDS[grid])
    resumed = Job(str(tmp_path / "more"), **GRIDS[grids[grid]], resume=f"{job.folder}/state")
    for given, wanted in ((job, rows), (resumed, rows[len(rows) // 2 :])):
        for got, found in on_ranks(pool, "accelerated", given):
            for row, other in zip(got, wanted, strict=True):
                assert row == pytest.approx(other, rel=1e-6)
            for name, value in weights.items():
                np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-7, err_msg=name)


@needs_trl
@pytest.mark.nightly
@pytest.mark.parametrize("adapters", [False, True])
def test_supervised_finetuning(pool: Any, tmp_path: Path, adapters: bool) -> None:
    if adapters:
        pytest.importorskip("peft")
    wanted = in_one_process("supervised", Job(str(tmp_path / "whole"), adapters=adapters))
    job = Job(str(tmp_path / "ranks"), **GRIDS["data and tensor"], adapters=adapters)
    for rows, weights in on_ranks(pool, "supervised", job):
        compare((of_training(rows), weights), (of_training(wanted[0]), wanted[1]), 1e-5)
    for grid in ("two ranks", "tensor first"):
        more = Job(str(tmp_path / grid), **GRIDS[grid], resume=f"{job.folder}/checkpoint-2", adapters=adapters)
        for rows, weights in on_ranks(pool, "supervised", more):
            compare((of_training(later(rows)), weights), (of_training(later(wanted[0])), wanted[1]), 1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("grid", ["data and tensor", "two ranks"])
def test_generation(pool: Any, tmp_path: Path, grid: str) -> None:
    """A ``Seq2SeqTrainer`` that evaluates the words of ``generate``."""
    wanted = in_one_process("generated", Job(str(tmp_path / "whole")))
    for rows, words in on_ranks(pool, "generated", Job(str(tmp_path / "ranks"), **GRIDS[grid])):
        assert np.array_equal(words, wanted[1])
        assert rows == pytest.approx(wanted[0], rel=1e-6)


def of_training(rows: Any) -> Any:
    """The numbers that the number of ranks does not change. TRL's own are means over a step of all ranks."""
    names = ("step", "before", "loss", "grad_norm", "learning_rate", "eval_loss")
    return [{name: row[name] for name in names if name in row} for row in rows]


REFUSED = [
    ("trainer", {"shape": (1,), "names": None}, ValueError, "needs a mesh with names"),
    ("trainer", {"shape": (1, 1), "names": ("cp", "tp")}, ValueError, "does not support sharded sequences"),
    ("trainer", {"data_parallel": "zero"}, ValueError, "'fully_shard' or 'replicate'"),
    ("trainer", {"arguments": {"train_sampling_strategy": "batch_rebalance"}}, ValueError, "batch_rebalance"),
    ("trainer", {"plan": {"nothing": "colwise"}}, ValueError, "'nothing'"),
    ("trainer", {"twice": True}, ValueError, "has a mesh already"),
    ("trainer", {"object": "a"}, TypeError, "takes a transformers.Trainer, got str"),
    ("trainer", {"without": "_load_best_model"}, ValueError, "has no _load_best_model. The tested release is 5.24"),
    ("accelerator", {"twice": True}, ValueError, "has a mesh already"),
    ("accelerator", {"object": "a"}, TypeError, "takes an accelerate.Accelerator, got str"),
    ("accelerator", {"without": "no_sync"}, ValueError, "has no no_sync. The tested release is 1.15"),
    ("accelerator", {"after": True}, ValueError, "before accelerator.prepare"),
    ("accelerator", {"dispatch": True}, ValueError, "dispatch_batches=True"),
    ("accelerator", {"kind": "FSDP"}, ValueError, "shards models with FSDP already"),
    ("accelerator", {"config": True}, ValueError, "has a parallelism_config, but a mesh was passed"),
    ("accelerator", {"sizes": {"cp_size": 2}}, ValueError, "has cp_size=2 and sp_size=1. Leave both at 1"),
]


@pytest.mark.parametrize(("what", "how", "kind", "match"), REFUSED, ids=[f"{row[0]} {row[3][:24]}" for row in REFUSED])
def test_refusals(tmp_path: Path, what: str, how: dict[str, Any], kind: type, match: str) -> None:
    refuse(str(tmp_path), what, how, kind, match)


def test_refusals_of_ranks(pool: Any) -> None:
    pool.run(4, "tests.torch.huggingface_trainer_jobs:refuse_on_ranks")


def test_random_states_of_a_resumed_job(pool: Any, tmp_path: Path) -> None:
    pool.run(4, "tests.torch.huggingface_trainer_jobs:draw_alike", str(tmp_path))


def test_words_of_different_lengths(pool: Any) -> None:
    pool.run(4, "tests.torch.huggingface_trainer_jobs:generate_different_lengths")


def test_a_head_that_is_read_in_whole() -> None:
    """TRL's own forward of a model reads the weight of the head: head and tied embeddings stay whole."""
    model = llama()
    assert whole_head(model) == {}

    def _fused_forward(self: Any) -> None:
        """As TRL calls it."""

    model.forward = MethodType(_fused_forward, model)
    assert whole_head(model) == {"lm_head": None}
    model.lm_head.weight = model.model.embed_tokens.weight
    assert whole_head(model) == {"lm_head": None, "model.embed_tokens": None}


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["finetune.py", "loop.py"])
def test_programs_of_the_page(tmp_path: Path, name: str) -> None:
    script = tmp_path / name
    script.write_text(program_of(ROOT / "docs" / "trainer.md", name), encoding="utf-8")
    ended = run_ranks([script], 4, cwd=tmp_path, HYPER_PARALLEL_PLATFORM="torch-cpu")
    assert [rank.status for rank in ended] == [0, 0, 0, 0], ended
    assert (tmp_path / "trained" / "model.safetensors").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["finetune.py", "loop.py"])
def test_accelerate_launch(tmp_path: Path, name: str) -> None:
    """The programs of the page, with ranks that accelerate's own command starts."""
    script = tmp_path / name
    script.write_text(program_of(ROOT / "docs" / "trainer.md", name), encoding="utf-8")
    command = ("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "4")
    (ended,) = run_each([*command, "--main_process_port", free_port(), script], [SETTINGS], cwd=tmp_path)
    assert ended.status == 0, ended
    assert (tmp_path / "trained" / "model.safetensors").exists()


class Adapted(torch.nn.Module):
    """A model with one adapter, by the names of peft."""

    active_adapters = ("default",)

    def __init__(self) -> None:
        super().__init__()
        self.base = torch.nn.Module()
        self.base.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(4, 2, bias=False)})
        self.base.weight = torch.nn.Parameter(torch.zeros(2))


def test_saved_adapters(tmp_path: Path) -> None:
    model, values = Adapted(), torch.arange(8.0).reshape(2, 4)
    save_file({"base.lora_A.weight": values}, tmp_path / "adapter_model.safetensors")
    load_weights(model, tmp_path)
    assert torch.equal(model.base.lora_A["default"].weight, values)
    model.base.head = torch.nn.Module()  # as peft wraps a module that is trained in full
    model.base.head.original_module = torch.nn.Linear(4, 2, bias=False)
    model.base.head.modules_to_save = torch.nn.ModuleDict({"default": torch.nn.Linear(4, 2, bias=False)})
    save_file({"base.head.weight": values}, tmp_path / "adapter_model.safetensors")
    load_weights(model, tmp_path)
    assert torch.equal(model.base.head.modules_to_save["default"].weight, values)
    assert not torch.equal(model.base.head.original_module.weight, values)
    save_file({"base.lora_C.weight": values}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ValueError, match=r"has 'base.lora_C.weight', which matches no adapter"):
        load_weights(model, tmp_path)


def test_a_schedule_that_reads_a_metric() -> None:
    """It takes one step for a metric of all ranks' batches."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)
    schedule = _Steps(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1), 2)
    rates = []
    for _ in range(3):
        schedule.step(1.0)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [1.0, 1.0, 0.1]


def test_an_optimizer_of_another_model() -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    saved = optimizer.state_dict()
    assert by_names(saved, model, optimizer)["param_groups"][0]["params"] == ["weight", "bias"]
    saved["param_groups"][0]["params"] = [0]
    with pytest.raises(ValueError, match="has 1 parameters, but the present optimizer has 2"):
        by_names(saved, model, optimizer)
