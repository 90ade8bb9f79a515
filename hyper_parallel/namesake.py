"""Another package has this one's import name: mindspore-ai/hyper-parallel. Both cannot be used in one environment.

Where both are installed into one folder, the later one replaces files of the earlier one and leaves others. In two
folders of ``sys.path``, the first is imported, which may be another on each machine. Nothing else fails.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

__all__ = ["refuse_namesake"]

#: Folders that the other package has, in one version or another, and this one does not.
_OF_THE_OTHER = ("collectives", "auto_parallel", os.path.join("core", "fully_shard"), os.path.join("core", "shard"))


def refuse_namesake(paths: Iterable[str] | None = None) -> None:
    """Raise if the other package is in one of the folders from which Python imports (those of ``sys.path``).

    Raises:
        ImportError: with the folder, and the remedy.
    """
    for path in sys.path if paths is None else paths:
        folder = os.path.join(path or os.curdir, "hyper_parallel")
        if any(os.path.isdir(os.path.join(folder, name)) for name in _OF_THE_OTHER):
            raise ImportError(
                f"{folder} holds files of mindspore-ai/hyper-parallel, another package with the name hyper_parallel: "
                "it is uncertain which of the two is imported. Use an environment for each; if both were installed "
                "into one, pip uninstall hyper-parallel, delete that folder, and install one"
            )
