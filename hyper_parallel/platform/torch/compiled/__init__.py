"""torch.compile of parallelised modules: forwards of styled modules, and DTensors, for torch's compiler."""
