"""Support for other libraries: functions for their models, and functions with their names. Other libraries are imported
at use. In the rest of this package, only `planning` and modules that define nothing but names import this folder."""
