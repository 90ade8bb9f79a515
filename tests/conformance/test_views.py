"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_views`."""

from hyper_parallel.testing.conformance.test_views import *
