"""Base class of `ColwiseParallel` and `RowwiseParallel`, which shard one dimension of a weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from hyper_parallel.core.layouts.placement_types import PackedShard, Placement, Replicate, Shard
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.tensor_parallel.program.convert import as_single, to_placement
from hyper_parallel.core.tensor_parallel.program.heads import as_heads, check_heads, sizes_of_heads
from hyper_parallel.core.tensor_parallel.program.planned_parameters import module_label, planned_layouts
from hyper_parallel.core.tensor_parallel.styles.base import ModuleStyle, check_flag
from hyper_parallel.platform import Platform
from hyper_parallel.platform.contract import ModuleKind


class WeightParallel(ModuleStyle):
    """Base class of styles that shard one dimension of the weight of a linear module or an embedding."""

    #: Whether the output features of a linear module are sharded; otherwise its input features are sharded.
    _splits_outputs: ClassVar[bool]
    #: Placement of an embedding's weight.
    _embedding: ClassVar[Placement]
    #: Default layouts, which are also those that a linear module needs and returns. An embedding needs replicated ids.
    input_layouts: tuple[Placement]
    desired_input_layouts: tuple[Placement]
    output_layouts: tuple[Placement]
    replicate_heads: bool = False
    has_program = True

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        packed: int | Sequence[int] | None = None,
        heads: int | Sequence[int] | None = None,
    ) -> None:
        name = type(self).__name__
        self.input_layouts = (as_single(input_layouts, "input_layouts", name) or type(self).input_layouts[0],)
        self.output_layouts = (as_single(output_layouts, "output_layouts", name) or type(self).output_layouts[0],)
        self.use_local_output = check_flag(use_local_output, "use_local_output", name)
        self.packed = None if packed is None else PackedShard(0, packed).sizes
        self.heads = as_heads(heads, name)
        count = len(self.packed) if isinstance(self.packed, tuple) else self.packed
        if isinstance(self.heads, tuple) and count not in (None, len(self.heads)):
            raise ValueError(f"{name}: heads={self.heads} and packed={self.packed} name different numbers of parts")
        if isinstance(self.heads, int) and self.packed not in (None, 1):
            raise ValueError(f"{name}: with packed={self.packed}, heads takes one number for each part")

    def check(self, module: Any, device_mesh: DeviceMesh, where: str) -> None:
        platform, name = device_mesh.platform, type(self).__name__
        linear = platform.is_linear_module(module)
        if not (linear or platform.is_embedding_module(module)):
            raise ValueError(
                f"{name} parallelises linear and embedding modules, but {where!r} is a {type(module).__name__}: "
                f"{_instead(module, platform, where)}"
            )
        if not linear and (self.packed is not None or self.heads is not None):
            raise ValueError(
                f"{name}(packed=..., heads=...) is for linear modules, but {where!r} is an embedding: leave packed "
                "and heads out"
            )
        if platform.kind_of(module).weight not in dict(platform.named_parameters(module)):
            raise ValueError(f"{name} on {where!r}: {_no_weight(module, platform)}")
        if not linear and self.input_layouts[0] is Shard(-1):
            raise ValueError(
                f"{where!r} is an embedding, and {self!r} would take the ids of the {device_mesh.size()} ranks of "
                f"{device_mesh} as shards of the last dimension. Use {name}(input_layouts=Replicate()) for ids that "
                "are the same on every rank, or name the sharded dimension, such as Shard(1) of (batch, sequence)"
            )
        parts = self.parts(module, platform, where) or (self.features(module, platform),)
        super().check(module, device_mesh, where)
        if self.heads is not None:
            check_heads(self.heads, parts, device_mesh, where, may_replicate=self.replicate_heads)

    def parameter_placements(self, module: Any, mesh: DeviceMesh) -> dict[str, Placement]:
        platform = mesh.platform
        kind = platform.kind_of(module)
        if not platform.is_linear_module(module):
            return {kind.weight: self._embedding}
        if self._keeps_whole(mesh):
            return {}
        parts = self.parts(module, platform)
        shard = Shard(0) if parts is None else PackedShard(0, parts)
        placements: dict[str, Placement] = {kind.weight: shard.with_dim(self._split_dim(kind))}
        if kind.bias in dict(platform.named_parameters(module)):
            placements[kind.bias or ""] = shard if self._splits_outputs else Replicate()
        return placements

    def input_placements(self, module: Any, mesh: DeviceMesh) -> tuple[Placement, Placement]:
        platform, layout, needed = mesh.platform, self.input_layouts[0], self.desired_input_layouts[0]
        if not platform.is_linear_module(module):
            return layout, Replicate()
        if not self._splits_outputs and (parts := self.parts(module, platform)) is not None:
            needed = PackedShard(-1, parts)
            layout = needed if layout is Shard(-1) else layout
        return layout, needed

    def prepare_input(self, module: Any, x: Any, i: int, what: str, mesh: DeviceMesh) -> Any:
        layout, needed = self.input_placements(module, mesh)
        size = None
        if (
            mesh.platform.is_linear_module(module)
            and isinstance(layout, Shard)
            and layout.dim in (-1, len(x.shape) - 1)
        ):
            # The weight has the global number of features, so the sizes of uneven shards are known.
            size, _ = linear_sizes(module, mesh.platform)
        return to_placement(x, mesh, layout, needed, what, size, module)

    def _keeps_whole(self, mesh: DeviceMesh) -> bool:
        """Return whether the weight is replicated because there are fewer heads than ranks."""
        return self.replicate_heads and isinstance(self.heads, int) and self.heads < mesh.size()

    @property
    def _is_packed(self) -> bool:
        """Return whether the weight stacks several matrices, which are sharded separately."""
        return isinstance(self.heads, tuple) or self.packed not in (None, 1)

    def _split_dim(self, kind: ModuleKind) -> int:
        return kind.out_dim if self._splits_outputs else 1 - kind.out_dim

    def features(self, module: Any, platform: Platform) -> int:
        """Return the global size of the weight's dimension that the style shards."""
        return _weight_shape(module, platform)[self._split_dim(platform.kind_of(module))]

    def parts(self, module: Any, platform: Platform, where: str | None = None) -> tuple[int, ...] | None:
        """Return the features of each matrix in a packed weight, or None for a weight that is one matrix."""
        if not self._is_packed:
            return None
        features = self.features(module, platform)
        if self.packed is None and isinstance(self.heads, tuple):
            sizes: int | tuple[int, ...] = sizes_of_heads(features, self.heads, where or type(module).__name__)
        else:
            sizes = self.packed or 1
        try:
            return PackedShard(0, sizes).resolve(features).sizes  # type: ignore[return-value]
        except ValueError as error:
            name = type(self).__name__
            raise ValueError(f"{name}(packed={self.packed}) on {where or type(module).__name__!r}: {error}") from None


