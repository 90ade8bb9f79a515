"""torch.compile of parallelised modules: the second forward of a plan, and how torch's compiler sees DTensors."""
