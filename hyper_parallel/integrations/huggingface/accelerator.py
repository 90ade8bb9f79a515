"""`parallelize_accelerator`: tensor and data parallelism for jobs of Hugging Face accelerate."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from hyper_parallel import checkpoint
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.integrations.huggingface.division import Division, is_divided, mesh_of_sizes
from hyper_parallel.integrations.huggingface.given_objects import check_known, give_methods
from hyper_parallel.integrations.huggingface.saving import full_state_dict

__all__ = ["parallelize_accelerator"]

#: Release that this module was written for.
_KNOWN = "1.15"
#: Attributes of accelerate's class that this module replaces or calls.
_NEEDED = (
    *("prepare_model", "prepare_data_loader", "prepare_scheduler", "no_sync", "gather", "gather_for_metrics"),
    *("reduce", "get_state_dict", "save_state", "load_state", "dataloader_config", "gradient_state", "state"),
    "parallelism_config",
)
#: The folder of sharded values in an output folder of `save_state`.
_FOLDER = "parallel_state"


def parallelize_accelerator(
    accelerator: Any,
    mesh: DeviceMesh | Any = None,
    *,
    plan: Mapping[str, Any] | None = None,
    data_parallel: str = "fully_shard",
    units: Sequence[str] | None = None,
    **options: Any,
) -> Any:
    """Let the ranks of an ``accelerate.Accelerator`` share models, in place.

    Call it before ``accelerator.prepare``, on all ranks. ``prepare`` then applies tensor and data parallelism to the
    model, and gives ranks that share the model the same batches. ``gather``, ``gather_for_metrics`` and ``reduce``
    count each batch once. ``save_state`` writes each rank's local shards, and ``load_state`` reads them on any mesh.

    Args:
        accelerator: an ``accelerate.Accelerator``, which has prepared nothing.
        mesh: mesh of all ranks, with names. The dimension ``"tp"`` is for tensor parallelism, all others are for data
            parallelism. Of two others `fully_shard` replicates over the first, and shards over the second. An
            ``accelerate.ParallelismConfig`` gives a mesh of its sizes. None is the accelerator's own
            ``parallelism_config``, if it has one, or the mesh entered with ``with mesh:``.
        plan: as for `parallelize_model`. For a model that is not of transformers, a dict from names of modules to
            styles.
        data_parallel: ``"fully_shard"``, or ``"replicate"`` for unsharded parameters on each rank.
        units: names of the module classes that become units of `fully_shard`. None uses the layers that a model of
            transformers names in ``_no_split_modules``.
        options: further keywords of `parallelize_model`, such as ``gather_heads``.

    Returns:
        ``accelerator``.

    Raises:
        TypeError: for another object. ValueError: for an accelerator that divides models in another way (FSDP,
            DeepSpeed), for both a ``parallelism_config`` and a mesh, for ``dispatch_batches=True``, and for a mesh that
            does not fit. Nothing has been changed then.

    Example:
        >>> from accelerate import Accelerator  # doctest: +SKIP
        >>> from hyper_parallel import init_device_mesh
        >>> from hyper_parallel.integrations.huggingface import parallelize_accelerator
        >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))  # doctest: +SKIP
        >>> accelerator = parallelize_accelerator(Accelerator(), mesh)  # doctest: +SKIP
        >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)  # doctest: +SKIP
    """
    check_accelerator(accelerator)
    mesh = mesh_for(accelerator, mesh, "parallelize_accelerator")
    attach(accelerator, Division(mesh, plan, data_parallel, units, options, "parallelize_accelerator"))
    return accelerator


def mesh_for(accelerator: Any, mesh: Any, what: str) -> DeviceMesh | None:
    """Return ``mesh``, or the mesh for a ``ParallelismConfig``: either ``mesh`` or the accelerator's.

    Raises:
        ValueError: for an accelerator with a ``parallelism_config`` where a mesh is given as well.
    """
    config = accelerator.parallelism_config
    if config is None or config.total_size == 1:
        return mesh_of_sizes(mesh, what) if hasattr(mesh, "dp_shard_size") else mesh
    if mesh is not None and mesh is not config:
        raise ValueError(
            f"{what}: the accelerator has a parallelism_config, but a mesh was passed too: use one of the two"
        )
    return mesh_of_sizes(config, what)


def attach(accelerator: Any, division: Division) -> None:
    """Give an accelerator the methods of `_Divided`. `check_accelerator` must have accepted it before."""
    accelerator._division = division
    # The division takes the place of accelerate's own, whose code asks for this.
    accelerator.state.parallelism_config = accelerator.state.device_mesh = None
    # Batches that one process reads for all would be divided over all ranks.
    accelerator.dataloader_config.dispatch_batches = False
    give_methods(accelerator, _Divided)


def check_accelerator(accelerator: Any) -> None:
    """Raise ValueError or TypeError if the ranks of an accelerator cannot share models.

    Raises:
        TypeError, ValueError: as `parallelize_accelerator`.
    """
    if isinstance(accelerator, _Divided):
        raise ValueError("parallelize_accelerator: this accelerator has a mesh already")
    check_known(accelerator, _NEEDED, "parallelize_accelerator", "an accelerate.Accelerator", _KNOWN)
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA"):
        raise ValueError(f"the accelerator shards models with {kind} already: remove {kind} from its configuration")
    if accelerator.dispatch_batches:
        raise ValueError(
            "dispatch_batches=True splits each batch over all ranks, but ranks with shards of one model need the same "
            "batch: leave dispatch_batches out of the DataLoaderConfiguration"
        )
    if accelerator._models or accelerator._dataloaders:
        raise ValueError("parallelize_accelerator: call it before accelerator.prepare")


#: Stands in for ``accelerate.Accelerator``, which is not imported here.
_Base: Any = object


class _Divided(_Base):
    """Methods of an accelerator whose ranks share models, which override the methods of ``accelerate.Accelerator``.

    The accelerator gets a class with both bases, this class first.
    """

    _division: Division

    @property
    def num_processes(self) -> int:
        """Return the number of different batches that the ranks process at a time."""
        return self._division.count

    @property
    def process_index(self) -> int:
        """Return the number of this rank's batch."""
        return self._division.index

    def prepare_model(self: Any, model: Any, device_placement: Any = None, evaluation_mode: bool = False) -> Any:
        """Divide the model. Accelerate's own method then only prepares autocast and compilation."""
        if device_placement is not False and self.device_placement and not is_divided(model):
            model = model.to(self.device)
        self._division.apply(model)
        return super().prepare_model(model, device_placement=False, evaluation_mode=True)

    def prepare_data_loader(self: Any, data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        """Give ranks that share a model the same batches, even if loader workers draw random numbers."""
        begin = getattr(data_loader, "worker_init_fn", None)
        if isinstance(begin, partial) and "rank" in begin.keywords:
            data_loader.worker_init_fn = partial(
                begin.func, *begin.args, **{**begin.keywords, "rank": self.process_index}
            )
        return super().prepare_data_loader(data_loader, *args, **kwargs)

    def prepare_scheduler(self: Any, scheduler: Any) -> Any:
        """Prepare a scheduler to take one step each time that all ranks have read one batch."""
        prepared = super().prepare_scheduler(scheduler)
        if not prepared.split_batches and not isinstance(prepared.scheduler, _Steps):
            prepared.scheduler, prepared.split_batches = _Steps(prepared.scheduler, self.num_processes), True
        return prepared

    @contextmanager
    def no_sync(self: Any, model: Any) -> Iterator[None]:
        """Accumulate gradients without communication over data-parallel ranks, in a block."""
        model = self.unwrap_model(model)
        if hasattr(model, "no_sync"):
            with model.no_sync():
                yield
            return
        sync = getattr(model, "set_requires_gradient_sync", None)
        if sync is not None:
            sync(False)
        try:
            yield
        finally:
            if sync is not None:
                sync(True)

    def gather(self: Any, tensor: Any) -> Any:
        """Return the values of all batches, each batch once."""
        from accelerate.utils import recursively_apply

        return recursively_apply(self._division.gather, tensor, error_on_other_type=True)

    def gather_for_metrics(self: Any, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the values of all batches, each batch once, without samples that pad the last batch."""
        from accelerate.utils import gather_object, recursively_apply

        try:
            recursively_apply(lambda x: x, input_data, error_on_other_type=True)
        except TypeError:
            use_gather_object = True
        if not use_gather_object:
            data = self.gather(input_data)
        else:
            first = self._division.tensor is None or self._division.tensor.get_local_rank() == 0
            found = gather_object([(self.process_index, input_data)] if first else [])
            data = [each for _, values in sorted(found, key=lambda pair: pair[0]) for each in values]
        state = self.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return data
        return data[: state.remainder] if use_gather_object else recursively_apply(lambda x: x[: state.remainder], data)

    def reduce(self: Any, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the sum or the mean over all batches, each batch once."""
        from accelerate.utils import recursively_apply

        def reduced(x: Any) -> Any:
            whole = self._division.gather(x[None])
            return x if reduction == "none" else (whole.sum(0) if reduction == "sum" else whole.mean(0)) * scale

        return recursively_apply(reduced, tensor, error_on_other_type=True)

    def split_between_processes(self: Any, inputs: Any, apply_padding: bool = False) -> Any:
        """Refuse to split inputs if ranks share a model, because these ranks need the same inputs.

        Raises:
            ValueError: where ranks share a model.
        """
        if self._division.tensor is None or self._division.tensor.size() == 1:
            return super().split_between_processes(inputs, apply_padding)
        raise ValueError(
            "split_between_processes gives each rank different inputs, but ranks with shards of one model need the "
            "same inputs: use inputs[accelerator.process_index :: accelerator.num_processes]"
        )

    def get_state_dict(self: Any, model: Any, unwrap: bool = True) -> Any:
        """Return full weights on all ranks. All ranks must call it."""
        return full_state_dict(self.unwrap_model(model))

    def save_state(self: Any, output_dir: Any = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """Save local shards of models and optimizers on each rank, and all other state as accelerate does."""
        handle = self.register_save_state_pre_hook(self._save_shards)
        with self._without_optimizers(handle):
            return super().save_state(output_dir, safe_serialization, **kwargs)

    def load_state(self: Any, input_dir: Any = None, load_kwargs: Any = None, **kwargs: Any) -> Any:
        """Load the files of `save_state`, even from another mesh."""
        handle = self.register_load_state_pre_hook(self._load_shards)
        with self._without_optimizers(handle):
            super().load_state(input_dir, load_kwargs, **kwargs)
        self._division.share_random_states()

    @contextmanager
    def _without_optimizers(self: Any, handle: Any) -> Iterator[None]:
        """Hide models and optimizers from accelerate inside this context.

        Accelerate would save the shards of one rank only.
        """
        hidden = self._hidden = (self._models, self._optimizers)
        self._models, self._optimizers = [], []
        try:
            yield
        finally:
            self._models, self._optimizers = hidden
            handle.remove()

    def _shards(self: Any) -> dict[str, Any]:
        models, optimizers = self._hidden
        return {
            "models": [self.unwrap_model(model) for model in models],
            "optimizers": [optimizer.optimizer for optimizer in optimizers],
        }

    def _save_shards(self: Any, models: list[Any], weights: list[Any], folder: str | os.PathLike[str]) -> None:
        checkpoint.save(self._shards(), Path(folder) / _FOLDER, overwrite=True)

    def _load_shards(self: Any, models: list[Any], folder: str | os.PathLike[str]) -> None:
        checkpoint.load(self._shards(), Path(folder) / _FOLDER)


class _Steps:
    """Scheduler that, like accelerate's, takes several steps at a time: one step for each of the ranks' batches."""

    def __init__(self, scheduler: Any, count: int) -> None:
        self._scheduler, self._count = scheduler, count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Take one step for each of the ranks' batches, but no more steps than the schedule has. A schedule that reads
        a metric takes one step."""
        total = getattr(self._scheduler, "total_steps", float("inf"))
        for _ in range(self._count if hasattr(self._scheduler, "_step_count") else 1):
            if getattr(self._scheduler, "_step_count", 0) <= total:
                self._scheduler.step(*args, **kwargs)
