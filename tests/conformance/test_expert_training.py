"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_expert_training`."""

from hyper_parallel.testing.conformance.test_expert_training import *
