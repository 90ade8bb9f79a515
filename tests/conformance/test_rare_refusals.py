"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_rare_refusals`."""

from hyper_parallel.testing.conformance.test_rare_refusals import *
