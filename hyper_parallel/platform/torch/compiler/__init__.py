"""Dynamo: guards, and DTensors as torch's compiler sees them."""
