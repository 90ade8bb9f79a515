"""One all-reduce for the gradients of all small replicated parameters, as in Megatron's
``_allreduce_layernorm_grads``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.communication import collectives
from hyper_parallel.core.communication.recorder import recorded_as
from hyper_parallel.platform.contract import NOTHING_FASTER

if TYPE_CHECKING:
    from hyper_parallel.core.mesh.device_mesh import DeviceMesh

#: Open `coalesce_gradients` blocks, the innermost last. The list is global, because autograd runs backward hooks in
#: other threads.
BLOCKS: list[coalesce_gradients] = []


class coalesce_gradients:
    """Context manager that all-reduces the gradients of replicated parameters together, when the block ends.

    The block affects replicated parameters of modules with sharded inputs, such as norms under `SequenceParallel`.
    Outside the block, backward does one all-reduce for each such parameter. The end of the block does one all-reduce
    for each mesh and dtype. Each parameter is sent once, even if the model or several backward passes used the
    parameter several times.

    Gradients of these parameters are complete after the block. Inside the block, the gradients lack the contribution of
    the current backward. So code that reads gradients belongs after the block: clipping, the optimizer, a data-parallel
    all-reduce. Hooks that read gradients during accumulation, as in ``DistributedDataParallel``, must not be active.

    Two kinds of gradients are all-reduced during backward, as without the block: gradients of parameters with
    ``register_post_accumulate_grad_hook``, and results of ``torch.autograd.grad``.

    MindSpore returns gradients. The gradients that `hyper_parallel.mindspore` returns inside the block are all-reduced
    together, and complete.

    Example:
        >>> from hyper_parallel import coalesce_gradients
        >>> import torch
        >>> w = torch.ones(3, requires_grad=True)
        >>> with coalesce_gradients():
        ...     (2 * w).sum().backward()
        >>> w.grad
        tensor([2., 2., 2.])

    Source: Megatron-LM, ``finalize_model_grads`` (Korthikanti et al. 2022).
    """

    #: (mesh, mesh dimensions, dtype) -> `id` of a parameter -> (parameter, sum of its cotangents so far).
    _waiting: dict[tuple[DeviceMesh, tuple[int, ...], Any], dict[int, tuple[Any, Any]]]

    def take(self, parameter: Any, cotangent: Any, mesh: DeviceMesh, mesh_dims: tuple[int, ...]) -> bool:
        """Store ``cotangent``, to be all-reduced over ``mesh_dims`` and added to the gradient of ``parameter`` later.

        Return False if the cotangent was not stored, so that the caller must all-reduce it.
        """
        if parameter._collect is not None:
            parameter._collect(cotangent, mesh, mesh_dims)
            return True
        if not (mesh.platform.fast or NOTHING_FASTER).can_delay_gradient(parameter):
            return False
        entries = self._waiting.setdefault((mesh, mesh_dims, cotangent.dtype), {})
        # Uses of a parameter share a view, and so a cotangent, only if an operation caches the view. That depends on
        # kernels.
        _, before = entries.get(id(parameter), (None, None))
        entries[id(parameter)] = parameter, cotangent if before is None else before + cotangent
        return True

    def __enter__(self) -> coalesce_gradients:
        self._waiting = {}
        BLOCKS.append(self)
        return self

    def __exit__(self, kind: type | None, *exc_info: object) -> None:
        BLOCKS.remove(self)
        waiting, self._waiting = self._waiting, {}
        if kind is not None:
            return
        for (mesh, mesh_dims, _), entries in waiting.items():
            platform = mesh.platform
            fast = platform.fast or NOTHING_FASTER
            with platform.no_grad(), platform.no_dispatch(), recorded_as("backward"):
                own = [cotangent for _, cotangent in entries.values()]
                summed = collectives.together(own, platform, collectives.all_reduce_over, mesh, mesh_dims)
                fast.add_to_gradients([parameter for parameter, _ in entries.values()], summed)


def sum_together(cotangents: Sequence[Any], mesh: DeviceMesh, mesh_dims: tuple[int, ...]) -> list[Any]:
    """Return the sums of plain tensors of one dtype over mesh dimensions, by one all-reduce along each dimension."""
    return collectives.together(cotangents, mesh.platform, collectives.all_reduce_over, mesh, mesh_dims)


def open_block() -> coalesce_gradients | None:
    """Return a new `coalesce_gradients` block if another one is open, or None."""
    return coalesce_gradients() if BLOCKS else None
