"""Tools that show the work of the library. `CommDebugMode` lists collectives, and `check_ranks` compares them between
ranks. `ProfilerRanges` names collectives in profiles. `visualize_sharding` shows the shards of each rank.
`ExpertCounts` shows the tokens of each expert, and `cache_sizes` the sizes of caches. `record` writes the tensors that
a model computes, and `compare` finds where two records first differ."""

from hyper_parallel.core.caches import cache_sizes
from hyper_parallel.core.communication.rank_check import check_ranks
from hyper_parallel.core.communication.recorder import CollectiveEvent
from hyper_parallel.debug.comm_counts import CommCounts
from hyper_parallel.debug.comm_mode import CommDebugMode
from hyper_parallel.debug.expert_counts import ExpertCounts
from hyper_parallel.debug.profiler_ranges import ProfilerRanges
from hyper_parallel.debug.records.comparing import Comparison, compare
from hyper_parallel.debug.records.errors import RecordError
from hyper_parallel.debug.records.recording import record
from hyper_parallel.debug.visualize import visualize_sharding

__all__ = [
    "CollectiveEvent",
    "CommCounts",
    "CommDebugMode",
    "Comparison",
    "ExpertCounts",
    "ProfilerRanges",
    "RecordError",
    "cache_sizes",
    "check_ranks",
    "compare",
    "record",
    "visualize_sharding",
]
