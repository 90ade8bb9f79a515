"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_random_states`."""

from hyper_parallel.testing.conformance.test_random_states import *
