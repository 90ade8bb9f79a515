"""Names that would control a terminal, and numbers, names and nests that no system takes: the errors of the library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hyper_parallel.checkpoint import CheckpointError, async_save, latest, load, save, tool
from hyper_parallel.checkpoint.__main__ import main
from hyper_parallel.checkpoint.ranks import Alone, together
from hyper_parallel.cli.output import print_text
from hyper_parallel.platform import get_platform, registry
from hyper_parallel.platform.terminal import printable, printable_lines
from hyper_parallel.platform.timeout import timeout_seconds

#: Clears the screen, in two ways; turns the direction of writing; is no text; begins a line.
WILD = "a\x1b[2J\x9b2J\u202e\udc80\n\rb"
TAME = r"a\x1b[2J\x9b2J\u202e\udc80\n\rb"


def test_what_is_written_out() -> None:
    assert printable(WILD) == TAME and printable("ä ~") == "ä ~"
    assert printable_lines("a\n\tb") == "a\n\\tb"


@pytest.mark.parametrize("width", [None, 30])
def test_show(tmp_path: Path, capsys: pytest.CaptureFixture[str], width: int | None) -> None:
    """Names of folders, tensors, their ties and values."""
    wild, tensor = WILD.replace("\udc80", ""), get_platform().host_tensor(np.zeros(2, np.float32))
    path = save({wild: tensor, "tied" + wild: tensor, "step" + wild: 1}, tmp_path / wild)
    text = tool.show(path, width)
    assert all(line.isprintable() for line in text.split("\n")) and text.count(r"a\x1b[2J\x9b2J\u202e\n\rb") >= 4
    assert main(["show", str(path)]) == 0 and "\x1b" not in capsys.readouterr().out
    out = tmp_path / f"out{wild}"
    for status in (0, 1):
        assert main(["convert", str(path), "--to", "one-file", "--out", str(out)]) == status
        captured = capsys.readouterr()
        assert r"outa\x1b[2J" in captured.out + captured.err
        assert "\x1b" not in captured.out + captured.err


def test_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / WILD.replace("\udc80", "")
    assert main(["show", str(path)]) == 1
    error = capsys.readouterr().err
    assert error.rstrip("\n").isprintable() and r"\x1b[2J" in error
    with pytest.raises(CheckpointError) as raised:
        load({}, path)
    assert str(raised.value).isprintable()
    save({}, path)
    with pytest.raises(ValueError, match="exists already") as refused:
        save({}, path)
    assert str(refused.value).isprintable()
    for error_of_rank in (OSError("two\nlines\x1b"), CheckpointError("a\x1b")):
        with pytest.raises(CheckpointError) as raised:
            together(Alone(), "saving", lambda e=error_of_rank: (_ for _ in ()).throw(e))
        assert str(raised.value).isprintable()
    print_text("two\nlines\x1b")
    assert capsys.readouterr().out == "two\nlines\\x1b\n"


def test_timeouts_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds in ("1e300", "inf", "nan", "-1", "x\x1b"):
        with pytest.raises(ValueError, match=r"HYPER_PARALLEL_TIMEOUT=.*at most 1e\+09") as raised:
            timeout_seconds(None, {"HYPER_PARALLEL_TIMEOUT": seconds})
        assert str(raised.value).isprintable()
    monkeypatch.setattr(registry, "_made", list)
    monkeypatch.setenv("RANK", "x")
    assert registry._rank() == "x"  # of a log, whatever a launcher says


def test_long_names(tmp_path: Path) -> None:
    """The longest one can be overwritten; others are refused before anything is written."""
    for run in (save, async_save):
        with pytest.raises(ValueError, match=r"has 240 bytes.*at most 198 bytes"):
            run({}, tmp_path / ("x" * 240))
    assert not [*tmp_path.iterdir()]
    for name in ("x" * 198, "ä" * 99):
        for step in range(2):
            save({"step": step}, tmp_path / name, overwrite=True)
        assert load({"step": 0}, tmp_path / name)["step"] == 1
    assert len([*tmp_path.iterdir()]) == 2 and latest(tmp_path) is not None
    with pytest.raises(CheckpointError, match="cannot be read: File name too long"):
        load({}, tmp_path / ("x" * 300))
    assert main(["show", str(tmp_path / ("x" * 300))]) == 1


class Deep:
    """An object whose state is a nest."""

    def state_dict(self) -> Any:
        return nested(5000)

    def load_state_dict(self, state: Any) -> None:
        """Take nothing."""


def nested(depth: int) -> Any:
    x: Any = 1
    for i in range(depth):
        x = {"a": x} if i % 2 else [x]
    return x


def test_deep_states(tmp_path: Path) -> None:
    own: list[Any] = []
    own.append(own)
    for state in (nested(5000), {"list": own}, {"object": Deep()}):
        with pytest.raises(ValueError, match="nested more than 100 levels deep"):
            save(state, tmp_path / "deep")
    path = save(nested(100), tmp_path / "fits")
    assert load(nested(100), path) == nested(100)
    with pytest.raises(ValueError, match="nested more than 100 levels deep"):
        load(nested(5000), path)
