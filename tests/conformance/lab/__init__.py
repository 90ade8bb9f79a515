"""`hyper_parallel.testing.labs` under its former name."""

from hyper_parallel.testing.labs import get_lab

__all__ = ["get_lab"]
