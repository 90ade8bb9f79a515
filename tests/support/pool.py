"""`hyper_parallel.testing.pool` under its former name."""

import sys

from hyper_parallel.testing import pool

sys.modules[__name__] = pool
