"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_checkpoint_state_dict`."""

from hyper_parallel.testing.conformance.test_checkpoint_state_dict import *
