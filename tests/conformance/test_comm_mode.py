"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_comm_mode`."""

from hyper_parallel.testing.conformance.test_comm_mode import *
