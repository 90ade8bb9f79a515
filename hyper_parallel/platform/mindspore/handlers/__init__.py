"""Handlers for calls on MindSpore's tensors other than operations of the op table."""
