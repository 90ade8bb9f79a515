"""torch_npu's kernels for torch's operators, replaced by torch's own for the CPU.

Each operator that torch_npu registers for its device gets a kernel. That runs the CPU's kernel on host views of the
operands and copies the results to the device. Operators that allocate, make views or copy between devices stay
torch_npu's, so that its rules hold: no float64, its storage layout, its allocator and generators.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._C import DisableTorchFunction

from tests.simulated_npu.aliasing import NPU, host_alias, on_each, to_device

# Operators of which torch_npu's own kernel is kept.
_KEPT = """
empty.memory_format empty_strided empty_like new_empty_strided as_strided as_strided_ view _reshape_alias
view_as_complex view_as_real unfold set_ set_.source_Storage set_.source_Tensor set_.source_Storage_storage_offset
resize_ resize_as_ record_stream is_pinned _pin_memory is_set_to _local_scalar_dense _to_copy
_has_compatible_shallow_copy_type
"""
# Operators whose operands may be on several devices.
_MIXED_DEVICES = """
copy_ _copy_from _copy_from_and_resize _foreach_copy_ index index_put_ _index_put_impl_ _unsafe_index index_put
"""
KEPT, MIXED_DEVICES = frozenset(_KEPT.split()), frozenset(_MIXED_DEVICES.split())
_thread = threading.local()
_libraries: list[torch.library.Library] = []  # registrations last as long as these


def install() -> None:
    """Replace the kernels, in this process."""
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)
    registrations = torch._C._dispatch_get_registrations_for_dispatch_key
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of every kernel that is replaced
        for name in registrations("PrivateUse1"):
            _replace_kernel(library, name)
        for name in registrations("AutogradPrivateUse1"):
            _restore_autograd(library, name)
        # scaled_dot_product_attention as its own operations: torch_npu would choose a fused kernel
        library.impl("_fused_sdp_choice", lambda *args, **kwargs: 0, "PrivateUse1", allow_override=True)


def _operator(name: str) -> tuple[str, Any]:
    """("add.Tensor", the operator) of "aten::add.Tensor"; (…, None) where this torch has none or it is not torch's."""
    namespace, _, qualified = name.partition("::")
    packet, _, overload = qualified.partition(".")
    found = getattr(torch.ops.aten, packet, None) if namespace == "aten" else None
    return qualified, getattr(found, overload or "default", None)


