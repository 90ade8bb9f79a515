"""The conformance suite for the backends of this project.

The checks themselves are in `hyper_parallel.testing.conformance`, where authors of other backends can run them too. A
file here collects one of theirs, so that pytest runs it with the rest. Tests of this project instead of a backend - its
README, its documentation, its names - are only here.
"""
