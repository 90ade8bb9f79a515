"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_other_inputs`."""

from hyper_parallel.testing.conformance.test_other_inputs import *
