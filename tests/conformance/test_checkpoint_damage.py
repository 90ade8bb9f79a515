"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_checkpoint_damage`."""

from hyper_parallel.testing.conformance.test_checkpoint_damage import *
