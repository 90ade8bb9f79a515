"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_faults`."""

from hyper_parallel.testing.conformance.test_faults import *
