"""The torch backends: shared code here, what differs between devices in `cpu`, `cuda` and `npu`."""

try:
    import torch as _torch  # noqa: F401
except RuntimeError as error:
    # torch_npu is loaded by torch itself through an entry point, and fails without the CANN runtime.
    if "torch_npu" not in str(error):
        raise
    raise ImportError(
        "torch cannot be imported because torch_npu is installed and cannot be loaded, most likely because CANN is "
        "not installed or its set_env.sh was not sourced. Install CANN and source set_env.sh; to use torch on the CPU "
        "instead, uninstall torch_npu or set TORCH_DEVICE_BACKEND_AUTOLOAD=0. torch said: " + str(error)
    ) from error
