"""DTensor, DeviceMesh, placements and redistribution, written against `hyper_parallel.platform` only."""
