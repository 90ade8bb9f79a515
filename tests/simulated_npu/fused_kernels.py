"""Reference kernels for torch_npu's own operators: those that a tensor-parallel library and its tests call.

Every other operator of the namespace ``npu`` raises an error that says where to add it.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch._C import DisableTorchFunction

from tests.simulated_npu import attention, collective_kernels
from tests.simulated_npu.aliasing import host_alias, is_on_device, on_each, to_device
from tests.simulated_npu.aten_kernels import draw_offset

_libraries: list[torch.library.Library] = []  # registrations last as long as these


# -------------------------------------------------------------------------------------------------------------- norms
def rms_norm(x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6) -> tuple[torch.Tensor, torch.Tensor]:
    """(x / rms * gamma, 1 / rms); the latter is float32 with the normalised dimensions kept as 1."""
    dims = tuple(range(x.dim() - gamma.dim(), x.dim()))
    rstd = torch.rsqrt(x.float().pow(2).mean(dims, keepdim=True) + epsilon)
    return (x.float() * rstd).to(x.dtype) * gamma.to(x.dtype), rstd


def rms_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, gamma: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients by x and by gamma; the latter in float32."""
    dims = tuple(range(x.dim() - gamma.dim(), x.dim()))
    normalised, scaled = x.float() * rstd, dy.float() * gamma.float()
    dx = rstd * (scaled - normalised * (scaled * normalised).mean(dims, keepdim=True))
    return dx.to(x.dtype), (dy.float() * normalised).sum_to_size(gamma.shape)


def add_rms_norm(
    x1: torch.Tensor, x2: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(norm of the sum, 1 / rms, the sum)."""
    total = x1 + x2
    return (*rms_norm(total, gamma, epsilon), total)


# --------------------------------------------------------------------------------------------------------- activations
def swiglu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """silu(first half) * second half, along ``dim``."""
    gate, up = x.chunk(2, dim)
    return F.silu(gate) * up


def swiglu_backward(dy: torch.Tensor, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    gate, up = x.chunk(2, dim)
    s = torch.sigmoid(gate)
    return torch.cat([dy * up * s * (1 + gate * (1 - s)), dy * F.silu(gate)], dim)


# -------------------------------------------------------------------------------------------------- rotary embeddings
def _rotate(x: torch.Tensor, mode: str) -> torch.Tensor:
    if mode == "half":
        first, second = x.chunk(2, -1)
        return torch.cat([-second, first], -1)
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([-odd, even], -1).flatten(-2)


def _rotate_back(x: torch.Tensor, mode: str) -> torch.Tensor:
    """The transposed rotation, which is three further ones."""
    return -_rotate(x, mode)


def rotary_mul(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary_mode: str = "half", rotate: Any = None
) -> torch.Tensor:
    """Give ``x * cos + rotated x * sin``, where ``rotary_mode`` pairs halves ("half") or neighbours ("interleave")."""
    return x * cos + _rotate(x, rotary_mode) * sin


def rotary_mul_backward(
    dy: torch.Tensor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary_mode: str = "half", *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dx = dy * cos + _rotate_back(dy * sin, rotary_mode)
    return dx, (dy * x).sum_to_size(cos.shape), (dy * _rotate(x, rotary_mode)).sum_to_size(sin.shape)


# ------------------------------------------------------------------------------------------------------------ the table
def dtype_cast(x: torch.Tensor, dtype: torch.dtype, *rest: Any) -> torch.Tensor:
    """torch_npu's conversion, which it uses around HCCL for bool and uint8."""
    return x.to(dtype)


def unchanged(x: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor:
    """A change of the storage format: here all tensors are stored in one way."""
    return x


#: operator of torch_npu -> its reference kernel on CPU tensors
KERNELS: dict[str, Callable[..., Any]] = {
    "npu_rms_norm": rms_norm,
    "npu_rms_norm_backward": rms_norm_backward,
    "npu_add_rms_norm": add_rms_norm,
    "npu_swiglu": swiglu,
    "npu_swiglu_backward": swiglu_backward,
    "npu_rotary_mul": rotary_mul,
    "npu_rotary_mul_backward": rotary_mul_backward,
    **attention.KERNELS,
    "_npu_dtype_cast": dtype_cast,
    "_npu_dtype_cast_backward": dtype_cast,
}
#: Operators that give their first argument back.
UNCHANGED = ("npu_format_cast", "_npu_format_cast", "npu_format_cast_")
#: Operators of which torch_npu's own kernel works: they look at tensors, not into them.
KEPT = ("get_npu_format", "get_storage_size", "npu_change_data_ptr")


def install() -> None:
    """Replace the kernels of torch_npu's own operators, in this process."""
    library = torch.library.Library("npu", "IMPL")
    _libraries.append(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of every kernel that is replaced
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1"):
            namespace, _, operator = name.partition("::")
            packet = operator.partition(".")[0]
            if namespace != "npu" or packet in KEPT:
                continue
            if packet in UNCHANGED:
                kernel: Callable[..., Any] = unchanged
            elif operator in KERNELS:
                kernel = _on_host(KERNELS[operator])
            elif operator in collective_kernels.KERNELS:
                kernel = collective_kernels.KERNELS[operator]
            elif operator in attention.RANDOM_KERNELS:
                kernel = _on_host(attention.RANDOM_KERNELS[operator], random=True)
            else:
                kernel = _missing(operator)
            library.impl(operator, kernel, "PrivateUse1", allow_override=True)


def _on_host(function: Callable[..., Any], random: bool = False) -> Callable[..., Any]:
    """A kernel for tensors of the device that runs ``function`` on their host views.

    If it is ``random``, its first argument is a function. That gives seed and offset of the device's generator, and
    advances it.
    """

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with DisableTorchFunction(), torch.no_grad():
            devices: list[torch.device] = []

            def to_host(x: Any) -> Any:
                if not is_on_device(x):
                    return x
                devices.append(x.device)
                return host_alias(x)

            args = on_each(to_host, args)
            kwargs = {name: on_each(to_host, x) for name, x in kwargs.items()}
            device = devices[0]
            if random:
                args = (lambda: draw_offset(torch.npu.default_generators[device.index]), *args)  # type: ignore[attr-defined]
            out = function(*args, **kwargs)
            return on_each(lambda y: to_device(y, device) if isinstance(y, torch.Tensor) else y, out)

    return kernel


def _missing(operator: str) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            f"torch_npu's operator {operator} is not simulated: add a reference kernel to KERNELS in "
            f"tests/simulated_npu/{inspect.getmodulename(__file__)}.py"
        )

    return kernel
