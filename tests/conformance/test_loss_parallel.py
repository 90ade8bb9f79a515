"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_loss_parallel`."""

from hyper_parallel.testing.conformance.test_loss_parallel import *
