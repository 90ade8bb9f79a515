"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_written_arguments`."""

from hyper_parallel.testing.conformance.test_written_arguments import *
