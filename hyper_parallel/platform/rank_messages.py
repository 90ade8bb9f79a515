"""Errors and warnings of the ranks that ``hyper-parallel launch`` starts: each is shown once, with its ranks.

The first rank of a node prints its messages immediately. The other ranks write theirs to a folder. At the end, the
launcher prints messages that the first rank did not have.
"""

from __future__ import annotations

import json
import re
import sys
import traceback
import warnings
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["VARIABLE", "gathered", "leave_messages"]

#: Environment variable with the folder of the messages. A rank removes it, so that its child processes do not inherit
#: it.
VARIABLE = "HYPER_PARALLEL_RANK_MESSAGES"
#: Maximum number of different warnings that are saved for a rank.
_MOST = 200
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


def leave_messages(environ: MutableMapping[str, str]) -> None:
    """Start to save the messages of this rank, if the launcher asks for them. Does nothing in a rank that the launcher
    did not start.

    Args:
        environ: the environment of this process.
    """
    folder = environ.pop(VARIABLE, None)
    rank = environ.get("RANK", environ.get("RANK_ID"))
    if folder is None or rank is None or environ.get("MS_ROLE", "MS_WORKER") != "MS_WORKER":
        return
    shows = environ.get("LOCAL_RANK", rank) == "0"
    path = Path(folder) / f"{rank}.messages"
    sys.excepthook = _hook(path, shows, sys.excepthook)
    warnings.showwarning = _warner(path, shows, warnings.showwarning)


def _hook(path: Path, shows: bool, before: Callable[..., Any]) -> Callable[..., None]:
    def hook(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        text = "".join(traceback.format_exception(kind, error, where))
        kept = not issubclass(kind, KeyboardInterrupt) and _write(path, "error", text)
        if shows or not kept:
            before(kind, error, where)

    return hook


def _warner(path: Path, shows: bool, before: Callable[..., Any]) -> Callable[..., None]:
    seen: set[str] = set()

    def show(
        message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: str | None = None
    ) -> None:
        text = warnings.formatwarning(message, category, filename, lineno, line)
        kept = file is None and (text in seen or (len(seen) < _MOST and _write(path, "warning", text)))
        seen.add(text)
        if shows or not kept:
            before(message, category, filename, lineno, file, line)

    return show


def _write(path: Path, kind: str, text: str) -> bool:
    """Append a message to the file, and return whether that succeeded."""
    with suppress(OSError):
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{json.dumps({kind: text})}\n")
        return True
    return False


def gathered(folder: str, first: int) -> str:
    """Return the messages that ranks have saved, for the end of a job. Empty if the first rank has shown all.

    Args:
        folder: folder of the messages.
        first: the rank that printed its messages itself.
    """
    of: dict[tuple[str, str], dict[int, str]] = {}
    for path in sorted(Path(folder).glob("*.messages")):
        for line in path.read_text(encoding="utf-8").splitlines():
            with suppress(ValueError):  # a line that its rank could not finish
                ((kind, text),) = json.loads(line).items()
                of.setdefault((kind, _ADDRESS.sub("0x", text)), {}).setdefault(int(path.stem), text)
    lines = []
    for (kind, _), ranks in of.items():
        if first not in ranks:
            lines.append(f"{_named(ranks)} had this {kind}:\n{next(iter(ranks.values())).rstrip()}")
        elif kind == "error" and len(ranks) > 1:
            end = ranks[first].rstrip().splitlines()[-1]
            lines.append(f"{_named(ranks)} had the same error, which is shown once: {end}")
    return "\n".join(lines)


def _named(ranks: dict[int, str]) -> str:
    """Return a text that names ranks: ``ranks 0 to 3, 6``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(parts)}"
