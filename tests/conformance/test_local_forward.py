"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_local_forward`."""

from hyper_parallel.testing.conformance.test_local_forward import *
