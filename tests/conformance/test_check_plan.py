"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_check_plan`."""

from hyper_parallel.testing.conformance.test_check_plan import *
