"""A complete third-party backend of HyperParallel. It is imported when a program asks for it, not before."""
