"""Foundations of the torch backends: private names of torch, dtypes, plain tensors with a layout, counters."""
