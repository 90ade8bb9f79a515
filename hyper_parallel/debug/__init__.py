"""Looking at what the library does: `CommDebugMode` counts collectives."""

from hyper_parallel.debug.comm_mode import CommDebugMode

__all__ = ["CommDebugMode"]
