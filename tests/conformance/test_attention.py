"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_attention`."""

from hyper_parallel.testing.conformance.test_attention import *
