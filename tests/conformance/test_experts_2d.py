"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_experts_2d`."""

from hyper_parallel.testing.conformance.test_experts_2d import *
