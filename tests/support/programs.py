"""Programs that stand in the documentation, run on two processes as a launcher would start them."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

__all__ = ["ROOT", "program_of", "run_on_two"]

ROOT = Path(__file__).resolve().parents[2]


def program_of(page: Path, name: str) -> str:
    """The Python block of a page whose first line is ``# name``."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return next(block for block in blocks if block.startswith(f"# {name}\n"))


def run_on_two(script: Path, address: str = "127.0.0.1") -> list[str]:
    """What each process has printed; they must end well."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": port}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={**environment, "RANK": rank, "LOCAL_RANK": rank},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in "01"
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    return outputs
