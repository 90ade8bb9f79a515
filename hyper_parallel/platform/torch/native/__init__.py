"""Conversions of DTensors, meshes and checkpoints between torch and this library."""
