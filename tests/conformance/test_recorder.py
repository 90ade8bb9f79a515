"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_recorder`."""

from hyper_parallel.testing.conformance.test_recorder import *
