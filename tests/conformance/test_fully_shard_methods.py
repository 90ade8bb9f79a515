"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_fully_shard_methods`."""

from hyper_parallel.testing.conformance.test_fully_shard_methods import *
