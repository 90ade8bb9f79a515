"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_kept_parameters`."""

from hyper_parallel.testing.conformance.test_kept_parameters import *
