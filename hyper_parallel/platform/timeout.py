"""Time-outs: how long ranks wait for each other."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

from hyper_parallel.platform.terminal import printable

__all__ = ["LONGEST", "SLOWEST", "VARIABLE", "slowness", "timeout_seconds"]

#: Environment variable with seconds, for programs that do not call `init_process_group` themselves.
VARIABLE = "HYPER_PARALLEL_TIMEOUT"
#: Maximum of a time-out in seconds, 31 years: no clock of the frameworks takes 1e300.
LONGEST = 1e9
#: Maximal factor by which a busy machine may extend a limit.
SLOWEST = 10.0


def timeout_seconds(timeout: float | None, environ: Mapping[str, str] = os.environ) -> float | None:
    """Return the time-out from the argument, else from the variable ``HYPER_PARALLEL_TIMEOUT``, else None.

    Args:
        timeout: seconds.
        environ: the environment.

    Raises:
        TypeError: for an argument that is no number. ValueError: for anything but a positive number up to `LONGEST`.

    Example:
        >>> timeout_seconds(None, {"HYPER_PARALLEL_TIMEOUT": "20"})
        20.0
    """
    if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, (int, float))):
        raise TypeError(f"init_process_group(timeout=...) takes a number of seconds, got {timeout!r}")
    source, given = f"{VARIABLE}=", environ.get(VARIABLE)
    if timeout is not None:
        source, given = "init_process_group(timeout=...) ", repr(timeout)
    if given is None:
        return None
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= LONGEST:
        raise ValueError(
            f"{source}{printable(given)}: the timeout is a positive number of seconds, at most {LONGEST:.0e}. Leave "
            "the timeout out for the default of the framework"
        )
    return seconds


def slowness() -> float:
    """Return the factor by which the machine's load may slow ranks down, estimated from the number of waiting
    processes."""
    try:
        waiting = os.getloadavg()[0]
    except (AttributeError, OSError):  # the system does not report its load
        return 1.0
    return min(max(1.0, waiting / 2 / (os.cpu_count() or 1)), SLOWEST)
