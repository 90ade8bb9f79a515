"""Processes and their communication: launch, groups, collectives, lost ranks."""
