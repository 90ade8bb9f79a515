"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_checkpoint_pretrained`."""

from hyper_parallel.testing.conformance.test_checkpoint_pretrained import *
