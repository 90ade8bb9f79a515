"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_parts`."""

from hyper_parallel.testing.conformance.test_parts import *
