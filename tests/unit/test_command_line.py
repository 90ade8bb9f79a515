"""The command line: arguments, output, exit statuses."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hyper_parallel import get_platform
from hyper_parallel.checkpoint import save
from hyper_parallel.cli import checking, launch, msrun_worker, selftest
from hyper_parallel.cli.main import main, parser
from hyper_parallel.cli.output import UsageError
from hyper_parallel.cli.specifications import bytes_of, inputs_of, mesh_of, model_of, object_at, plan_of
from hyper_parallel.planning.llama import MODELS
from hyper_parallel.testing import plan_check

ROOT = Path(__file__).resolve().parents[2]
PLATFORM = os.environ["HYPER_PARALLEL_PLATFORM"]


def said(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    assert main(arguments) == status, capsys.readouterr()
    captured = capsys.readouterr()
    return captured.out if status != 2 else captured.err


def test_env(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "env")
    assert PLATFORM in text and "HYPER_PARALLEL_PLATFORM chooses another" in text and "patched in" not in text
    assert "patched in" in said(capsys, "env", "--patches")
    found = json.loads(said(capsys, "env", "--json"))
    assert found["selected"] == PLATFORM
    entry = found["backends"][PLATFORM]
    assert entry["available"] and entry["devices"] >= 1 and entry["patches"]
    assert all(entry["reason"] for entry in found["backends"].values() if not entry["available"])


def test_they_fit_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """80 columns, but for a path, or a name, that is longer."""
    what = "forward: 2 all_gather, 2 reduce_scatter; backward: 2 all_gather, 2 reduce_scatter, 4 all_reduce"
    checked = {"platform": PLATFORM, "check": "parallel block", "right": True, "what": what, "seconds": 1.5}
    monkeypatch.setattr(selftest, "_check", lambda name, processes: [checked, {**checked, "what": "11"}])
    text = said(capsys, "test")
    assert max(map(len, text.splitlines())) <= 80 and "2 ranks: all is right" in text
    assert all(word in text for word in what.split())
    lines = said(capsys, "env", "--patches").splitlines()
    assert [line for line in lines if len(line) > 80 and len(line.split()) > 1] == []


def test_python_m() -> None:
    command = [sys.executable, "-m", "hyper_parallel", "--version"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert run.stdout.startswith("hyper-parallel ")


def test_commands_of_launchers() -> None:
    command = launch.command_of("torch", 4, ["train.py", "--steps", "3"])
    wanted = "-m torch.distributed.run --nproc-per-node 4 --standalone -- train.py --steps 3"
    assert command[1:] == wanted.split()
    command = launch.command_of("torch", 8, ["train.py"], nodes=2, node_rank=1, address="10.0.0.1", port=29400)
    wanted = "--nproc-per-node 8 --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 29400 -- train.py"
    assert command[3:] == wanted.split()
    command = launch.command_of("mindspore", 4, ["train.py"], nodes=2, node_rank=1, address="10.0.0.1")
    assert command[0].endswith("msrun") and command[-1] == "train.py"
    wanted = "--worker_num 8 --local_worker_num 4 --master_addr 10.0.0.1 --master_port 29500 --node_rank 1 --join True"
    assert command[1:-1] == [*wanted.split(), "--"]


def test_launch_prints_its_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    text = said(capsys, "launch", "-n", "2", "--platform", PLATFORM, "--json", "--print-only", str(script))
    found = json.loads(text)
    assert found["platform"] == PLATFORM and found["command"][-1] == str(script)
    for given, nodes, port in (("29400", "1", 29400), (None, "2", launch.PORT)):
        how = ["--nodes", nodes, *(["--port", given] if given else [])]
        assert launch._port_of(parser().parse_args(["launch", *how, str(script)])) == port
    assert 1024 < launch._port_of(parser().parse_args(["launch", str(script)])) < 65536
    assert "needs a script" in said(capsys, "launch", "-n", "2", status=2)
    assert "does not exist" in said(capsys, "launch", "nothing.py", status=2)
    assert "unknown platform" in said(capsys, "launch", "--platform", "none", str(script), status=2)


def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    """A closed pipe, as in ``| head``, causes no traceback."""
    path = str(save({"step": 2}, tmp_path / "a"))
    for module, *arguments in (("hyper_parallel", "launch", "--json", "--print-only", __file__),
                               ("hyper_parallel", "checkpoint", "show", path),
                               ("hyper_parallel.checkpoint", "show", path)):  # fmt: skip
        command = [sys.executable, "-m", module, *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        with process.stderr as errors:
            assert "Error" not in errors.read() and process.wait() == 1, arguments


def test_launch_gives_back_the_exit_status(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit(7)")
    ran: list[Any] = []
    monkeypatch.setattr(launch, "command_of", lambda *how: ran.append(how) or [sys.executable, str(script)])
    assert main(["launch", "-n", "3", "--platform", PLATFORM, "--", str(script), "--flag"]) == 7
    assert ran[0][1:3] == (3, [str(script), "--flag"])


def test_arguments_of_a_script_are_its_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Also those that begin as an option of this command, or of the launcher."""
    script = tmp_path / "script.py"
    script.write_text("")
    own = ["--run", "x", "--p", "y", "-n", "3", "--json", "--", "z"]
    text = said(capsys, "launch", "-n", "2", "--platform", PLATFORM, "--json", "--print-only", str(script), *own)
    command = json.loads(text)["command"]
    assert command[command.index("--") :] == ["--", str(script), *own]


