"""Programs that say what is patched in a process of their own, for the tests of each framework's patches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["fresh", "page_has"]

ROOT = Path(__file__).resolve().parents[2]


def fresh(code: str, ranks: int = 1, port: int = 0) -> None:
    """Run ``code`` in a new interpreter, which must print "passed" and end well; with several ranks in one for each,
    under torchrun's variables."""
    environment = {**os.environ, "GLOG_v": "3"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    started = []
    for rank in range(ranks):
        if ranks > 1:
            where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            environment.update({"RANK": str(rank), "WORLD_SIZE": str(ranks), **where})
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", code],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=180)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    ends = [process.returncode for process in started]
    # Not as a line: a framework may log something behind it.
    assert ends == [0] * ranks and all("passed" in output for output in outputs), "\n".join(outputs)


def page_has(framework: str, text: str) -> bool:
    """Whether docs/patches.md has ``text`` as the table of ``framework``."""
    # Not at the top: programs that show that nothing is imported import this module.
    from tests.support.patch_table import with_table

    page = (ROOT / "docs" / "patches.md").read_text(encoding="utf-8")
    return with_table(page, framework, text) == page
