"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_fuzz`."""

from hyper_parallel.testing.conformance.test_fuzz import *