@pytest.mark.parametrize(("statuses", "wanted"), [((0, 0), 0), ((0, 3), 5), ((0,), 5)])
def test_ranks_of_msrun_that_ended_well(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, statuses: tuple[int, ...], wanted: int
) -> None:
    """The launcher ends msrun once all ranks ended well; msrun would wait for a scheduler that reports them lost."""
    for rank, status in enumerate(statuses):
        (tmp_path / str(rank)).write_text(str(status))
    waits = f"import subprocess, sys, time; time.sleep({3600 if wanted == 0 else 0.2}); sys.exit(5)"
    children = f"import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', {waits!r}]))"
    monkeypatch.setattr(launch, "SECONDS_TO_END", 0.5)
    begin = time.monotonic()
    assert launch._run_msrun([sys.executable, "-c", children], str(tmp_path), 2, dict(os.environ)) == wanted
    assert time.monotonic() - begin < 60


def test_a_rank_of_msrun_leaves_its_status(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for role, rank, code in (("MS_WORKER", "0", 4), ("MS_WORKER", "1", 0), ("MS_SCHED", "0", 9)):
        environment = {**os.environ, "MS_ROLE": role, "RANK_ID": rank}
        script = tmp_path / "script.py"
        script.write_text(f"import os; os._exit({code})")
        worker = [sys.executable, msrun_worker.__file__, str(tmp_path), str(script)]
        assert subprocess.run(worker, env=environment, check=False).returncode == code
    assert {path.name: path.read_text() for path in tmp_path.iterdir() if path.suffix == ""} == {"0": "4", "1": "0"}


TINY = ["--model", "llama-tiny", "--length", "16"]
makes_models = pytest.mark.skipif(not PLATFORM.startswith("torch"), reason="models by name are for torch")


@makes_models
def test_explain(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    text = said(capsys, "explain", *TINY, "--mesh", "4", "--table", "--svg", str(picture))
    assert "0 .. 3, each" in text and "backward: all_gather over tp" in text and picture.read_text().startswith("<svg")
    found = json.loads(said(capsys, "explain", *TINY, "--mesh", "dp=2,tp=2", "--forward-only", "--json"))
    assert found["mesh"] == {"dp": 2, "tp": 2} and {c["direction"] for c in found["collectives"]} == {"forward"}
    assert "the plan cannot be applied" in said(capsys, "explain", *TINY, "--mesh", "16", status=2)


@makes_models
@pytest.mark.nightly
def test_dry_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = said(capsys, "dry-run", *TINY, "--mesh", "dp=64,tp=8", "--batch", "64", "--machine", "H200")
    assert "one of 512 ranks, H200" in text and "done in" in text
    found = json.loads(said(capsys, "dry-run", *TINY, "--mesh", "tp=2", "--recompute", "--dtype", "bfloat16", "--json"))
    assert found["fits"] and found["memory"]["activations"] and found["traffic"]["tp"]["counts"]
    picture = tmp_path / "ways.svg"
    more = ["--batch", "8", "--search", "--mixed-precision", "--svg", str(picture)]
    text = said(capsys, "dry-run", *TINY, "--mesh", "8", *more)
    assert "tp + sequence" in text and picture.read_text().startswith("<svg")
    tight = said(capsys, "dry-run", *TINY, "--mesh", "8", "--batch", "8", "--search", "--memory", "1kb", status=1)
    assert "does not fit" in tight
    assert "is not divisible by dp=64" in said(capsys, "dry-run", *TINY, "--mesh", "dp=64,tp=8", status=2)
    cut = ["--batch", "8", "--search", "--sequences", "--cp", "2", "--cp", "4", "--json"]
    ways = json.loads(said(capsys, "dry-run", *TINY, "--mesh", "8", *cut))["candidates"]
    ran = {(way["cp"], way["tp"], way["plan"]) for way in ways if way["run"]}
    assert {(2, 1, "-"), (4, 1, "-")} | {(c, 2, p) for c in (2, 4) for p in ("tp", "tp + sequence")} <= ran


@makes_models
def test_a_model_of_ones_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "of_mine.py").write_text(
        "import importlib\n"
        "from hyper_parallel import ColwiseParallel\n"
        "def model():\n    return importlib.import_module('torch').nn.Linear(4, 8)\n"
        "plan = {'': ColwiseParallel()}\nwrong = {'no': ColwiseParallel()}\n"
    )
    file = f"{tmp_path}/of_mine.py"
    own = ["--model", f"{file}:model", "--mesh", "4", "--input", "float32[2,4]"]
    assert "ColwiseParallel()" in said(capsys, "explain", *own, "--plan", f"{file}:plan")
    assert "matches no module" in said(capsys, "explain", *own, "--plan", f"{file}:wrong", status=1)
    assert "--plan is missing" in said(capsys, "explain", *own, status=2)


@makes_models
def test_check(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_mine.py").write_text(
        "import torch\n"
        "from hyper_parallel import ColwiseParallel, RowwiseParallel\n"
        "class Scores(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)\n"
        "    def forward(self, x):\n"
        "        y = self.up(x)\n"
        "        return self.down(y.softmax(-1))\n"
        "class Right(Scores):\n"
        "    def forward(self, x):\n"
        "        y = self.up(x)\n"
        "        y.mean()  # for a log\n"
        "        return self.down(y.relu())\n"
        "plan = {'up': ColwiseParallel(), 'down': RowwiseParallel()}\n"
        "more = {**plan, 'dwn': ColwiseParallel()}\n"
    )
    file = f"{tmp_path}/of_mine.py"
    own = ["check", "--mesh", "dp=2,tp=4", "--batch", "2", "--input", "float32[2,8]", "--plan", f"{file}:plan"]
    text = said(capsys, *own, "--model", f"{file}:Scores", status=1)
    assert f"{file}:9: softmax gets a part of shape (2, 4) of (2, 16)" in text and "output_layouts=Replicate()" in text
    found = json.loads(said(capsys, *own, "--model", f"{file}:Scores", "--forward-only", "--json", status=1))
    assert not found["right"] and [f["where"] for f in found["findings"]] == [f"{file}:9"]
    # A value that is used for nothing is shown, and is nothing wrong.
    assert "No module and no output of the model" in said(capsys, *own, "--model", f"{file}:Right")
    assert "'dwn' matches no module" in said(
        capsys, *own, "--plan", f"{file}:more", "--model", f"{file}:Right", status=1
    )
    assert "no finding in plain code" not in said(
        capsys, "check", *TINY, "--mesh", "dp=3,tp=2", "--batch", "2", status=2
    )

    # The same names reach the processes that execute: which are not started here.
    def compared(size: int, job: Any, *given: Any) -> list[Any]:
        model, plan, (x,), _, _, prove = pickle.loads(given[-1])
        assert isinstance(model(), object_at(f"{file}:Right")) and plan.text == f"{file}:plan" and not prove
        assert x.shape == (2, 8)
        return [({"output": 2.0, "loss": 0.0}, {}, [], {}, [], {})] * size

    monkeypatch.setattr(plan_check, "WorkerPool", lambda name, size: nullcontext(SimpleNamespace(run=compared)))
    monkeypatch.chdir(tmp_path)
    named = ["--model", "of_mine.py:Right", "--plan", "of_mine.py:plan", "--execute"]
    assert "wrong on 8 ranks" in said(capsys, *own[:-2], *named, status=1)
    assert json.loads(said(capsys, *own[:-2], *named, "--json", status=1))["executed"]["ranks"] == 8
    assert checking._Model(f"{file}:Right", "bfloat16")().up.weight.dtype == get_platform().dtypes["bfloat16"]
    refused = said(capsys, "check", *TINY, "--mesh", "2", "--execute", status=2)
    assert "llama-tiny has shapes but no values. Pass package.module:function" in refused


@makes_models
@pytest.mark.nightly
def test_check_executes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "mlp.py").write_text(
        "import torch\n"
        "from hyper_parallel import ColwiseParallel, RowwiseParallel\n"
        "def model():\n"
        "    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))\n"
        "plan = {'0': ColwiseParallel(), '1': RowwiseParallel()}\n"
    )
    named = ["--model", f"{tmp_path}/mlp.py:model", "--plan", f"{tmp_path}/mlp.py:plan", "--input", "float32[2,8]"]
    assert "right: output, loss and" in said(capsys, "check", "--mesh", "2", *named, "--execute")


