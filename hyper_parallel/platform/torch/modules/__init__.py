"""Modules: replaced forwards, calls, copies, and the class of a module under `fully_shard`."""
