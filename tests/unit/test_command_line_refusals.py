"""Wrong uses of the command: each ends with a sentence that names the remedy, without a traceback; nothing starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from hyper_parallel.cli.main import main

MINE = """
import importlib
from hyper_parallel import ColwiseParallel

def model():
    return importlib.import_module("torch").nn.Linear(4, 8)

def fails():
    raise RuntimeError("the file of weights is missing")

def nothing():
    return None

def needs(size):
    return size

def leaves():
    raise SystemExit(0)

def bad_plan(model, mesh):
    raise KeyError("layers")

number = 3
plan = {"": ColwiseParallel()}
listed = [ColwiseParallel()]
"""

#: of every command, on any backend: arguments, exit status, text
ANYWHERE = [
    ("", 2, "the following arguments are required: command"),
    ("frobnicate", 2, "invalid choice: 'frobnicate'"),
    ("env --fast", 2, "unrecognized arguments: --fast"),
    ("launch", 2, "needs a script: hyper-parallel launch -n 4 train.py"),
    ("launch -n x s.py", 2, "invalid int value: 'x'"),
    ("launch -n 0 s.py", 2, "-n 0 --nodes 1: both numbers must be at least 1"),
    ("launch --nodes -1 s.py", 2, "--nodes -1: both numbers must be at least 1"),
    ("launch --nodes 2 --node-rank 5 s.py", 2, "--node-rank 5: with 2 node(s) it must be 0 to 1"),
    ("launch --port 99999 s.py", 2, "--port 99999: the port must be between 1 and 65535"),
    ("launch --platform none s.py", 2, "unknown platform"),
    ("launch nowhere.py", 2, "'nowhere.py' does not exist"),
    ("test -n 0", 2, "-n 0: the number of ranks must be at least 1"),
    ("test --platform none", 2, "unknown platform"),
    ("explain", 2, "required: --model, --mesh"),
    ("explain --model llama-tiny", 2, "required: --mesh"),
    ("explain --model llama --mesh 2", 2, "no model is called 'llama': choose one of llama-"),
    ("explain --model nowhere.py:f --mesh 2", 2, "'nowhere.py' does not exist"),
    ("explain --model no_such_package:f --mesh 2", 2, "cannot be imported: ModuleNotFoundError"),
    ("explain --model broken.py:f --mesh 2", 2, "'broken.py:f' cannot be imported: SyntaxError"),
    ("explain --model mine.py: --mesh 2", 2, "write package.module:name, or file.py:name"),
    ("explain --model :f --mesh 2", 2, "write package.module:name, or file.py:name"),
    ("explain --model mine.py:absent --mesh 2", 2, "mine has no 'absent'"),
    ("explain --model mine.py:fails --mesh 2", 2, "fails: RuntimeError: the file of weights is missing (line 9 of "),
    ("explain --model mine.py:leaves --mesh 2", 2, "fails: SystemExit: 0 (line "),
    ("explain --model exits.py:f --mesh 2", 2, "'exits.py:f' cannot be imported: SystemExit: 3 (line 1 of "),
    ("env --\x1b", 2, r"unrecognized arguments: --\x1b"),
    ("checkpoint show --\x9b", 2, "arguments are required: path"),
    ("checkpoint show x --\x9b", 2, r"unrecognized arguments: --\x9b"),
    ("explain --model . --mesh 2", 2, "no model is called '.'"),
    ("explain --model folder.py:f --mesh 2", 2, "'folder.py' does not exist"),
    ("explain --model none\x1b.py --mesh 2\x9b", 2, r"--mesh '2\x9b'"),
    ("launch none\x1b.py", 2, r"'none\x1b.py' does not exist"),
    ("test --platform \x1b", 2, r"'\x1b' was asked for"),
    ("explain --model mine.py:needs --mesh 2", 2, "fails: TypeError: needs() missing 1 required positional argument"),
    ("explain --model mine.py:nothing --mesh 2", 2, "returned a NoneType: it must return a module of "),
    ("explain --model mine.py:number --mesh 2", 2, "is 3: name a function that returns a model"),
    *(
        (f"{command} --model llama-tiny --mesh {mesh}", 2, sentence)
        for command in ("explain", "dry-run")
        for mesh, sentence in (
            ("tp", "write a number of ranks, or sizes by name"),
            ("dp=a", "write a number of ranks, or sizes by name"),
            ("tp=2,", "write a number of ranks, or sizes by name"),
            ("2.5", "write a number of ranks, or sizes by name"),
            ("²", "write a number of ranks, or sizes by name"),
            ("tp=²", "write a number of ranks, or sizes by name"),
            ("9" * 5000, "write a number of ranks, or sizes by name"),
            ("0", "each dimension must have at least 1 rank"),
            ("dp=2,tp=0", "each dimension must have at least 1 rank"),
            ("tp=2,tp=4", "the dimension tp appears twice"),
        )
    ),
    ("explain --model llama-tiny --mesh 2 --batch 0", 2, "--batch 0: the number must be at least 1"),
    ("explain --model llama-tiny --mesh 2 --length -4", 2, "--length -4: the number must be at least 1"),
    ("explain --model llama-tiny --mesh 2 --svg no/x.svg", 2, "does not exist"),
    ("dry-run --model llama-tiny --mesh 2 --svg x.svg", 2, "--svg and --memory need --search"),
    ("dry-run --model llama-tiny --mesh 2 --memory 1GB", 2, "--svg and --memory need --search"),
    ("dry-run --model llama-tiny --mesh 2 --memory 1.2.3GB --search", 2, "'1.2.3GB' is not a size"),
    ("dry-run --model llama-tiny --mesh 2 --sequences", 2, "--sequences needs --search, and --cp needs --sequences"),
    ("dry-run --model llama-tiny --mesh 2 --machine X", 2, "no machine is called 'X': choose one of 'H100'"),
    ("dry-run --model llama-tiny --mesh 2 --data-parallel weird", 2, "invalid choice: 'weird'"),
    ("dry-run --model llama-tiny --mesh dp=2,tp=2 --batch 3", 2, "--batch 3 is not divisible by dp=2"),
    ("checkpoint", 2, "the following arguments are required: command"),
    ("checkpoint show", 2, "the following arguments are required: path"),
    ("checkpoint show nowhere", 1, "there is no checkpoint at nowhere, which does not exist"),
    ("checkpoint frobnicate", 2, "invalid choice: 'frobnicate'"),
    ("checkpoint convert nowhere", 2, "required: --to, --out"),
]
_TINY, _MINE = "--model llama-tiny --length 16 --mesh 2", "--model mine.py:model --mesh 2 --input float32[2,4]"
#: where models by name, and functions that make models of torch, can be used
ON_TORCH = [
    (f"explain {_TINY} --dtype float99", "no dtype is called 'float99': choose one of "),
    (f"explain {_TINY} --dtype int64", "--dtype int64 cannot be the dtype of parameters"),
    (f"explain {_TINY} --rank 9", "a world of 2 rank(s) has no rank 9"),
    (f"explain {_TINY} --rank -1", "a world of 2 rank(s) has no rank -1"),
    (f"explain {_TINY} --input float32", "--input float32: write dtype[sizes]"),
    (f"explain {_TINY} --input int64[{'9' * 30}]", "cannot be made: "),
    (f"dry-run {_TINY} --batch {'9' * 30}", "cannot be made: "),
    (f"explain {_TINY} --input int64[2]", "the model failed under this plan with this input: IndexError"),
    (f"explain {_TINY} --input int64[2,16] --input int64[2,16]", "takes 2 positional arguments but 3 were given"),
    (f"explain {_TINY} --plan mine.py:number", "must be a style, its name, or a dict of them, got int"),
    (f"explain {_TINY} --plan mine.py:listed", "must be a style, its name, or a dict of them, got list"),
    (f"explain {_TINY} --plan mine.py:bad_plan", "failed under this plan with this input: KeyError: 'layers' (line "),
    ("explain --model llama-tiny --length 16 --mesh a=2,b=2", "got ('a', 'b')"),
    (f"explain {_MINE}", "pass package.module:name"),
    (f"explain {_MINE} --plan mine.py:plan --input float32[2,5]", "the plan cannot be applied"),
    (f"dry-run {_TINY} --optimizer NoSuch", "--optimizer NoSuch: the framework has no optimizer of this name"),
    (f"dry-run {_TINY} --search --optimizer NoSuch", "--optimizer NoSuch: the framework has no optimizer of this name"),
    (f"dry-run {_TINY} --recompute nothing", "recompute='nothing' matches no module"),
]


def said(arguments: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> tuple:
    (folder / "mine.py").write_text(MINE)
    (folder / "broken.py").write_text("def f(:\n")
    (folder / "exits.py").write_text("raise SystemExit(3)\n")
    (folder / "folder.py").mkdir()
    (folder / "s.py").write_text("raise SystemExit('started')")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))  # and forgets modules that were imported from another folder
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    try:
        status = main(arguments.split())
    except SystemExit as left:  # of argparse
        status = left.code
    captured = capsys.readouterr()
    assert not captured.out, "something was printed as if it were right"
    return status, captured.err


@pytest.mark.parametrize(("arguments", "status", "sentence"), ANYWHERE, ids=lambda given: str(given)[:60])
def test_wrong_use(
    arguments: str,
    status: int,
    sentence: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, text = said(arguments, tmp_path, capsys, monkeypatch)
    assert found == status and sentence in text, text


@pytest.mark.skipif(not os.environ["HYPER_PARALLEL_PLATFORM"].startswith("torch"), reason="models of torch")
@pytest.mark.parametrize(("arguments", "sentence"), ON_TORCH, ids=lambda given: str(given)[:60])
def test_wrong_use_of_models(
    arguments: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    status, text = said(arguments, tmp_path, capsys, monkeypatch)
    assert status == 2 and sentence in text, text


def test_a_picture_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not os.environ["HYPER_PARALLEL_PLATFORM"].startswith("torch"):
        pytest.skip("models of torch")
    (tmp_path / "x.svg").mkdir()
    _, text = said(f"explain {_TINY} --svg x.svg", tmp_path, capsys, monkeypatch)
    assert "--svg x.svg cannot be written: Is a directory" in text


def test_data_parallelism_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Is not taken for tensor parallelism over a dimension that is called dp."""
    if not os.environ["HYPER_PARALLEL_PLATFORM"].startswith("torch"):
        pytest.skip("models of torch")
    assert main(["dry-run", "--model", "llama-tiny", "--length", "16", "--mesh", "dp=4", "--batch", "4"]) == 0
    text = capsys.readouterr().out
    assert "dp=4 x tp=1: one of 4 ranks" in text and "all_gather" in text