def test_specifications() -> None:
    assert (mesh_of("8"), mesh_of("dp=2, tp=4")) == ({"tp": 8}, {"dp": 2, "tp": 4})
    assert (bytes_of("80GB"), bytes_of("1.5 KiB"), bytes_of("7")) == (80e9, 1536, 7)
    (x,) = inputs_of(["float32[2,3]"], "", 1, 1)
    assert tuple(x.shape) == (2, 3)
    assert object_at("json:JSONDecoder.decode") is json.JSONDecoder.decode
    for wrong, message in {
        "mesh": lambda: mesh_of("dp:2"),
        "is not a size": lambda: bytes_of("much"),
        "write dtype": lambda: inputs_of(["float32"], "", 1, 1),
        "no dtype is called": lambda: inputs_of(["real[2]"], "", 1, 1),
        "write package.module:name": lambda: object_at("name"),
        "does not exist": lambda: object_at("nothing.py:f"),
        "cannot be imported": lambda: object_at("no_such_package:f"),
        "has no 'f'": lambda: object_at("json:f"),
        "no model is called": lambda: model_of("llama", None),
        "--plan is missing": lambda: plan_of(None, "a:b", True),
    }.items():
        with pytest.raises(UsageError, match=wrong):
            message()
    assert "llama-3-70b" in MODELS


