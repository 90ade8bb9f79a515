"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_fully_shard_2d`."""

from hyper_parallel.testing.conformance.test_fully_shard_2d import *
