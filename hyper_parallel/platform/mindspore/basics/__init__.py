"""Foundations of the MindSpore backend: private names of MindSpore, dtypes, empty tensors, seeds."""
