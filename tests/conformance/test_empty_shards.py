"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_empty_shards`."""

from hyper_parallel.testing.conformance.test_empty_shards import *
