"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_wrong_inputs`."""

from hyper_parallel.testing.conformance.test_wrong_inputs import *
