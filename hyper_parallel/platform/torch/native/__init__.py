"""DTensors, meshes and checkpoints of torch itself, converted from and to ours."""