def _gives_views(operator: Any) -> bool:
    """Return whether the result shares memory with an operand, which that of a kernel on host views would not."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in operator._schema.returns)


def _replace_kernel(library: torch.library.Library, name: str) -> None:
    qualified, operator = _operator(name)
    if operator is None or qualified in KEPT or qualified.startswith(("npu_", "_npu_")) or _gives_views(operator):
        return
    if torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "CPU"):
        library.impl(qualified, kernel_of(operator), "PrivateUse1", allow_override=True)


def _restore_autograd(library: torch.library.Library, name: str) -> None:
    """Some operators have derivatives of torch_npu's own, in terms of its fused operators: take torch's instead.

    Torch's are registered for all devices as "Autograd", or the operator is composed of others. A kernel registered for
    AutogradCPU would call the CPU's kernel with tensors of the device, and lose the gradient.
    """
    qualified, operator = _operator(name)
    for key in ("CompositeImplicitAutograd", "Autograd"):
        if operator is not None and torch._C._dispatch_has_kernel_for_dispatch_key(name, key):
            call = _call_with_key(operator, getattr(torch._C.DispatchKey, key))
            library.impl(qualified, call, "AutogradPrivateUse1", allow_override=True)
            return


def _call_with_key(operator: Any, key: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with DisableTorchFunction():  # a real kernel is below Python, where DTensors are not seen
            return operator._op_dk(key, *args, **kwargs)

    return call


def _measure_this_thread() -> None:
    """Backward on a device runs in a thread that Python has not started, which coverage would not see."""
    _thread.measured = True
    hook = threading.gettrace()
    if hook is not None and sys.gettrace() is None:
        sys.settrace(hook)


def _on_floats(operator: Any) -> Callable[..., Any]:
    """``operator`` for integers as well, of which the CPU has no kernel and torch_npu has."""
    return lambda x, *args, **kwargs: operator(x if x.is_floating_point() else x.float(), *args, **kwargs).to(x.dtype)


def kernel_of(operator: Any) -> Callable[..., Any]:
    """A kernel for tensors of the device that runs ``operator`` on their host views."""
    schema = operator._schema
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    strict = operator.name().split("::")[1].split(".")[0] not in MIXED_DEVICES
    run = _on_floats(operator) if operator is torch.ops.aten.histc.default else operator
    random = torch.Tag.nondeterministic_seeded in operator.tags
    generator_place = next((i for i, a in enumerate(schema.arguments) if a.name == "generator"), None)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if not hasattr(_thread, "measured"):
            _measure_this_thread()
        with DisableTorchFunction():
            call = _Call(operator)
            host_args = on_each(call.to_host, args)
            host_kwargs = {name: on_each(call.to_host, x) for name, x in kwargs.items()}
            if strict:
                call.check_devices()
            if random:
                generator = kwargs.get("generator")
                if generator_place is not None and len(args) > generator_place:
                    generator, host_args = args[generator_place], host_args[:generator_place]
                host_kwargs.pop("generator", None)
                out = _run_random(operator, generator or call.default_generator(), host_args, host_kwargs)
            else:
                out = run(*host_args, **host_kwargs)
            if writes:
                call.copy_resized()
            return on_each(call.to_device, out)

    return kernel


class _Call:
    """One call of an operator: which device it is on, and which host view belongs to which tensor."""

    def __init__(self, operator: Any) -> None:
        self._operator = operator
        self._device: torch.device | None = None
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._others: list[torch.Tensor] = []

    def device(self) -> torch.device:
        return self._device or torch.device(NPU, torch.npu.current_device())  # type: ignore[attr-defined]

    def default_generator(self) -> torch.Generator:
        return torch.npu.default_generators[self.device().index]  # type: ignore[attr-defined]

    def to_host(self, x: Any) -> Any:
        """The host view of a tensor of the device, and "cpu" for the device; anything else as it is."""
        if isinstance(x, torch.Tensor):
            if x.device.type != NPU:
                self._others.append(x)
                return x
            self._device = self._device or x.device
            alias = host_alias(x)
            self._pairs.append((alias, x))
            return alias
        if isinstance(x, torch.device) and x.type == NPU:
            if self._device is None and x.index is not None:
                self._device = x
            self._device = self.device()
            return torch.device("cpu")
        return x

    def check_devices(self) -> None:
        """Refuse the arguments that the real kernels refuse: a second NPU, or a CPU tensor that is not a scalar."""
        if not self._pairs:
            return
        for x in [x for _, x in self._pairs] + [x for x in self._others if x.dim()]:
            if x.device != self._device:
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two devices, "
                    f"{self._device} and {x.device}! ({self._operator.name()})"
                )

    def copy_resized(self) -> None:
        """Tensors that were written to may have got another size, in memory that is not the device's."""
        for alias, x in self._pairs:
            if alias.size() != torch.Tensor.size(x):
                x.resize_(alias.size())
                host_alias(x).copy_(alias)

    def to_device(self, y: Any) -> Any:
        """The tensor that a host view belongs to, or a copy of a new tensor on the device."""
        if not isinstance(y, torch.Tensor) or y.device.type != "cpu":
            return y
        for alias, x in self._pairs:
            if y is alias:
                return x
        return y if self._device is None else to_device(y, self._device)


def draw_offset(generator: torch.Generator) -> tuple[int, int]:
    """Seed and offset of a generator of the device, whose offset advances."""
    state = generator.get_state()
    seed, offset = state.view(torch.int64).tolist()
    state.view(torch.int64)[1] = offset + 4
    generator.set_state(state)
    return seed, offset


def _run_random(operator: Any, generator: torch.Generator, args: tuple, kwargs: dict) -> Any:
    """Run a random operator with a CPU generator that is derived from the device's seed and offset. Advance the offset,
    as the device's kernels do."""
    seed, offset = draw_offset(generator)
    derived = (seed * 1000003 + offset) & (2**63 - 1)
    if any(a.name == "generator" for a in operator._schema.arguments):
        return operator(*args, **kwargs, generator=torch.Generator().manual_seed(derived))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(derived)
        return operator(*args, **kwargs)
