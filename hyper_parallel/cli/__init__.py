"""The command ``hyper-parallel``: what is installed, launching, a self-check, and looking ahead."""
