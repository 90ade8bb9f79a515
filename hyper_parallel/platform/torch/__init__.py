"""The torch backends: shared code here, differences between devices in `cpu`, `cuda` and `npu`."""

import importlib.util
import os
import sys

from hyper_parallel.platform.logs import LOG

__all__: list[str] = []

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


def _import_torch() -> None:
    """Import torch, also where torch_npu is installed without CANN.

    ``import torch`` loads torch_npu through an entry point. If torch_npu fails, the import of torch fails, and a second
    attempt breaks torch itself. So torch is imported without such extensions first. The extensions are loaded
    afterwards, where a failure does not affect torch.
    """
    if "torch" in sys.modules or importlib.util.find_spec("torch_npu") is None or os.environ.get(_AUTOLOAD) == "0":
        import torch

        return
    before = os.environ.get(_AUTOLOAD)
    os.environ[_AUTOLOAD] = "0"
    try:
        import torch
    finally:
        if before is None:
            del os.environ[_AUTOLOAD]
        else:
            os.environ[_AUTOLOAD] = before
    try:
        getattr(torch, "_import_device_backends", lambda: None)()
    except RuntimeError as error:
        LOG.info("torch is used without its extension: %s", error)


_import_torch()
