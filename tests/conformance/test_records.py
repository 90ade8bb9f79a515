"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_records`."""

from hyper_parallel.testing.conformance.test_records import *
