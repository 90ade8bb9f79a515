"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_style_corners`."""

from hyper_parallel.testing.conformance.test_style_corners import *
