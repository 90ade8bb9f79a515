"""Lines of progress: those of the gate while its parts run, and while a command is silent."""

from __future__ import annotations

import importlib
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
HEARTBEAT = ROOT / "ci" / "heartbeat.py"


@pytest.fixture
def reporter(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`ci/reporter.py` as a module."""
    monkeypatch.syspath_prepend(ROOT / "ci")
    return importlib.import_module("reporter")


def events(path: Path) -> Any:
    from ci.progress import Events

    return Events(path)


def test_progress(
    reporter: Any, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Progress from collecting to the last test, in two processes; failures beyond the first ones only by name."""
    monkeypatch.setattr(reporter, "IN_FULL", 1)
    part = reporter.Part("demo", (tmp_path / "log").open("w"))
    assert part.progress == "demo begins"
    part.watch([tmp_path / "a", tmp_path / "b"])
    part.look()
    assert part.progress == "demo collecting"
    a, b = events(tmp_path / "a"), events(tmp_path / "b")
    a.add(collected=3)
    a.add(started="t::one")
    a.add(failed="t::one", text="why\nand how")
    a.add(finished="t::one", outcome="failed")
    part.look()
    assert part.progress == "demo collecting, 1 done, 1 failed"
    assert capsys.readouterr().out == "\n== FAILED demo: t::one\nwhy\nand how\n\n"
    b.add(collected=2)
    b.add(started="t::two")
    with (tmp_path / "a").open("a") as file:
        file.write('{"failed": "t::three", "te')  # a line that is not whole yet
    part.look()
    assert part.progress == "demo 1 of 5, 1 failed"
    with (tmp_path / "a").open("a") as file:
        file.write('xt": "other"}\n')
    part.look()
    assert capsys.readouterr().out == "== FAILED demo: t::three\n"
    monkeypatch.setattr(reporter, "LONG", 0.0)
    assert part.progress == "demo 1 of 5, 1 failed, 0 s in t::two"
    part.doing("coverage report")
    assert part.progress == "demo coverage report"


def test_lines(reporter: Any, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Progress lines are for all parts together; the text of a failing test comes before the end of its part."""
    with reporter.Reporter(every=0.0) as lines:
        lines.expect()
        lines.expect()
        with lines.part("demo", tmp_path / "log") as part:
            part.say("== demo")
            part.doing("collecting")
            until = time.monotonic() + 60
            output = ""
            while "s: demo collecting (1 more to come)\n" not in output and time.monotonic() < until:
                time.sleep(0.05)
                output += capsys.readouterr().out
            part.watch([tmp_path / "a"])
            events(tmp_path / "a").add(failed="t::one", text="why")
        assert "== FAILED demo: t::one\nwhy\n" in capsys.readouterr().out
    assert output.startswith("demo: begins\n== demo\n") and "s: demo collecting (1 more to come)\n" in output
    assert (tmp_path / "log").read_text() == "== demo\n"


def beat(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HEARTBEAT), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def test_heartbeat(tmp_path: Path) -> None:
    """The heartbeat tells how long a command has run and how large its folder is, and ends with the command."""
    (tmp_path / "file").write_bytes(b"x" * 3_000_000)
    program = "import time; time.sleep(1.5); print('said', flush=True); raise SystemExit(3)"
    done = beat("--folder", str(tmp_path), "--every=0.2", "making it", sys.executable, "-c", program)
    first, *rest = done.stdout.splitlines()
    assert done.returncode == 3 and first == "making it: 0 s, 3 MB", done
    assert "said" in rest and rest[-1].endswith("s, 3 MB, ended with status 3") and len(rest) > 3
    done = beat("doing it", sys.executable, "-c", "pass")
    assert done.returncode == 0 and done.stdout.endswith("s, done\n")
    done = beat("doing it", sys.executable, "-c", "import os; os.kill(os.getpid(), 9)")
    assert done.returncode == 137 and "ended with status -9" in done.stdout


def test_heartbeat_without_a_command() -> None:
    assert beat("doing it").returncode == 2
    done = beat("doing it", "/nowhere/program")
    assert done.returncode == 127 and "doing it: " in done.stderr
