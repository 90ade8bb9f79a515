"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_local_map`."""

from hyper_parallel.testing.conformance.test_local_map import *
