"""Distributed tensors and parameters, and parameters that stand in for others while a cell runs."""
