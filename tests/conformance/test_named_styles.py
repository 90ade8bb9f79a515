"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_named_styles`."""

from hyper_parallel.testing.conformance.test_named_styles import *
