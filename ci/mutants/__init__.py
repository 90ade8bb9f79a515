"""Mutants: small changes of the code that the tests should notice. See `docs/notes/mutants.md`."""
