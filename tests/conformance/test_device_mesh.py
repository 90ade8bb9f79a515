"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_device_mesh`."""

from hyper_parallel.testing.conformance.test_device_mesh import *
