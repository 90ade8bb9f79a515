"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_nesting`."""

from hyper_parallel.testing.conformance.test_nesting import *
