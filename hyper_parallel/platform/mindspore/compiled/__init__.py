"""Compilation of parallelised modules: cells that replace styled cells in MindSpore's graphs."""
