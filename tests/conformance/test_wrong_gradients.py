"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_wrong_gradients`."""

from hyper_parallel.testing.conformance.test_wrong_gradients import *
