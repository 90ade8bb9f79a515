"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_checkpoint_tool`."""

from hyper_parallel.testing.conformance.test_checkpoint_tool import *
