"""Device meshes: ranks, names, slices and process groups."""
