"""Checks of a plan against a model, which run before `parallelize_module` changes the model."""
