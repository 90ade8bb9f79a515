"""The README's script for the framework under test runs as it stands, on two processes."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).resolve().parents[2] / "README.md"


def script_of(name: str, page: Path = README) -> str:
    """The Python block of a page whose first line is ``# name``."""
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return next(block for block in blocks if block.startswith(f"# {name}\n"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_on_two(text: str, script: Path, address: str = "127.0.0.1") -> list[float]:
    """Run a program as two processes; the errors that it prints on rank 0."""
    script.write_text(text)
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, str(script)],
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "MASTER_ADDR": address,
                "MASTER_PORT": port,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    errors = [float(error) for error in re.findall(r" off by (\S+)", outputs[0])]
    assert len(errors) == 4, outputs[0]
    return errors


@pytest.mark.parametrize("address", ["127.0.0.1", "localhost"])
def test_script(platform_name: str, tmp_path: Path, address: str) -> None:
    text = script_of("mlp_mindspore.py" if platform_name == "mindspore" else "mlp_torch.py")
    assert max(run_on_two(text, tmp_path / "script.py", address)) < 1e-5
