"""`HYPER_PARALLEL_LOG`: its words, and the lines of the logger with each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hyper_parallel.cli.main import main
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.logs import LOG, VARIABLE, set_up, words


@pytest.fixture
def logger() -> Iterator[None]:
    before = LOG.handlers[:], LOG.level, LOG.propagate
    yield
    LOG.handlers[:], LOG.level, LOG.propagate = before


@pytest.mark.parametrize("wrong", ["loud", "info,rings", "info,debug", "1"])
def test_wrong_words(wrong: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A call that asks for a backend raises it, and a command prints it, without a traceback."""
    monkeypatch.setenv(VARIABLE, wrong)
    for ask in (words, lambda: set_up(int), lambda: get_platform("no such backend")):
        with pytest.raises(ValueError, match=f"HYPER_PARALLEL_LOG={wrong} is not a log level .*Set it to info for"):
            ask()
    assert main(["env"]) == 2
    assert f"hyper-parallel env: HYPER_PARALLEL_LOG={wrong} is not a log level" in capsys.readouterr().err


@pytest.mark.usefixtures("logger")
def test_what_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    set_up(lambda: 3)
    assert not LOG.isEnabledFor(20)  # without the variable nothing changes
    monkeypatch.setenv(VARIABLE, " Ranges , INFO,")
    assert words() == {"info", "ranges"}
    for _ in range(2):
        set_up(lambda: 3)
    LOG.info("mesh of %d", 4)
    LOG.debug("details")
    assert capsys.readouterr().err == "[hyper_parallel info, rank 3] mesh of 4\n"


@pytest.mark.usefixtures("logger")
def test_watching_alone_is_level_info(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "collectives")
    set_up(int)
    assert LOG.isEnabledFor(20) and not LOG.isEnabledFor(10)
