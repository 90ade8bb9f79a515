"""Entry point of ``python -m hyper_parallel``, the same as the command ``hyper-parallel``."""

import sys

from hyper_parallel.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
