"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_redistribute_options`."""

from hyper_parallel.testing.conformance.test_redistribute_options import *
