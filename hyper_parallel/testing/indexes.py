"""Indexes of checkpoints that tests change."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hyper_parallel.checkpoint.index import seal

__all__ = ["change_index"]


def change_index(
    checkpoint: Path, change: Callable[[dict[str, Any]], Any], write: Callable[[str], str] = lambda text: text
) -> None:
    """Change the index of a checkpoint, and give it the checksum of its new content.

    Args:
        checkpoint: its directory.
        change: changes the parsed index.
        write: changes the text of the index after that.
    """
    path = checkpoint / "index.json"
    content = json.loads(path.read_text())
    content.pop("sum", None)
    change(content)
    path.write_text(seal(write(json.dumps(content))))
