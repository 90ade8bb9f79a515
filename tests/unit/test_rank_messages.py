"""Errors and warnings of ranks: the first rank shows its own, the launcher those that the first did not have."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from hyper_parallel.cli.main import main
from hyper_parallel.platform.rank_messages import VARIABLE, gathered, leave_messages


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Shown texts, in place of standard error."""
    shown: list[str] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, where: shown.append(str(error)))
    monkeypatch.setattr(warnings, "showwarning", lambda message, *rest: shown.append(str(message)))
    return shown


def as_rank(monkeypatch: pytest.MonkeyPatch, folder: Path, rank: int, said: list[Any]) -> None:
    """Run the hooks of a rank on errors and on texts of warnings."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "excepthook", sys.excepthook)
        patch.setattr(warnings, "showwarning", warnings.showwarning)
        environ = {"RANK": str(rank), "LOCAL_RANK": str(rank), VARIABLE: str(folder)}
        leave_messages(environ)
        assert VARIABLE not in environ  # not for processes of the rank
        for one in said:
            if isinstance(one, BaseException):
                sys.excepthook(type(one), one, None)
            else:
                warnings.showwarning(one, UserWarning, "train.py", 3)


def test_each_is_shown_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hooks: list[str]) -> None:
    for rank in range(4):
        own = ["of two"] if rank in (1, 2) else []
        as_rank(monkeypatch, tmp_path, rank, ["of all", "of all", *own, ValueError(f"at 0x7f{rank}")])
    assert hooks == ["of all", "of all", "at 0x7f0"]
    text = gathered(str(tmp_path), 0)
    assert "ranks 0 to 3 had the same error, which is shown once: ValueError: at 0x7f0" in text
    assert "ranks 1, 2 had this warning:\ntrain.py:3: UserWarning: of two" in text
    assert "of all" not in text and len(text.splitlines()) == 3


def test_an_error_of_one_rank_is_shown_at_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hooks: list[str]
) -> None:
    as_rank(monkeypatch, tmp_path, 0, [])
    as_rank(monkeypatch, tmp_path, 3, [KeyError("alone"), KeyboardInterrupt("stop")])
    (tmp_path / "2.messages").write_text('{"error": "cut of')
    assert hooks == ["stop"]
    assert gathered(str(tmp_path), 0) == "rank 3 had this error:\nKeyError: 'alone'"


def test_a_message_that_cannot_be_left_is_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, hooks: list[str]
) -> None:
    as_rank(monkeypatch, tmp_path / "gone", 1, ["careful", ValueError("wrong")])
    assert hooks == ["careful", "wrong"]


@pytest.mark.parametrize("environ", [{}, {VARIABLE: "x"}, {VARIABLE: "x", "RANK_ID": "0", "MS_ROLE": "MS_SCHED"}])
def test_other_processes_stay_as_they_are(hooks: list[str], environ: dict[str, str]) -> None:
    before = sys.excepthook, warnings.showwarning
    leave_messages(environ)
    assert (sys.excepthook, warnings.showwarning) == before


def test_launch_shows_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The script of a rank that is not the first of its node leaves its error, which the command prints."""
    from hyper_parallel.cli import launch

    script = tmp_path / "script.py"
    script.write_text("import hyper_parallel\nraise ValueError('found late')\n")
    monkeypatch.setattr(launch, "command_of", lambda *how: [sys.executable, str(script)])
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "PYTHONPATH": os.pathsep.join(sys.path)}.items():
        monkeypatch.setenv(name, value)
    platform = os.environ["HYPER_PARALLEL_PLATFORM"]
    assert main(["launch", "--nodes", "2", "--platform", platform, str(script)]) == 1
    error = capsys.readouterr().err
    assert "rank 1 had this error:" in error and error.rstrip().endswith("ValueError: found late")
