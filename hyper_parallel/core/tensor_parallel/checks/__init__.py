"""Checks of a plan against a model, before anything is changed, and facts that are found on the way."""
