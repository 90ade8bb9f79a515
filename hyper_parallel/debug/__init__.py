"""Looking at what the library does: `CommDebugMode` lists collectives, `check_ranks` compares them over the ranks,
`cache_sizes` says what is kept."""

from hyper_parallel.core.caches import cache_sizes
from hyper_parallel.core.dtensor.communication.rank_check import check_ranks
from hyper_parallel.core.dtensor.communication.recorder import CollectiveEvent
from hyper_parallel.debug.comm_mode import CommDebugMode

__all__ = ["CollectiveEvent", "CommDebugMode", "cache_sizes", "check_ranks"]
