"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_redistribute`."""

from hyper_parallel.testing.conformance.test_redistribute import *
