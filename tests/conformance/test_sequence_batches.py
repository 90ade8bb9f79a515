"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_sequence_batches`."""

from hyper_parallel.testing.conformance.test_sequence_batches import *
