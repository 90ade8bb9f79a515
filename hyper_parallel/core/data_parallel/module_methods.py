"""Methods of a module to which `fully_shard` was applied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hyper_parallel.core.data_parallel.model import RUNNING
from hyper_parallel.core.data_parallel.unit import Unit, is_unit, unit_of
from hyper_parallel.core.data_parallel.unit_parameters import UnitParameters

__all__ = ["FSDPModule", "GradientReductionHandle", "UnshardHandle"]


class UnshardHandle:
    """Handle that `FSDPModule.unshard` returns with ``async_op=True``."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Wait until the parameters are unsharded. Modules find the unsharded parameters from then on."""
        if self._unit is not None:
            self._unit.parameters.unshard()
            self._unit = None


class GradientReductionHandle:
    """Handle that `FSDPModule.finalize_backward` returns with ``async_op=True``."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit
        self._count = 0 if unit.model is None else unit.model.abandoned

    def wait(self) -> None:
        """Wait until gradients are complete.

        Raises:
            RuntimeError: where `FSDPModule.reset_iter_state` has discarded them.
        """
        unit, self._unit = self._unit, None
        if unit is None or unit.model is None:
            return
        if unit.model.abandoned != self._count:
            raise RuntimeError(
                "reset_iter_state has dropped the gradients of this handle: call wait() before reset_iter_state"
            )
        with unit.platform.no_grad(), unit.platform.no_dispatch():
            unit.model.finish()


class FSDPModule:
    """Base class that `fully_shard` adds to each module that is a unit: ``isinstance(module, FSDPModule)``.

    A method acts on this unit, not on units below it. With ``recurse`` it also acts on the units below.

    Example:
        >>> from torch import nn
        >>> from hyper_parallel import FSDPModule, fully_shard, init_device_mesh
        >>> linear = fully_shard(nn.Linear(4, 6), mesh=init_device_mesh("cpu", (1,)))
        >>> isinstance(linear, FSDPModule), isinstance(linear, nn.Linear)
        (True, True)

    Source: ``torch.distributed.fsdp.FSDPModule``.
    """

    # ---------------------------------------------------------------------- parameters
    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather the parameters of this unit, and let modules find the unsharded ones. All ranks call it.

        Unsharded parameters are attributes of modules. `parameters`, state dicts and optimizers still get the shards.
        Modules find shards again after `reshard`, and when the unit frees the unsharded parameters: after its forward,
        with ``reshard_after_forward``, or after its backward.

        Args:
            async_op: start the all-gather, and return a handle that waits for it. The unit's own forward waits too.

        Returns:
            The handle with ``async_op``, otherwise None.
        """
        unit = unit_of(self)
        if not RUNNING.get():
            unit.outside()
        unit.parameters.start_early()
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free the unsharded parameters of this unit. Call `reshard` after `unshard`. After
        ``set_reshard_after_backward(False)``, call `reshard` before the optimizer's step."""
        unit_of(self).parameters.reshard()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Replace the argument ``reshard_after_forward`` of `fully_shard`, from the next forward on.

        Raises:
            ValueError: for anything but True or False.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"set_reshard_after_forward takes True or False, got {reshard_after_forward!r}")
        for unit in self._units(recurse):
            unit.settings.reshard_after_forward, unit.settings.fewer = reshard_after_forward, None

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether parameters are resharded after backward. With False, the next forward gathers nothing. Then call
        `reshard` before the parameters change, or the unsharded values are stale."""
        for unit in self._units(recurse):
            unit.settings.reshard_after_backward = bool(reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether backward gathers the parameters of this unit. Pass False for a unit whose backward does not read
        its parameters, such as an embedding. For any other unit, False gives wrong gradients."""
        unit_of(self).parameters.settings.whole_in_backward = bool(unshard_in_backward)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Set whether the memory of unsharded parameters is kept while they are sharded. Their addresses then never
        change."""
        for unit in self._units(recurse):
            unit.settings.keeps_storage = bool(keep)

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """Reshard before a module is moved, and let its shards share storage again afterwards.
        `Platform.replace_forward` calls it."""
        unit = unit_of(self)
        unit.parameters.reshard()
        before = unit.memory()
        yield
        unit.move(before)

    # ---------------------------------------------------------------------- gradients
    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether backward reduces gradients. With False, full gradients are accumulated without communication. The
        next backward with True adds its gradients and reduces the sum."""
        for unit in self._units(recurse):
            unit.gradients.reduce_gradients = unit.gradients.all_reduce_gradients = bool(requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backward all-reduces gradients over the replicating dimension of a 2-D mesh. With False,
        gradients are accumulated after the reduce-scatter. The next backward with True adds its gradients and
        all-reduces the sum."""
        for unit in self._units(recurse):
            unit.gradients.all_reduce_gradients = bool(requires_all_reduce)

    def reset_iter_state(self) -> None:
        """Discard unreduced gradients, including those of earlier micro batches, after a failed forward or backward.
        Call it on the outermost unit, before the step is repeated."""
        for _, module in unit_of(self).platform.named_modules(self):
            if is_unit(module):
                unit = unit_of(module)
                if unit.model is not None:
                    unit.model.abandon()
                unit.parameters.gradients.forget()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether gradients are complete after the next backward. With False, reductions stay pending until a later
        backward with True waits for them. Call it on the outermost unit.

        Raises:
            RuntimeError: before the first forward, which finds the outermost unit.
        """
        unit = unit_of(self)
        if unit.model is None:
            raise RuntimeError("set_is_last_backward: call it after the first forward")
        unit.model.is_last_backward = bool(is_last_backward)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Set whether gradients are complete only after `finalize_backward`. `set_is_last_backward` then has no effect.
        Call it on the outermost unit, before backward.

        Raises:
            RuntimeError: for another unit, and within backward.
        """
        unit = unit_of(self)
        if unit.model is not None and unit.model.outermost() is not unit.parameters:
            raise RuntimeError("set_manual_backward_finalization must be called on the outermost module")
        if unit.platform.in_backward():
            raise RuntimeError("set_manual_backward_finalization: call it before backward, not during backward")
        unit.parameters.settings.finalized_by_hand = bool(enabled)

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce accumulated gradients, unless reduction is switched off, and wait for all reductions. Call it on the
        outermost unit, after all backward passes of a step. Before the first forward it does nothing.

        Args:
            async_op: start to reduce, and return a handle that waits.

        Returns:
            The handle with ``async_op``, otherwise None.

        Raises:
            RuntimeError: without `set_manual_backward_finalization`, for another unit, and within backward.

        Source: ``torch.distributed.fsdp.FSDPModule.finalize_backward``.
        """
        unit = unit_of(self)
        handle = GradientReductionHandle(unit)
        if unit.model is not None:
            if not unit.parameters.settings.finalized_by_hand or unit.platform.in_backward():
                raise RuntimeError(
                    "finalize_backward: call set_manual_backward_finalization(True) on the outermost module before "
                    "forward, and finalize_backward after backward"
                )
            with unit.platform.no_grad(), unit.platform.no_dispatch():
                unit.model.reduce_accumulated()
        if async_op:
            return handle
        handle.wait()
        return None

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Do nothing: ranks that have not used a parameter always contribute zeros to its gradient."""

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Set the divisor of summed gradients, in place of the number of data-parallel ranks. It has no effect on a
        distributed batch, whose gradients are sums.

        Raises:
            ValueError: for anything but a positive number.
        """
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or factor <= 0:
            raise ValueError(f"set_gradient_divide_factor takes a positive number, got {factor!r}")
        unit_of(self).parameters.gradients.divide_factor = float(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Call `set_gradient_divide_factor`, the new name of this method."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Set whether collectives sum and divide afterwards, in place of collectives that average."""
        unit_of(self).parameters.gradients.force_sum = bool(enable)

    # ---------------------------------------------------------------------- overlap
    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Set the units to prefetch while this one computes in forward. The default is the unit that followed this one
        in the previous forward.

        Raises:
            ValueError: for a module that is no unit.
        """
        unit_of(self).parameters.settings.forward_prefetch = _units_of(modules, "set_modules_to_forward_prefetch")

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """Set the units to prefetch while this one computes in backward. The default is the unit that came before this
        one in forward.

        Raises:
            ValueError: for a module that is no unit.
        """
        unit_of(self).parameters.settings.backward_prefetch = _units_of(modules, "set_modules_to_backward_prefetch")

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Set how many gradient reductions may be pending when this unit starts one, including the new one. The default
        is 1. Each reduction holds a buffer as large as its unit.

        Raises:
            TypeError: for anything but a whole number.
            ValueError: for a number below 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"set_reduce_scatter_max_input_buffers takes a number, got {max_input_buffers!r}")
        if max_input_buffers < 1:
            raise ValueError(f"set_reduce_scatter_max_input_buffers takes 1 or more, got {max_input_buffers!r}")
        for unit in self._units(recurse):
            unit.gradients.max_pending = max_input_buffers

    # ---------------------------------------------------------------------- communication
    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Ask for separate process groups for reductions and gathers, which is not supported here.

        Raises:
            ValueError: for ``enable=True``.
        """
        if enable:
            raise ValueError(
                "set_separate_reduce_scatter_group(True) is not supported: make a second process group of the same "
                "ranks, and call set_custom_reduce_scatter(comm) with a comm that reduces over this group"
            )

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Ask for collective buffers in memory that the process group allocates, which is not supported here.

        Raises:
            ValueError: for ``enable=True``.
        """
        if enable:
            raise _memory("set_allocate_memory_from_process_group_for_comm")

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Ask for collective buffers in symmetric memory, which is not supported here.

        Raises:
            ValueError: always.
        """
        raise _memory("set_symm_mem_for_comm")

    def set_custom_all_gather(self, comm: Any) -> None:
        """Let ``comm`` gather the parameters of this unit.

        Args:
            comm: object with two methods; None restores the platform's all-gather. ``allocate(size, *, dtype, device)``
                returns a buffer. ``__call__(output_tensor, input_tensor, group, async_op=True)`` starts to gather the
                1-D ``input_tensor`` of every rank of ``group``, the framework's process group, into ``output_tensor``.
                It returns a handle with ``wait()``, or None if the gather is complete.

        Raises:
            TypeError: for an object without these methods.

        Source: ``torch.distributed.fsdp.FSDPModule.set_custom_all_gather``.
        """
        unit_of(self).parameters.collectives.all_gather = _comm(comm, "set_custom_all_gather")

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Let ``comm`` reduce-scatter the gradients of this unit. It sums the gradients, which are divided afterwards.

        Args:
            comm: object as in `set_custom_all_gather`, with ``__call__(output_tensor, input_tensor, group, op,
                async_op=True)``, where ``op`` is the framework's reduce operation.

        Raises:
            TypeError: for an object without these methods.

        Source: ``torch.distributed.fsdp.FSDPModule.set_custom_reduce_scatter``.
        """
        unit_of(self).parameters.collectives.reduce_scatter = _comm(comm, "set_custom_reduce_scatter")

    def set_all_reduce_hook(self, hook: Any, *, stream: Any = None) -> None:
        """Register ``hook(row)``, which is called for each reduction of gradients of this unit.

        Parameters that no rank has used then get zero gradients instead of None, because the hook may add to them.

        Args:
            hook: function of a plain 1-D tensor, which may be changed in place. The tensor holds this rank's shards of
                the gradients, one after the other, reduced over all dimensions of the mesh. None removes the hook.
            stream: must be None. The hook runs where the program waits for gradients.

        Raises:
            TypeError: for a hook that cannot be called.
            ValueError: for a stream.

        Source: ``torch.distributed.fsdp.FSDPModule.set_all_reduce_hook``.
        """
        if hook is not None and not callable(hook):
            raise TypeError(f"set_all_reduce_hook takes a function of a tensor, got {hook!r}")
        if stream is not None:
            raise ValueError(
                "set_all_reduce_hook(stream=...): the hook runs on the current stream. Let the hook enter its own "
                "stream, and wait for that stream at the end"
            )
        unit_of(self).parameters.collectives.all_reduce_hook = hook

    def set_post_optim_event(self, event: Any) -> None:
        """Make the next forward wait for ``event``, recorded after the optimizer's step, before it gathers parameters.
        Call it on the outermost unit. It applies to one forward.

        Without an event, gathers run after all earlier work on the current stream. That suffices if the optimizer steps
        on that stream.

        Args:
            event: object with ``wait()``, which makes the current stream wait.

        Raises:
            TypeError: for an object without ``wait()``.

        Source: ``torch.distributed.fsdp.FSDPModule.set_post_optim_event``.
        """
        if not callable(getattr(event, "wait", None)):
            raise TypeError(f"set_post_optim_event takes an event, which has wait(), got {event!r}")
        unit_of(self).parameters.settings.post_optim_event = event

    def _units(self, recurse: bool) -> Iterator[UnitParameters]:
        for module in [m for _, m in unit_of(self).platform.named_modules(self) if is_unit(m)] if recurse else [self]:
            yield unit_of(module).parameters


def _units_of(modules: Sequence[Any], method: str) -> list[UnitParameters]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"{method} takes modules to which fully_shard was applied, got a {type(module).__name__}")
    return [unit_of(module).parameters for module in modules]


def _memory(method: str) -> ValueError:
    return ValueError(
        f"{method} is not supported: call set_custom_all_gather and set_custom_reduce_scatter with an object whose "
        "allocate(size, *, dtype, device) returns memory of this kind"
    )


def _comm(comm: Any, method: str) -> Any:
    if comm is not None and not (callable(comm) and callable(getattr(comm, "allocate", None))):
        raise TypeError(
            f"{method} takes an object with allocate(size, *, dtype, device) and __call__(output_tensor, input_tensor, "
            f"group, ..., async_op), got {comm!r}"
        )
    return comm
