"""Putting the stand-in in the place of CANN, in this process, when torch_npu is imported.

torch_npu's libraries ask for CANN's by name (``libascendcl.so``, ``libhccl.so``, ...). Libraries of these names that
are loaded already are taken. So nothing has to be installed and no path has to be set.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

#: Names the folder of the compiled libraries; `tests.simulated_npu run` sets it.
FOLDER_VARIABLE = "SIMULATED_NPU_LIBRARIES"
#: In the order in which they are loaded.
LIBRARIES = ("ascendcl", "hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel", "atb", "hcomm")
#: Loaded too with a torch that was built for CUDA, without which torch_npu 2.14 would end the process.
BESIDE_CUDA = "torch_with_cuda"


def has_cuda() -> bool:
    """Return whether the installed torch was built for CUDA, without importing it: torch imports torch_npu in its
    midst.
    """
    spec = importlib.machinery.PathFinder.find_spec("torch")
    return spec is not None and spec.origin is not None and (Path(spec.origin).parent / "lib/libc10_cuda.so").exists()


def is_simulated() -> bool:
    """Return whether NPUs are simulated in this process."""
    return any(isinstance(finder, _Finder) for finder in sys.meta_path)


def install() -> None:
    """Watch for the import of torch_npu, if `tests.simulated_npu run` is above this process."""
    if FOLDER_VARIABLE in os.environ and not is_simulated():
        sys.meta_path.insert(0, _Finder(Path(os.environ[FOLDER_VARIABLE])))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds torch_npu as Python would, and has `_Loader` load it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch_npu":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._folder)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads the libraries before torch_npu, and replaces its kernels after."""

    def __init__(self, loader: importlib.abc.Loader, folder: Path) -> None:
        self._loader = loader
        self._folder = folder

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        for name in (*LIBRARIES, BESIDE_CUDA) if has_cuda() else LIBRARIES:
            ctypes.CDLL(str(self._folder / f"lib{name}.so"), mode=ctypes.RTLD_GLOBAL)
        with contextlib.redirect_stdout(sys.stderr):  # torch_npu prints that it misses ASCEND_HOME_PATH
            self._loader.exec_module(module)
        from tests.simulated_npu import aten_kernels, fused_kernels

        aten_kernels.install()
        fused_kernels.install()
