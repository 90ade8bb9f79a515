"""Functions with the names and keywords of torch's, on both frameworks. They add nothing to the library but names.

Nothing here imports torch: conversions to torch's own objects are in ``platform/torch/native/``.
"""
