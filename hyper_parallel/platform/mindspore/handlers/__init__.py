"""Protocols of MindSpore's tensors besides the operations of the op table."""
