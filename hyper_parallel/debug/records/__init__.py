"""Records of runs, and where two of them part: docs/compare.md. To compare needs NumPy and no framework."""
