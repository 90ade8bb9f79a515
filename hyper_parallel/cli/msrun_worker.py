"""One rank of msrun: it runs a script, and saves the exit status.

    python msrun_worker.py FOLDER SCRIPT [ARGUMENT ...]

msrun asks MindSpore's scheduler for the result of a job, but the scheduler considers a rank lost that ended by
`os._exit(0)`. So each rank writes its status into FOLDER. This module imports nothing of the package, because it runs
in each rank.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1


def main(folder: str, script: list[str]) -> int:
    """Run ``script`` and return its exit status, which is also written to a file in ``folder`` named after the rank."""
    libc = ctypes.CDLL(None)
    # msrun kills its processes, and the script must end with this one.
    child = subprocess.Popen(
        [sys.executable, *script], preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, frame: child.send_signal(received))
    status = child.wait()
    status = 128 - status if status < 0 else status
    if os.environ.get("MS_ROLE") == "MS_WORKER":  # the scheduler runs the script too
        path = Path(folder) / os.environ["RANK_ID"]
        path.with_suffix(".new").write_text(str(status))
        path.with_suffix(".new").replace(path)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
