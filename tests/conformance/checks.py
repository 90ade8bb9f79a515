"""`hyper_parallel.testing.conformance.checks` under its former name."""

from hyper_parallel.testing.conformance.checks import *
