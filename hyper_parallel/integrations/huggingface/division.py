"""Division of a training job over a mesh: ranks that share a model, and ranks that share a batch."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hyper_parallel.core.data_parallel.fully_shard import fully_shard, register_fsdp_forward_method
from hyper_parallel.core.data_parallel.replicate import replicate
from hyper_parallel.core.dtensor.tensor import DTensor
from hyper_parallel.core.layouts.placement_types import Shard
from hyper_parallel.core.mesh.device_mesh import DeviceMesh, init_device_mesh, resolve_mesh
from hyper_parallel.core.rules.random import of_first_rank, share_state
from hyper_parallel.core.tensor_parallel.api import parallelize_module
from hyper_parallel.integrations.huggingface.api import parallelize_model
from hyper_parallel.integrations.huggingface.lora import adapted_model

__all__ = ["Division", "is_divided", "mesh_of_sizes", "whole_head"]

#: The mesh dimension for tensor parallelism. All other dimensions are for data parallelism.
TENSOR = "tp"
_WAYS = ("fully_shard", "replicate")


class Division:
    """The division of models and batches over a mesh.

    Ranks that differ only in the dimension ``"tp"`` share a batch, and each has a shard of the model. Along the other
    dimensions each rank has a separate batch.

    Args:
        mesh: mesh over all ranks of the world, with names.
        plan: as for `parallelize_model`.
        data_parallel: ``"fully_shard"`` or ``"replicate"``.
        units: names of the classes of modules that become units of `fully_shard`; None asks the model.
        options: further keywords of `parallelize_model`.
        what: name of the caller, for messages.

    Attributes:
        tensor: the mesh of tensor parallelism, or None.
        batches: a 1-D mesh of the ranks with different batches, or None.
        count: number of different batches that the ranks have at a time.
        index: number of this rank's batch.

    Raises:
        ValueError: for a mesh without names, a mesh of only some ranks, or a mesh dimension that shards sequences. Also
            for an unknown ``data_parallel``.
    """

    def __init__(
        self,
        mesh: DeviceMesh | None,
        plan: Mapping[str, Any] | None,
        data_parallel: str,
        units: Sequence[str] | None,
        options: Mapping[str, Any],
        what: str,
    ) -> None:
        mesh = resolve_mesh(mesh, what)
        if data_parallel not in _WAYS:
            raise ValueError(f"{what} takes 'fully_shard' or 'replicate' for data_parallel, got {data_parallel!r}")
        names = mesh.mesh_dim_names
        if names is None:
            raise ValueError(
                f"{what} needs a mesh with names, such as ('dp', 'tp'): pass mesh_dim_names to init_device_mesh"
            )
        if "cp" in names:
            raise ValueError(
                f"{what} does not support sharded sequences, but {mesh} has a dimension 'cp': call parallelize_model "
                "in your own training loop, as in docs/long_sequences.md"
            )
        world = mesh.platform.world_size()
        if mesh.size() != world:
            raise ValueError(f"{what} needs a mesh of all ranks: {mesh} has {mesh.size()} of {world}")
        self._plan, self._fully_sharded, self._units = plan, data_parallel == "fully_shard", units
        self._options, self._what = dict(options), what
        self.tensor = mesh[TENSOR] if TENSOR in names else None
        data = tuple(name for name in names if name != TENSOR)
        self._data = mesh[data] if data else None
        self.batches = self._data if len(data) < 2 or self._data is None else self._data._flatten()
        self.count = 1 if self.batches is None else self.batches.size()
        self.index = 0 if self.batches is None else self.batches.get_local_rank()

    def apply(self, model: Any) -> None:
        """Divide a model in place. A model with distributed parameters is not changed.

        Raises:
            ValueError: for a missing plan, and for all models that `parallelize_model` and `fully_shard` refuse.
        """
        if not is_divided(model):
            self._divide(model)
        if self.count > 1 and self._fully_sharded:
            # A forward gathers parameters on all ranks, but ranks end their words at different lengths. With this mark,
            # `generate` of transformers runs the model on every rank until all ranks have ended.
            adapted_model(model)._is_fsdp_managed_module = True

    def _divide(self, model: Any) -> None:
        inner = adapted_model(model)
        of_transformers = hasattr(inner, "config") and hasattr(inner, "base_model")
        if self.tensor is not None and of_transformers:
            plan = {**whole_head(inner), **(self._plan or {})}
            parallelize_model(model, self.tensor, plan=plan or None, **self._options)
        elif self.tensor is not None and self.tensor.size() > 1:
            if not self._plan:
                raise ValueError(
                    f"{self._what} has no plan for {type(model).__name__}, which is not a model of transformers: pass "
                    "plan=, a dict from names of modules to styles"
                )
            parallelize_module(model, self.tensor, dict(self._plan))
        if self._data is None:
            return
        if not self._fully_sharded:
            replicate(model, self.batches)
            return
        kinds = self._units if self._units is not None else getattr(inner, "_no_split_modules", None) or ()
        for module in [module for module in model.modules() if type(module).__name__ in kinds]:
            fully_shard(module, mesh=self._data)
        fully_shard(model, mesh=self._data)
        if of_transformers and getattr(inner.config, "is_encoder_decoder", False):
            register_fsdp_forward_method(model, "generate")  # which calls the encoder by itself

    def share_random_states(self) -> None:
        """Give ranks that share a model the generator states of the first of them.

        A loaded state is that of a rank of the saving job, whose ranks may have had different batches. All ranks must
        call it.
        """
        if self.tensor is None or self.tensor.size() == 1:
            return
        share_state(self.tensor)
        platform = self.tensor.platform
        host, of_numpy, of_python = of_first_rank(
            (platform.get_host_rng_state(), np.random.get_state(), random.getstate()), self.tensor
        )
        if host is not None:  # the device has generators of its own
            platform.set_host_rng_state(host)
        np.random.set_state(of_numpy)
        random.setstate(of_python)

    def gather(self, x: Any) -> Any:
        """Return the values of all batches, concatenated along dimension 0, each batch once. The shapes must be
        equal."""
        if x.ndim == 0:
            x = x.reshape(1)
        if self.batches is None or self.count == 1:
            return x
        return DTensor.from_local(x.contiguous(), self.batches, (Shard(0),), run_check=False).full_tensor()


def mesh_of_sizes(config: Any, what: str) -> DeviceMesh:
    """Return the mesh for the sizes in an ``accelerate.ParallelismConfig``, in accelerate's order of dimensions.

    Args:
        config: object with ``dp_replicate_size``, ``dp_shard_size``, ``cp_size``, ``sp_size`` and ``tp_size``.
        what: name of the caller, for messages.

    Raises:
        ValueError: for a size that shards sequences, and for sizes whose product is not the number of ranks.
    """
    if config.cp_size > 1 or config.sp_size > 1:
        raise ValueError(
            f"{what} does not support sharded sequences, but the ParallelismConfig has cp_size={config.cp_size} and "
            f"sp_size={config.sp_size}. Leave both at 1, or call parallelize_model in your own training loop, as in "
            "docs/long_sequences.md"
        )
    sizes = {"dp_replicate": config.dp_replicate_size, "dp_shard": config.dp_shard_size, TENSOR: config.tp_size}
    # "dp_shard" stays even with size 1: without it, replicas would be taken for shards.
    names = tuple(name for name, size in sizes.items() if size > 1 or name == "dp_shard")
    return init_device_mesh(mesh_shape=tuple(sizes[name] for name in names), mesh_dim_names=names)


def is_divided(model: Any) -> bool:
    """Return whether a model has distributed parameters."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def whole_head(model: Any) -> dict[str, None]:
    """Return plan entries for a model that TRL has patched: its forward reads the full weight of the head.

    If the embeddings are tied to the head, the entries include them.
    """
    own = getattr(model.__dict__.get("forward"), "__func__", None)
    if own is None or own.__code__.co_name != "_fused_forward":
        return {}
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    whole = [head, embeddings] if embeddings.weight is head.weight else [head]
    return {name: None for name, module in model.named_modules() if any(module is each for each in whole)}
