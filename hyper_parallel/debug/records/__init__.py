"""Records of runs, and their comparison; see docs/compare.md. Comparing needs only NumPy and no framework."""
