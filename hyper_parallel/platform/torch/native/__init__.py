"""Conversions between DTensors, meshes and checkpoints of torch itself and those of this library."""
