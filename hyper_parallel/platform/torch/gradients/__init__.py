"""Autograd functions and hooks, and parameters that share one storage."""
