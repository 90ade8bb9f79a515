"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_agreement`."""

from hyper_parallel.testing.conformance.test_agreement import *
