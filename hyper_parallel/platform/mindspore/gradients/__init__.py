"""Gradient functions, autograd functions, and marks of local gradients."""
