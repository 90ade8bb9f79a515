"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_fully_shard_corners`."""

from hyper_parallel.testing.conformance.test_fully_shard_corners import *
