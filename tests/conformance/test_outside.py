"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_outside`."""

from hyper_parallel.testing.conformance.test_outside import *
