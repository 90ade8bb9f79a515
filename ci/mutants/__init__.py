"""Mutants: small changes of the code that the tests should notice. See `docs/gates.md`."""
