"""Python imports this by itself when it starts: `tests.simulated_npu run` puts this folder on the path."""

from tests.simulated_npu import preload

preload.install()
