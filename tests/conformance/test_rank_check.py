"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_rank_check`."""

from hyper_parallel.testing.conformance.test_rank_check import *
