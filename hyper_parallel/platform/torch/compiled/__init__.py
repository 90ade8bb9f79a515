"""torch.compile of parallelised modules: the second forward of a plan, and DTensors as torch's compiler sees them."""
