"""See `tests.conformance`: the checks are in `hyper_parallel.testing.conformance.test_mesh_groups`."""

from hyper_parallel.testing.conformance.test_mesh_groups import *
