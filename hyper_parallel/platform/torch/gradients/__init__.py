"""Autograd functions and hooks, and gradients that lie in one memory."""
