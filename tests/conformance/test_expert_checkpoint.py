"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_expert_checkpoint`."""

from hyper_parallel.testing.conformance.test_expert_checkpoint import *
