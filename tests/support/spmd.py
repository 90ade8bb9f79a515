"""`hyper_parallel.testing.spmd` under its former name."""

import sys

from hyper_parallel.testing import spmd

sys.modules[__name__] = spmd
