"""Checks of a plan against a model, before anything is changed, and what is found out on the way."""
