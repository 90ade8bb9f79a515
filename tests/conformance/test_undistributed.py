"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_undistributed`."""

from hyper_parallel.testing.conformance.test_undistributed import *
