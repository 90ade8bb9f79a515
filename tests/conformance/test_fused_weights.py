"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_fused_weights`."""

from hyper_parallel.testing.conformance.test_fused_weights import *
