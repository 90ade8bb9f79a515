"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_explain`."""

from hyper_parallel.testing.conformance.test_explain import *
