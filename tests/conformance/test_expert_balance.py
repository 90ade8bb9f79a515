"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_expert_balance`."""

from hyper_parallel.testing.conformance.test_expert_balance import *
