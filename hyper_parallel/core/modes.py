"""Context managers that change how operations treat unsupported arguments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_STRICT: ContextVar[bool] = ContextVar("hyper_parallel_strict", default=False)
_IMPLICIT: ContextVar[bool] = ContextVar("hyper_parallel_implicit_replication", default=False)
#: The mesh over which data parallelism sums the gradients of the running modules; None outside of data parallelism.
SUMMED_OVER: ContextVar[Any] = ContextVar("hyper_parallel_summed_over", default=None)
_LOSS: ContextVar[bool] = ContextVar("hyper_parallel_loss_parallel", default=False)


@contextmanager
def strict() -> Iterator[None]:
    """Context manager that turns some warnings into errors, on all ranks and before any communication.

    * An operation without a sharding rule, which otherwise runs on gathered operands.
    * A key of a plan that matches no module, which is otherwise ignored.
    * An uncertain finding in the first call of a model, or one whose value is not used.

    Example:
        >>> import torch
        >>> from hyper_parallel import Shard, distribute_tensor, init_device_mesh, strict
        >>> x = distribute_tensor(torch.eye(4), init_device_mesh("cpu", (1,)), [Shard(0)])
        >>> try:
        ...     with strict():
        ...         torch.linalg.lstsq(x, x)
        ... except ValueError as error:
        ...     print(str(error)[:33])
        linalg_lstsq has no sharding rule
    """
    token = _STRICT.set(True)
    try:
        yield
    finally:
        _STRICT.reset(token)


def is_strict() -> bool:
    """Return whether the caller is inside `strict`."""
    return _STRICT.get()


@contextmanager
def implicit_replication() -> Iterator[None]:
    """Context manager in which a plain tensor that meets a DTensor counts as replicated, with equal values on every
    rank.

    Example:
        >>> import torch
        >>> from hyper_parallel import Shard, distribute_tensor, implicit_replication, init_device_mesh
        >>> x = distribute_tensor(torch.zeros(4, 2), init_device_mesh("cpu", (1,)), [Shard(0)])
        >>> with implicit_replication():
        ...     (x + torch.ones(2)).placements
        (Shard(dim=0),)

    Source: ``torch.distributed.tensor.experimental.implicit_replication``.
    """
    token = _IMPLICIT.set(True)
    try:
        yield
    finally:
        _IMPLICIT.reset(token)


def is_implicit_replication() -> bool:
    """Return whether the caller is inside `implicit_replication`."""
    return _IMPLICIT.get()


@contextmanager
def loss_parallel() -> Iterator[None]:
    """Context manager in which a classification loss of distributed logits accepts plain targets and class weights.

    It is for logits that are sharded over their classes, as from a column-parallel head. Targets and class weights of
    ``cross_entropy`` and ``nll_loss`` (functions and modules) may then be plain tensors. They must be equal on all
    ranks that share the samples. A plain target holds all samples or, if a mesh dimension shards the samples, those of
    this rank. Plain class weights hold all classes. Outside the context, targets and weights must be DTensors.

    Logits are not gathered, also outside the context. These operations always work on shards of the classes: `softmax`,
    `log_softmax`, `logsumexp`, `cross_entropy` and `nll_loss`. Backward may run inside or outside.

    Contexts may be nested, and an exception restores the previous state.

    Example:
        >>> import torch
        >>> import torch.nn.functional as F
        >>> from hyper_parallel import Shard, distribute_tensor, init_device_mesh, loss_parallel
        >>> mesh = init_device_mesh("cpu", (1,))
        >>> logits = distribute_tensor(torch.zeros(2, 4), mesh, [Shard(1)])
        >>> with loss_parallel():
        ...     loss = F.cross_entropy(logits, torch.tensor([0, 3]))
        >>> round(loss.item(), 4)
        1.3863

    Source: ``torch.distributed.tensor.parallel.loss_parallel``.
    """
    token = _LOSS.set(True)
    try:
        yield
    finally:
        _LOSS.reset(token)


def is_loss_parallel() -> bool:
    """Return whether the caller is inside `loss_parallel`."""
    return _LOSS.get()
