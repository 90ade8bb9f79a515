"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_styles`."""

from hyper_parallel.testing.conformance.test_styles import *
