"""`TorchPlatform`: code that all torch backends share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch._C import DisableTorchFunctionSubclass
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import checkpoint

from hyper_parallel.platform.torch import dtensor_class, patches
from hyper_parallel.platform.torch.attention import AttentionVerbs
from hyper_parallel.platform.torch.basics import counter, tensor
from hyper_parallel.platform.torch.basics.local_tensors import LocalVerbs
from hyper_parallel.platform.torch.basics.observation import ObservationVerbs
from hyper_parallel.platform.torch.basics.private import OpOverload, in_loss_parallel, is_traceable_wrapper
from hyper_parallel.platform.torch.basics.transforms import MAYBE_INSIDE, refuse_transforms
from hyper_parallel.platform.torch.fast import TorchFast
from hyper_parallel.platform.torch.gradients.autograd import AutogradVerbs
from hyper_parallel.platform.torch.handlers import following
from hyper_parallel.platform.torch.modules.modules import ModuleVerbs
from hyper_parallel.platform.torch.op_table import OP_TABLE
from hyper_parallel.platform.torch.processes.collectives import CommunicationVerbs
from hyper_parallel.platform.torch.state import StateVerbs
from hyper_parallel.platform.versions import warn_of_untested

__all__ = ["TorchPlatform"]

T: Any = torch.Tensor
_local_shape = T.shape.__get__


#: Suffixes of operations that write to running statistics although their schema does not declare it.
_UNCOUNTED = ("batch_norm", "instance_norm", "_batch_norm_impl_index", "_batch_norm_with_update")


class TorchPlatform(
    ModuleVerbs, CommunicationVerbs, AutogradVerbs, LocalVerbs, AttentionVerbs, StateVerbs, ObservationVerbs
):
    """Backend that all torch devices share; `cpu`, `cuda` and `npu` add the differences."""

    Tensor = torch.Tensor
    Parameter = torch.nn.Parameter
    Module = torch.nn.Module
    Size = torch.Size
    dense_layout = torch.strided
    watches_draws = True

    def __init__(self) -> None:
        warn_of_untested("torch", torch.__version__)
        self.fast = TorchFast(self)

    #: Context that passes operations on marked plain tensors to a follower, and the base of a view.
    follow: Any = staticmethod(following.follow)
    base_of: Any = staticmethod(following.base_of)

    # ------------------------------------------------------------------------------------------------ types
    def foreign_tensor(self, x: Any) -> str | None:
        """Describe ``x`` for messages if it cannot be a local tensor of a DTensor; see `Platform.foreign_tensor`."""
        if not isinstance(x, T) or tensor.is_dtensor(x):
            return None
        cls = type(x)
        if cls.__torch_dispatch__ is not T.__torch_dispatch__ and not tensor.is_local_class(cls):
            name = f"{cls.__module__}.{cls.__qualname__}"
            if cls.__module__.startswith("torch.distributed.tensor"):
                return (
                    f"torch's own DTensor ({name}), which must be converted for this library: pass "
                    "hyper_parallel.torch.from_torch_dtensor(x), or x.full_tensor(). Apply parallelize_module before "
                    "torch's fully_shard, not after"
                )
            return (
                f"a {name}, a tensor subclass with its own operations: pass the plain tensor that it represents, such "
                "as x.dequantize() for a quantised tensor. To keep weights quantised, leave them out of the plan and "
                "shard them by hand, as in docs/torch_interop.md"
            )
        with DisableTorchFunctionSubclass():
            if x.is_nested:
                return "a nested tensor: pass a padded tensor, x.to_padded_tensor(0.0)"
            if x.is_quantized:
                return "a quantised tensor: pass x.dequantize()"
            if x.layout is not torch.strided:
                return f"a tensor of layout {x.layout}: pass x.to_dense()"
        return None

    def check_local(self, x: torch.Tensor) -> None:
        """Raise TypeError if ``x`` cannot become the local tensor of a DTensor."""
        foreign = self.foreign_tensor(x)
        if foreign is not None:
            raise TypeError(f"a DTensor is made of plain dense tensors, got {foreign}")

    #: Whether a tensor has a floating point dtype, and whether it has no data.
    is_floating_point: Any = staticmethod(T.is_floating_point)
    is_meta: Any = staticmethod(attrgetter("is_meta"))

    def has_values(self, x: torch.Tensor) -> bool:
        """Return whether the values of ``x`` can be read and replaced as bytes; see `Platform.has_values`."""
        usual = x.layout is torch.strided and not x.is_nested and not x.is_quantized and not x.is_meta
        return usual and not is_lazy(x) and not is_traceable_wrapper(x)

    def bytes_of(self, x: torch.Tensor) -> bytes:
        """Return the values of ``x`` as bytes, in row-major order."""
        if MAYBE_INSIDE:
            refuse_transforms(x)
        return self.host_memory(x).tobytes()

    def host_memory(self, x: torch.Tensor) -> memoryview:
        """Return the bytes of ``x`` for immediate reading; see `Platform.host_memory`."""
        dense = x.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
        # An empty tensor may have a stride of 0, with which torch does not view it as another dtype.
        return dense.view(torch.uint8).numpy().data if dense.numel() else memoryview(b"")

    def write(self, x: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrite the values of ``x``."""
        for dim, stride in enumerate(x.stride()):
            if stride == 0 and x.shape[dim] > 1:  # expanded: all elements share one memory location
                x, values = x.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
        x.copy_(values)

    def from_bytes(self, values: Any, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Make a plain tensor from bytes; see `Platform.from_bytes`."""
        memory = memoryview(values)
        if not memory.nbytes:
            return torch.empty(tuple(shape), dtype=dtype, device=self.device())
        dense = torch.frombuffer(bytearray(memory) if memory.readonly else memory, dtype=dtype)
        return dense.reshape(tuple(shape)).to(self.device())

    def write_bytes(self, x: torch.Tensor, size: int, fill: Callable[[memoryview], None]) -> None:
        """Overwrite ``x`` with the values that ``fill`` puts into a buffer; see `Platform.write_bytes`."""
        if x.device.type != "cpu" or not x.is_contiguous() or x.is_conj() or x.is_neg() or not x.numel():
            super().write_bytes(x, size, fill)
            return
        flat = x.detach().reshape(-1)
        fill(flat.view(torch.uint8).numpy().data)
        flat[:0].zero_()  # an empty write, so that autograd counts a change of the values

    frees_storage = True

    def free_storage(self, x: torch.Tensor) -> None:
        """Free the memory of ``x``. Torch does not free memory that NumPy shares."""
        storage = x.untyped_storage()
        if storage.resizable():
            storage.resize_(0)

    def refill_storage(self, x: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
        """Allocate the memory of ``x`` again and write ``pieces`` into it. Autograd does not count writes to
        ``data``."""
        storage = x.untyped_storage()
        if storage.nbytes() != x.nbytes and storage.resizable():  # torch reallocates also for the same size
            storage.resize_(x.nbytes)
        parts = x.data.split_with_sizes([piece.numel() for piece in pieces])
        # Copy each piece to its place: joined first, the pieces would take the memory twice.
        torch._foreach_copy_([part.view(piece.shape) for part, piece in zip(parts, pieces, strict=True)], pieces)

    def watch(self, x: torch.Tensor, operation: str) -> Callable[[], str]:
        """Return a function that reports later writes to ``x``. Torch counts no writes to running statistics, and none
        in inference mode. In these cases values are compared."""
        if operation.endswith(_UNCOUNTED) or torch.is_inference_mode_enabled() or x.is_inference():
            return super().watch(x, operation)
        version, node = x._version, x.grad_fn

        def how() -> str:
            if x._version == version:
                return ""
            return "values" if x.grad_fn is node else "recorded"

        return how

    #: dtype of a tensor.
    dtype_of: Any = staticmethod(torch.Tensor.dtype.__get__)

    def shape_of(self, local: torch.Tensor) -> tuple[int, ...]:
        """Return the local shape of a tensor."""
        if type(local) is torch.Tensor:
            return local.shape
        with DisableTorchFunctionSubclass():
            return _local_shape(local)

    # ------------------------------------------------------------------------------------------------ interception
    #: Functions and a class in place of methods, which saves a call.
    make_dtensor_class: Any = staticmethod(dtensor_class.make_dtensor_class)
    wrap: Any = staticmethod(tensor.wrap)
    no_dispatch = staticmethod(DisableTorchFunctionSubclass)

    op_table: Any = OP_TABLE

    def patched_names(self) -> list[str]:
        """Return the names in the framework that patches replace."""
        return [target for patch in patches.PATCHES.patches for target in patch.targets]

    def is_compiling(self) -> bool:
        """Return whether a compiler is tracing the caller."""
        return torch.compiler.is_compiling()

    def in_loss_parallel(self) -> bool:
        """Return whether the caller is inside `torch.distributed.tensor.parallel.loss_parallel`."""
        return in_loss_parallel()

    def other_names(self, function: Any) -> Sequence[Any]:
        """Return operations without a row that are equivalent to an overload: its packet, and public functions."""
        if not isinstance(function, OpOverload) or function._overloadname != "default":
            return ()
        packet = function.overloadpacket
        if function.namespace != "aten":
            return (packet,)
        found = [getattr(place, packet.__name__, None) for place in (torch, T, F, torch.special, torch.linalg)]
        return (packet, *(f for f in found if f is not None and f not in OP_TABLE and f not in tensor.HANDLERS))

    def meta_tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a plain tensor of that shape and dtype without data."""
        return torch.empty(tuple(shape), dtype=dtype, device="meta")

    def why_no_rule(self, function: Any) -> str | None:
        """Return why a native operation without a row cannot have a rule, or None; see `Platform.why_no_rule`."""
        if function in tensor.HANDLERS:
            return (
                "hyper_parallel.platform.torch.handlers handles this function, because it does not compute, or is "
                "composed of other operations: add rules for the other operations"
            )
        name = function if isinstance(function, str) else getattr(function, "__name__", "")
        if name.endswith("_") and not name.endswith("__"):
            return "the in-place variant runs on a copy of the first operand: use the operation that returns a tensor"
        return None

    dry_class = "hyper_parallel.platform.torch.meta:TorchMetaPlatform"

    def differentiate(self, call: Callable[[], torch.Tensor], parameters: Sequence[torch.Tensor]) -> list[Any]:
        """Run backward of ``call()``, and return the gradients of ``parameters``."""
        torch.autograd.backward([call()])
        return [p.grad for p in parameters]

    def recompute(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``call`` under activation checkpointing."""
        return checkpoint(call, *args, use_reentrant=False, **kwargs)

    # ------------------------------------------------------------------------------------------------ devices, random
    def device_module(self) -> Any:
        """Return ``torch.cuda`` or a similar module, which has this rank's device and generator."""
        return getattr(torch, self.device_type)

    def device(self) -> torch.device:
        """Return this rank's device: the current one."""
        return torch.device(self.device_type, self.device_module().current_device())

    def _select_device(self, local_rank: int) -> None:
        """Make the device of this rank the current one."""
        module = self.device_module()
        module.set_device(local_rank % module.device_count())

    def to_device(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` on this rank's device. A meta tensor stays on the meta device."""
        if type(x) is not T or x.layout is not torch.strided or x.is_nested or x.is_quantized:
            self.check_local(x)
        return x if x.is_meta or x.device.type == self.device_type else x.to(self.device())

    def to_host(self, x: torch.Tensor, pin_memory: bool) -> torch.Tensor:
        """Return ``x`` in host memory."""
        if x.device.type == "cpu":
            return x
        x = x.cpu()
        return x.pin_memory() if pin_memory else x

    def host_tensor(self, values: np.ndarray) -> torch.Tensor:
        """Return a new plain tensor in host memory with the values of an array."""
        return torch.tensor(values, device="cpu")

    def device_count(self) -> int:
        """Return the number of devices on the machine."""
        return 1 if self.device_type in ("cpu", "meta") else int(self.device_module().device_count())

    def synchronize(self) -> None:
        """Wait until this rank's device has finished its queued work."""
        if self.device_type not in ("cpu", "meta"):
            self.device_module().synchronize()

    def factory(self, name: str, shape: Sequence[int], fill_value: Any, dtype: Any) -> torch.Tensor:
        """Return a new plain tensor made by the factory ``name``; see `Platform.factory`."""
        if name in ("linspace", "logspace"):
            start, end, *base = fill_value
            return getattr(torch, name)(start, end, shape[0], *base, dtype=dtype, device=self.device())
        fill = (fill_value,) if name == "full" else ()
        return getattr(torch, name)(tuple(shape), *fill, dtype=dtype, device=self.device())

    #: Function that returns a shard of random numbers; see `Platform.numbers_by_counter`.
    numbers_by_counter: Any = staticmethod(counter.numbers)

    #: Function that seeds the default generator.
    manual_seed: Any = staticmethod(torch.manual_seed)

    def get_rng_state(self) -> Any:
        """Return the state of the default generator of this rank's device."""
        return self.device_module().get_rng_state()

    def set_rng_state(self, state: Any) -> None:
        """Restore the state of the default generator of this rank's device."""
        self.device_module().set_rng_state(state)

    def get_host_rng_state(self) -> Any:
        """Return the state of the host's separate default generator, or None."""
        return None if self.device_type == "cpu" else torch.get_rng_state()

    def set_host_rng_state(self, state: Any) -> None:
        """Restore the state of the host's default generator."""
        torch.set_rng_state(state)
