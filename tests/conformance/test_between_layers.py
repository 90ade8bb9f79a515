"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_between_layers`."""

from hyper_parallel.testing.conformance.test_between_layers import *
