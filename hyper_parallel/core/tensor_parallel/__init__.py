"""Tensor-parallel styles and `parallelize_module`. Mirrors ``torch.distributed.tensor.parallel``."""
