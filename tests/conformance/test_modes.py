"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_modes`."""

from hyper_parallel.testing.conformance.test_modes import *
