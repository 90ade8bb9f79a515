"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_replicate_corners`."""

from hyper_parallel.testing.conformance.test_replicate_corners import *
