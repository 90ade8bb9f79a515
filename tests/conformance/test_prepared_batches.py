"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_prepared_batches`."""

from hyper_parallel.testing.conformance.test_prepared_batches import *
