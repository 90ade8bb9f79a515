"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_units_by_choice`."""

from hyper_parallel.testing.conformance.test_units_by_choice import *
