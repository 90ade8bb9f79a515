"""Processes and their messages: launch, groups, collectives, lost ranks."""
