"""A check for mindspore-ai/hyper-parallel, another package with the same import name. One environment cannot have both.

If both are installed into one folder, the later one replaces some files of the earlier one. If they are in two folders
of ``sys.path``, the first is imported, which may differ between machines. Nothing else detects this.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

__all__ = ["refuse_namesake"]

#: Folders that some version of the other package has, and this package does not.
_OF_THE_OTHER = ("collectives", "auto_parallel", os.path.join("core", "fully_shard"), os.path.join("core", "shard"))


def refuse_namesake(paths: Iterable[str] | None = None) -> None:
    """Raise if the other package is in a folder from which Python imports (by default ``sys.path``).

    Raises:
        ImportError: when it is found. The message has the folder and the remedy.
    """
    for path in sys.path if paths is None else paths:
        folder = os.path.join(path or os.curdir, "hyper_parallel")
        if any(os.path.isdir(os.path.join(folder, name)) for name in _OF_THE_OTHER):
            raise ImportError(
                f"{folder} holds files of mindspore-ai/hyper-parallel, another package with the import name "
                "hyper_parallel. Python may import either of the two. Use a separate environment for each package. To "
                "repair this environment, run pip uninstall hyper-parallel, delete that folder, and install one of "
                "the two"
            )
