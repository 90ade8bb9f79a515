"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_overlap`."""

from hyper_parallel.testing.conformance.test_overlap import *
