"""Fake tensors of device ``cuda``, on a machine without a GPU: shape, dtype and device, but no data.

They are torch's own `FakeTensor`, with these changes, each for one reason:

* A DTensor is its local tensor with another class. A fake tensor computes by the ``__torch_dispatch__`` of its class,
  which retagging takes away. So here the DTensor class is derived from `FakeTensor` (`make_dtensor_class(base=...)`).
  There is one DTensor class in a process, hence these tests need a process of their own.
* torch's autograd engine asks for the streams of the device. It refuses to run backward where there is no GPU. So below
  Python the tensors are of the device meta, which has no streams; in Python they say ``cuda:0``. So tensors that C++
  code makes "on the device of this tensor" are requested on meta. `FakeCudaMode` makes them on cuda.
* Formulas of backward read saved DTensors. They are C++ for a real tensor, and partly Python for a fake one. They run
  with interception off, as C++ does not know it. An assignment to ``.data`` takes the new device over.
* torch sends an object as the bytes of a tensor, and a fake one has none: every rank has the object of this one.
* torch looks at the compute capability of the GPU in `broadcast`, and the platform at its number: both are given.

An operation on tensors of two devices is an error of FakeTensorMode: a tensor that the library left on the CPU shows.
Collectives reach a process group of torch's backend ``fake``, which sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo  # FakeTensorMode loads it, and it must see `_make_subclass` as it is
import torch.distributed as dist
from torch._C import DisableTorchFunctionSubclass
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from hyper_parallel import Platform, get_platform
from hyper_parallel.platform.torch import dtensor_class
from hyper_parallel.platform.torch.basics import tensor
from hyper_parallel.platform.torch.cuda import TorchCudaPlatform

__all__ = ["CUDA", "FakeCudaMode", "fake_platform", "fake_world", "usable_gpu"]

CUDA = torch.device("cuda", 0)
_META = torch.device("meta")
_make_subclass = torch.Tensor._make_subclass
_data: Any = torch.Tensor.data


def _make_meta_subclass(cls: type, data: torch.Tensor, requires_grad: bool = False, **of_device: Any) -> Any:
    """`Tensor._make_subclass` that leaves the device below Python as it is."""
    return _make_subclass(cls, data, requires_grad)


class FakeCudaMode(FakeTensorMode):
    """Fake tensors, as this file's docstring says.

    Attributes:
        sent: the collectives that reached the process group: (name, dtype, device) of each of their tensors.
        drawn: the device of each result of an operation that draws random numbers.
        captures: whether operations are refused that a CUDA graph could not have: whose results, or the shapes of
            these, are known to the host only once the device has computed them, and copies from or to the host.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[str, torch.dtype, torch.device]] = []
        self.drawn: list[torch.device] = []
        self.captures = False

    def dispatch(self, func: Any, types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """See `FakeTensorMode.dispatch`."""
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == _META and not self.in_kernel_invocation:
            kwargs["device"] = CUDA
        if self.captures:
            _refuse_waiting(func, args, kwargs)
        if func.namespace == "c10d":
            self.sent += [(func._opname, x.dtype, x.device) for x in _tensors_in((args, kwargs))]
        with DisableTorchFunctionSubclass():
            result = super().dispatch(func, types, args, kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.drawn += [x.device for x in _tensors_in(result)]
        return result


def _refuse_waiting(func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    masks = func is not torch.ops.aten.index.Tensor or any(i is not None and i.dtype is torch.bool for i in args[1])
    if masks and {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags):
        raise RuntimeError(f"{func} waits for the device, which a CUDA graph cannot")
    devices = {x.device.type for x in _tensors_in((args, kwargs)) if x.dim() or func._opname != "copy_"}
    devices |= {torch.device(kwargs["device"]).type} if kwargs.get("device") is not None else set()
    if func._opname in ("_to_copy", "copy_", "_pin_memory", "to") and len(devices) > 1:
        raise RuntimeError(f"{func} copies between {' and '.join(sorted(devices))}, which waits for the device")


def _tensors_in(values: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]


def _set_data(x: FakeTensor, value: torch.Tensor) -> None:
    _data.__set__(x, value)
    x._fake_device = value.device


@contextmanager
def usable_gpu() -> Iterator[None]:
    """Let torch say that it has CUDA, a GPU and nccl."""
    with ExitStack() as stack:
        for name in ("torch.backends.cuda.is_built", "torch.cuda.is_available", "torch.distributed.is_nccl_available"):
            stack.enter_context(patch(name, lambda: True))
        yield


def fake_platform() -> Platform:
    """The platform torch-cuda, with a DTensor class for fake tensors.

    Raises:
        RuntimeError: when this process has made the DTensor class for real tensors already.
    """
    made = tensor.State.tensor_class
    if made is not None and not issubclass(made, FakeTensor):
        raise RuntimeError("tests/fake_cuda needs a process of its own: this one has used DTensors of real tensors")
    with usable_gpu():
        platform = get_platform("torch-cuda")

    def make(self: Any, mixin: type, core: Any) -> type:
        return dtensor_class.make_dtensor_class(mixin, core, FakeTensor)

    def gather(self: Any, value: Any, group: Any, size: int) -> list[Any]:
        return [value] * size

    def no_bytes(self: Any, x: Any) -> bytes:
        return b""

    TorchCudaPlatform.make_dtensor_class = make  # type: ignore[method-assign]
    TorchCudaPlatform.bytes_of = no_bytes  # type: ignore[method-assign]
    TorchCudaPlatform.all_gather_object = gather  # type: ignore[method-assign]
    return platform


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[FakeCudaMode]:
    """Make this process one of ``size`` ranks, with fake tensors."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        with (
            patch("torch.cuda.current_device", lambda: 0),
            patch("torch.cuda.get_device_capability", lambda device=None: (9, 0)),
            FakeCudaMode() as mode,
            patch.object(torch.Tensor, "_make_subclass", _make_meta_subclass),
            patch.object(FakeTensor, "data", property(_data.__get__, _set_data), create=True),
            patch.object(FakeTensor, "is_cuda", property(lambda x: x.device.type == "cuda"), create=True),
            patch.object(FakeTensor, "is_meta", property(lambda x: x.device.type == "meta"), create=True),
        ):
            yield mode
    finally:
        dist.destroy_process_group()
