"""Processes and what they send: launch, stores, groups, collectives, lost ranks."""
