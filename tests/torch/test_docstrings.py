"""The examples in the docstrings run, and the style that CONTRIBUTING.md shows."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from tests.support.programs import run_each

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
        for folder in ("core", "debug", "integrations" if find_spec("transformers") else "integrations/torch")
        for path in sorted((PACKAGE / folder).rglob("*.py"))
        if path.stem != "__init__"
    ]
    modules += ["hyper_parallel.torch", "hyper_parallel.platform.mesh_methods"]
    assert int(run_alone("-c", PROGRAM, *modules).split()[-1]) > 30


def test_style_of_the_first_day(tmp_path: Path) -> None:
    page = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    script = tmp_path / "frozen.py"
    script.write_text(next(block for block in blocks if block.startswith("# frozen.py\n")))
    assert "(Shard(dim=0),) None torch.Size([2, 4])" in run_alone(str(script))


def run_alone(*arguments: str) -> str:
    """The output of Python, in a process whose world has one rank."""
    (ended,) = run_each(arguments, [{}])
    assert ended.status == 0, ended.out + ended.err
    return ended.out
