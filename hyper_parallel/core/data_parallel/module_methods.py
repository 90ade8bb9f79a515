"""The methods that a module has once `fully_shard` was applied to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hyper_parallel.core.data_parallel.model import RUNNING
from hyper_parallel.core.data_parallel.unit import Unit
from hyper_parallel.core.data_parallel.units import is_unit, unit_of

__all__ = ["FSDPModule", "GradientReductionHandle", "UnshardHandle"]


class UnshardHandle:
    """Handle that `FSDPModule.unshard` returns with ``async_op=True``."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Return when the parameters are whole; modules find them from then on."""
        if self._unit is not None:
            self._unit.parameters.unshard()
            self._unit = None


class GradientReductionHandle:
    """Handle that `FSDPModule.finalize_backward` returns with ``async_op=True``."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit
        self._count = 0 if unit.model is None else unit.model.abandoned

    def wait(self) -> None:
        """Return when gradients are complete.

        Raises:
            RuntimeError: where `FSDPModule.reset_iter_state` has dropped them.
        """
        unit, self._unit = self._unit, None
        if unit is None or unit.model is None:
            return
        if unit.model.abandoned != self._count:
            raise RuntimeError("reset_iter_state has dropped the gradients that were to be waited for")
        with unit.platform.no_grad(), unit.platform.no_dispatch():
            unit.model.finish()


class FSDPModule:
    """The class of modules that are units, besides their own: ``isinstance(module, FSDPModule)``.

    Units below count as modules of their own, and where a method has ``recurse``, they are set alike.

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
        """Gather the parameters of this unit, and let modules find the whole ones. All ranks call it.

        They are attributes: `parameters`, state dicts and optimizers get the shards as ever. Modules find shards again
        after `reshard`, and when the unit gives whole parameters back: after its forward, with
        ``reshard_after_forward``, or its backward.

        Args:
            async_op: begin to gather, and return what waits for it. The unit's own forward waits too.

        Returns:
            None without ``async_op``.
        """
        unit = unit_of(self)
        if not RUNNING.get():
            unit.steps.outside()
        unit.parameters.start_by_hand()
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Give the whole parameters of this unit back: after `unshard`, and before the optimizer's step where
        `set_reshard_after_backward` has left them whole."""
        unit_of(self).parameters.reshard()

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """As the keyword of `fully_shard`, from the next forward on.

        Raises:
            ValueError: for what is no bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"set_reshard_after_forward takes True or False, got {reshard_after_forward!r}")
        for unit in self._units(recurse):
            unit.reshard_after_forward, unit.fewer = reshard_after_forward, None

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether parameters are sharded again after backward. When they are not, the next forward gathers nothing, for
        which `reshard` has to be called before they change."""
        for unit in self._units(recurse):
            unit.reshard_after_backward = bool(reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether backward gathers the parameters of this unit. It need not where it does not read them, as with an
        embedding: gradients are wrong where it does."""
        unit_of(self).whole_in_backward = bool(unshard_in_backward)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Whether the memory of whole parameters is kept while they are sharded: they have the same addresses each time
        then."""
        for unit in self._units(recurse):
            unit.parameters.keeps_storage = bool(keep)

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """See `Platform.replace_forward`: shards are what is moved, and then they may lie in one storage again."""
        parameters = unit_of(self).parameters
        parameters.reshard()
        before = parameters.memory()
        yield
        parameters.move(before)

    # ---------------------------------------------------------------------- gradients
    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients. When it does not, whole ones are kept, and added to those of the next
        backward that does: gradients are accumulated without communication."""
        for unit in self._units(recurse):
            unit.gradients.reduce_gradients = unit.gradients.all_reduce_gradients = bool(requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backward reduces gradients over the mesh dimension that replicates, on a mesh of two. When it does
        not, they are reduced over the one that shards, kept, and added to those of the next backward that does."""
        for unit in self._units(recurse):
            unit.gradients.all_reduce_gradients = bool(requires_all_reduce)

    def reset_iter_state(self) -> None:
        """Forget what a forward or a backward that has failed has left: gradients that were not reduced, also those of
        earlier micro batches. For the outermost unit, before the step is begun anew."""
        for unit in self._units(True):
            if unit.model is not None:
                unit.model.abandon()
            unit.gradients.forget()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether gradients are to be complete after the next backward. With False, reductions that go on are waited
        for after the next backward for which it is True. For the outermost unit.

        Raises:
            RuntimeError: before the first forward, which finds the outermost unit, and for another one.
        """
        unit = unit_of(self)
        if unit.model is None:
            raise RuntimeError("set_is_last_backward: call it after the first forward")
        unit.model.is_last_backward = bool(is_last_backward)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Whether gradients are complete only after `finalize_backward`; `set_is_last_backward` counts for nothing
        then. For the outermost unit, before backward.

        Raises:
            RuntimeError: for another unit, and within backward.
        """
        unit = unit_of(self)
        if unit.model is not None and unit.model.outermost() is not unit:
            raise RuntimeError("set_manual_backward_finalization is for the outermost module: call it there")
        if unit.platform.in_backward():
            raise RuntimeError("set_manual_backward_finalization: call it before backward, not within")
        unit.finalized_by_hand = bool(enabled)

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce what gradients were kept, where gradients are to be reduced, and wait for all reductions. For the
        outermost unit, after all backward passes of a step; before the first forward it does nothing.

        Args:
            async_op: begin to reduce, and return what waits.

        Returns:
            None without ``async_op``.

        Raises:
            RuntimeError: without `set_manual_backward_finalization`, for another unit, and within backward.

        Source: ``torch.distributed.fsdp.FSDPModule.finalize_backward``.
        """
        unit = unit_of(self)
        handle = GradientReductionHandle(unit)
        if unit.model is not None:
            if not unit.finalized_by_hand or unit.platform.in_backward():
                raise RuntimeError(
                    "finalize_backward: call set_manual_backward_finalization(True) on the outermost module before "
                    "forward, and this after backward"
                )
            with unit.platform.no_grad(), unit.platform.no_dispatch():
                unit.model.reduce_kept()
        if async_op:
            return handle
        handle.wait()
        return None

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Nothing is to be said here: a parameter that some ranks have not used counts as zeros there, always."""

    def set_gradient_divide_factor(self, factor: float) -> None:
        """By what sums of gradients are divided, in place of the number of data-parallel ranks. Not where the batch is
        distributed: there gradients are sums.

        Raises:
            ValueError: for what is no positive number.
        """
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or factor <= 0:
            raise ValueError(f"set_gradient_divide_factor takes a positive number, got {factor!r}")
        unit_of(self).gradients.divide_factor = float(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Let collectives sum where an average is wanted, and divide after."""
        unit_of(self).gradients.force_sum = bool(enable)

    # ---------------------------------------------------------------------- overlap
    def set_modules_to_forward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """The units to gather while this one computes in forward, in place of the one that came next in the forward
        before.

        Raises:
            ValueError: for a module that is no unit.
        """
        unit_of(self).forward_prefetch = _units_of(modules, "set_modules_to_forward_prefetch")

    def set_modules_to_backward_prefetch(self, modules: Sequence[FSDPModule]) -> None:
        """The units to gather while this one computes in backward, in place of the one before it in forward.

        Raises:
            ValueError: for a module that is no unit.
        """
        unit_of(self).backward_prefetch = _units_of(modules, "set_modules_to_backward_prefetch")

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many reductions of gradients may be under way when one of this unit begins, with that one: 1 unless it is
        said. Each holds a buffer as large as its unit.

        Raises:
            TypeError: for what is no number.
            ValueError: for one below 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"set_reduce_scatter_max_input_buffers takes a number, got {max_input_buffers!r}")
        if max_input_buffers < 1:
            raise ValueError(f"set_reduce_scatter_max_input_buffers takes 1 or more, got {max_input_buffers!r}")
        for unit in self._units(recurse):
            unit.gradients.under_way = max_input_buffers

    # ---------------------------------------------------------------------- communication
    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Have gradients reduced by another group of the same ranks than the one that gathers: not here.

        Raises:
            ValueError: for ``enable=True``.
        """
        if enable:
            raise ValueError(
                "set_separate_reduce_scatter_group: make a group of the same ranks, and reduce by it what "
                "set_custom_reduce_scatter(comm) calls comm with"
            )

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Have buffers of collectives in memory that the group of ranks gives: not here.

        Raises:
            ValueError: for ``enable=True``.
        """
        if enable:
            raise _memory("set_allocate_memory_from_process_group_for_comm")

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Have buffers of collectives in memory that all ranks see: not here.

        Raises:
            ValueError: always.
        """
        raise _memory("set_symm_mem_for_comm")

    def set_custom_all_gather(self, comm: Any) -> None:
        """Let ``comm`` gather the parameters of this unit.

        Args:
            comm: has ``allocate(size, *, dtype, device)``, which gives a buffer, and ``__call__(output_tensor,
                input_tensor, group, async_op=True)``, which begins to gather the 1-D ``input_tensor`` of every rank of
                ``group``, a group of the framework's own, into ``output_tensor``, and returns what has ``wait()``, or
                None when that is done. None is the platform's own again.

        Raises:
            TypeError: for what has neither.

        Source: ``torch.distributed.fsdp.FSDPModule.set_custom_all_gather``.
        """
        unit_of(self).parameters.comms.all_gather = _comm(comm, "set_custom_all_gather")

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Let ``comm`` reduce the gradients of this unit and scatter them. They are summed, and divided after.

        Args:
            comm: as in `set_custom_all_gather`, with ``__call__(output_tensor, input_tensor, group, op,
                async_op=True)``, where ``op`` is the framework's own.

        Raises:
            TypeError: for what has neither.

        Source: ``torch.distributed.fsdp.FSDPModule.set_custom_reduce_scatter``.
        """
        unit_of(self).parameters.comms.reduce_scatter = _comm(comm, "set_custom_reduce_scatter")

    def set_all_reduce_hook(self, hook: Any, *, stream: Any = None) -> None:
        """Have ``hook(row)`` called for each reduction of gradients of this unit.

        Parameters that no rank has used count as used then, with gradients of zeros: the hook may add to them.

        Args:
            hook: gets the plain 1-D tensor that holds this rank's shards of the gradients, one after the other, reduced
                over all dimensions of the mesh. What it writes there in place counts. None is no hook.
            stream: None. The hook runs where gradients are waited for.

        Raises:
            TypeError: for what cannot be called.
            ValueError: for a stream.

        Source: ``torch.distributed.fsdp.FSDPModule.set_all_reduce_hook``.
        """
        if hook is not None and not callable(hook):
            raise TypeError(f"set_all_reduce_hook takes a function of a tensor, got {hook!r}")
        if stream is not None:
            raise ValueError(
                "set_all_reduce_hook(stream=...): reductions are waited for on the current stream, where the hook "
                "runs. Let the hook enter a stream of its own, and wait for it at its end"
            )
        unit_of(self).parameters.comms.all_reduce_hook = hook

    def set_post_optim_event(self, event: Any) -> None:
        """Have the next forward wait for ``event``, recorded after the optimizer's step, before it gathers parameters.
        For the outermost unit, and one forward.

        Without it, gathers come after all that was begun before them on the current stream: that is enough where the
        optimizer steps there.

        Args:
            event: has ``wait()``, which lets the current stream wait.

        Raises:
            TypeError: for what has not.

        Source: ``torch.distributed.fsdp.FSDPModule.set_post_optim_event``.
        """
        if not callable(getattr(event, "wait", None)):
            raise TypeError(f"set_post_optim_event takes an event, which has wait(), got {event!r}")
        unit_of(self).post_optim_event = event

    def _units(self, recurse: bool) -> Iterator[Unit]:
        if not recurse:
            yield unit_of(self)
            return
        for _, module in unit_of(self).platform.named_modules(self):
            if is_unit(module):
                yield unit_of(module)


def _units_of(modules: Sequence[Any], method: str) -> list[Unit]:
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"{method} takes modules to which fully_shard was applied, got a {type(module).__name__}")
    return [unit_of(module) for module in modules]


def _memory(method: str) -> ValueError:
    return ValueError(
        f"{method}: give set_custom_all_gather and set_custom_reduce_scatter objects whose allocate(size, *, dtype, "
        "device) gives such memory"
    )


def _comm(comm: Any, method: str) -> Any:
    if comm is not None and not (callable(comm) and callable(getattr(comm, "allocate", None))):
        raise TypeError(
            f"{method} takes an object with allocate(size, *, dtype, device) and __call__(output_tensor, input_tensor, "
            f"group, ..., async_op), got {comm!r}"
        )
    return comm
