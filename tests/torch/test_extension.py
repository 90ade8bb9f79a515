"""torch_npu without CANN: torch itself fails to import then, HyperParallel on the CPU must not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
from hyper_parallel.platform import PlatformError, available_platforms, get_platform
try:
    get_platform("npu")
except PlatformError as error:
    assert "CANN" in str(error) and "libhccl.so" in str(error), error
    assert "torch-cpu: available" in str(error), error
else:
    raise AssertionError("an NPU was found")
print(get_platform("torch-cpu").name)
"""


def test_without_cann(tmp_path: Path) -> None:
    package, info = tmp_path / "torch_npu", tmp_path / "torch_npu-2.13.0.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.13.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    root = Path(__file__).parents[2]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(root)]), "CUDA_VISIBLE_DEVICES": ""}
    environ.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", None)
    plain = subprocess.run([sys.executable, "-c", "import torch"], env=environ, capture_output=True, text=True)
    assert plain.returncode != 0 and "torch_npu" in plain.stderr
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "torch-cpu"), done.stderr