def linear_sizes(module: Any, platform: Platform) -> tuple[int, int]:
    """Return the global numbers of input and output features of a linear module."""
    shape, out_dim = _weight_shape(module, platform), platform.kind_of(module).out_dim
    return shape[1 - out_dim], shape[out_dim]


def _weight_shape(module: Any, platform: Platform) -> tuple[int, ...]:
    """Return the global shape of the weight. This does not run the computation of a parametrized weight.

    Raises:
        ValueError: for a weight that was already no parameter when the style was applied.
    """
    name = platform.kind_of(module).weight
    held = platform.own_parameters(module).get(name)
    if held is None and (held := planned_layouts(module).get(name)) is None:
        raise ValueError(f"{module_label(module)}: {_no_weight(module, platform)}")
    return tuple(held.shape)


def _no_weight(module: Any, platform: Platform) -> str:
    return (
        f"{platform.kind_of(module).weight!r} of this {type(module).__name__} is not a parameter, but is computed (by "
        "a parametrization, weight or spectral normalisation): apply the parametrization after parallelize_module, to "
        "the distributed weight"
    )


def _instead(module: Any, platform: Platform, where: str) -> str:
    """Return a remedy for the error message: styles for a module that is neither linear nor an embedding."""
    if is_fused_attention(module) or recurrent_kind(module, platform):
        return (
            "use NoParallel() to compute the module in full on every rank. A layer before it with ColwiseParallel then "
            "needs output_layouts=Replicate()"
        )
    called = platform.named_modules(module)
    below = next((path for path, layer in called if path and platform.is_linear_module(layer)), None)
    if below is not None:
        return (
            f"name its linear layers in the plan, such as {f'{where}.{below}'!r}, or use PrepareModuleInput, "
            "PrepareModuleOutput or SequenceParallel for the module itself"
        )
    return (
        "use NoParallel() to compute the module in full on every rank, SequenceParallel() for a shard of the "
        "sequence, ParameterParallel to place its parameters. For your own class of linear layers, call "
        "register_linear_module"
    )


def is_fused_attention(module: Any) -> bool:
    """Return whether a module reads the weights of its layers without calling them, as `MultiheadAttention` does."""
    return all(hasattr(module, name) for name in ("in_proj_weight", "out_proj", "embed_dim"))


def recurrent_kind(module: Any, platform: Platform) -> str:
    """Return ``"layer"`` for a recurrent layer, ``"cell"`` for one step of it, and "" for another module.

    Recurrent layers are recognised by the names of their parameters, which are the same in both frameworks.
    """
    names = [name for name, _ in platform.named_parameters(module) if name.startswith(("weight_ih", "weight_hh"))]
    if len(names) < 2 or not hasattr(module, "hidden_size"):
        return ""
    return "cell" if "weight_hh" in names else "layer"
