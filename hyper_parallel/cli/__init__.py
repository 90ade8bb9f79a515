"""The command ``hyper-parallel``: listing the installation, launching, a self-check, and planning."""
