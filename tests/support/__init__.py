"""Helpers that tests share in addition to `hyper_parallel.testing`."""
