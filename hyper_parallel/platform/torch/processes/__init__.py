"""Processes and what they send: launch, groups, collectives, lost ranks."""
