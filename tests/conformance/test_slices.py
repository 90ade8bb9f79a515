"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_slices`."""

from hyper_parallel.testing.conformance.test_slices import *
