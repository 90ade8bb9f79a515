"""Support for other libraries: their models, and names of theirs. Imports of other libraries happen at use. Of the rest
of the package only `planning` and modules that hold nothing but names import this."""
