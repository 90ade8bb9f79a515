"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_experts`."""

from hyper_parallel.testing.conformance.test_experts import *
