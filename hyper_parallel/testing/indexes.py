"""Changes to the indexes of checkpoints, for tests."""

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
    """Change the index of a checkpoint, and update its checksum.

    Args:
        checkpoint: directory of the checkpoint.
        change: function that changes the parsed index in place.
        write: function that changes the serialized index afterwards.
    """
    path = checkpoint / "index.json"
    content = json.loads(path.read_text())
    content.pop("sum", None)
    change(content)
    path.write_text(seal(write(json.dumps(content))))