def test_the_file_that_was_named(tmp_path: Path) -> None:
    """Two files and a module of Python are called ``platform``; one that comes twice is one object."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "platform.py").write_text(f"class Made:\n    place = {name!r}\n")
    a, b = (object_at(f"{tmp_path}/{name}/platform.py:Made") for name in ("a", "b"))
    assert (a.place, b.place) == ("a", "b") and object_at(f"{tmp_path}/a/platform.py:Made") is a
    assert sys.modules[a.__module__].Made is a


def test_checkpoints(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(save({"step": 2, "name": "x" * 200}, tmp_path / "a"))
    text = said(capsys, "checkpoint", "show", path)
    assert "0 tensors, 0 bytes" in text and "step = 2" in text and f'name = "{"x" * 99}...' in text
    for arguments in (("--json", "show", path), ("show", "--json", path), ("show", path, "--json")):
        found = json.loads(said(capsys, "checkpoint", *arguments))
        assert found["values"] == {"step": 2, "name": "x" * 200} and found["tensors"] == {}


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--help"])
    text = capsys.readouterr().out
    assert all(name in text for name in ("env", "launch", "test", "explain", "dry-run", "check", "checkpoint"))


def test_what_the_command_test_checks(pool: Any) -> None:
    """The command's jobs: the job of checkpoints takes all ranks of the pool, so only the command runs it."""
    found = [pool.run(2, f"hyper_parallel.cli.selftest:check_{name}")[0] for name in ("collectives", "block")]
    assert found[0] == "11 redistributions" and "reduce_scatter" in found[1]
