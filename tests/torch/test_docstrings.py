"""The examples in the docstrings run."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "hyper_parallel"

#: Runs in a process of its own, whose world has one rank: the examples build meshes.
PROGRAM = """
import doctest, importlib, sys
attempted = 0
for name in sys.argv[1:]:
    result = doctest.testmod(importlib.import_module(name))
    attempted += result.attempted
    if result.failed:
        sys.exit(f"{name}: {result.failed} example(s) failed")
print(attempted)
"""


def test_examples() -> None:
    modules = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for folder in ("core", "debug", *(["integrations"] if find_spec("transformers") else []))
        for path in sorted((PACKAGE / folder).rglob("*.py"))
        if path.stem != "__init__"
    ]
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {key: value for key, value in os.environ.items() if key not in launcher}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, *modules],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert int(run.stdout.split()[-1]) > 30
