"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_plain_code`."""

from hyper_parallel.testing.conformance.test_plain_code import *
