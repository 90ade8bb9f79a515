"""`describe`: the style of each module of a model, the placements of its parameters, and the bytes on this rank."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from hyper_parallel.debug.collective import dtype_name
from hyper_parallel.debug.text import format_bytes
from hyper_parallel.platform import Platform, get_platform
from hyper_parallel.platform.contract.modules import APPLIED

__all__ = ["Description", "ModuleDescription", "TensorDescription", "describe", "describe_on", "placements_text"]


@dataclass
class TensorDescription:
    """A parameter or a buffer.

    Attributes:
        name: name in its module.
        kind: ``"parameter"`` or ``"buffer"``.
        shape, local_shape: global shape, and shape of the local tensor.
        dtype: dtype, for example ``"float32"``.
        placements: one for each mesh dimension; empty for a plain tensor, which is replicated.
        mesh_dims: names of the mesh dimensions, or their numbers.
        bytes, local_bytes: bytes of the full tensor, and of the local one. 0 for a tensor that another module has
            listed already.
        trained: whether it requires a gradient.
        shared: whether another module has listed it already.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    dtype: str
    placements: tuple[str, ...]
    mesh_dims: tuple[str, ...]
    bytes: int
    local_bytes: int
    trained: bool
    shared: bool = False

    @property
    def text(self) -> str:
        """Return the description, for example ``"weight (8, 4) -> (4, 4) float32, Shard(0) on tp"``."""
        local = f" -> {self.local_shape}" if self.local_shape != self.shape else ""
        where = placements_text(self.placements, self.mesh_dims)
        return f"{self.name} {self.shape}{local} {self.dtype}{', ' + where if where else ''}"


@dataclass
class ModuleDescription:
    """A module.

    Attributes:
        path: path in the model; empty for the model itself.
        kind: class of the module.
        styles: styles that were applied to it, as text.
        tensors: parameters and buffers that the module itself holds.
    """

    path: str
    kind: str
    styles: tuple[str, ...]
    tensors: list[TensorDescription] = field(default_factory=list)

    @property
    def local_bytes(self) -> int:
        """Return the local bytes of the module's own tensors, without submodules."""
        return sum(x.local_bytes for x in self.tensors)

    @property
    def bytes(self) -> int:
        """Return the global bytes of the module's own tensors, without submodules."""
        return sum(x.bytes for x in self.tensors)


@dataclass
class Description:
    """Result of `describe`. ``str`` and ``print`` show it as a table.

    Attributes:
        modules: every module, parents first.
    """

    modules: list[ModuleDescription]

    @property
    def local_bytes(self) -> int:
        """Return the local bytes of all parameters and buffers."""
        return sum(module.local_bytes for module in self.modules)

    @property
    def bytes(self) -> int:
        """Return the global bytes of all parameters and buffers."""
        return sum(module.bytes for module in self.modules)

    def as_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values."""
        return {"modules": [asdict(m) for m in self.modules], "bytes": self.bytes, "local_bytes": self.local_bytes}

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = []
        for module in self.modules:
            if module.tensors or module.styles:
                styles = f"  {'; '.join(module.styles)}" if module.styles else ""
                rows.append((f"{module.path or '(the model)'}  {module.kind}{styles}", "", ""))
            for x in module.tensors:
                sizes = ("shared", "") if x.shared else (format_bytes(x.local_bytes), format_bytes(x.bytes))
                rows.append((f"    {x.text}", *sizes))
        rows.append(("all", format_bytes(self.local_bytes), format_bytes(self.bytes)))
        # Names of modules can have any length.
        width = max(len(text) for text, size, _ in rows if size)
        return "\n".join(
            text if not size else f"{text:<{width}}  {size:>10}  {whole:>10}".rstrip()
            for text, size, whole in [("tensor", "this rank", "whole"), *rows]
        )

    __repr__ = __str__


def describe(model: Any) -> Description:
    """Return modules, styles, placements, local and global bytes of a model, parallelised or not. Communicates nothing.

    Args:
        model: module of the selected platform.

    Returns:
        A `Description`: ``print(describe(model))`` shows a table, ``describe(model).as_dict()`` is for JSON.

    Raises:
        TypeError: for an object that is no module of the platform.

    Example:
        >>> import torch
        >>> from hyper_parallel import ColwiseParallel, describe, init_device_mesh, parallelize_module
        >>> model, mesh = torch.nn.Sequential(torch.nn.Linear(4, 8, bias=False)), init_device_mesh("cpu", (1,))
        >>> _ = parallelize_module(model, mesh, {"0": ColwiseParallel()})
        >>> print(describe(model).modules[1].tensors[0].text, describe(model).local_bytes)
        weight (8, 4) float32, Shard(0) on 0 128
    """
    platform = get_platform()
    if not isinstance(model, platform.Module):
        raise TypeError(
            f"describe takes a {platform.Module.__name__} of the platform {platform.name!r}, got {type(model).__name__}"
        )
    return describe_on(model, platform)


def describe_on(model: Any, platform: Platform) -> Description:
    """Return `describe` of a model on a platform that need not be the selected one."""
    return Description(list(_modules(model, platform)))


def _modules(model: Any, platform: Platform) -> Iterator[ModuleDescription]:
    seen: set[int] = set()
    for path, module in platform.named_modules(model):
        styles = tuple(str(style) for style, _ in getattr(module, APPLIED, ()))
        found = ModuleDescription(path, type(module).__name__, styles)
        held = [("parameter", *named) for named in platform.named_parameters(module)]
        held += [("buffer", *named) for named in platform.named_buffers(module)]
        for kind, name, x in held:
            found.tensors.append(_describe_tensor(kind, name, x, id(x) in seen, platform))
            seen.add(id(x))
        yield found


def _describe_tensor(kind: str, name: str, x: Any, shared: bool, platform: Platform) -> TensorDescription:
    layout = getattr(x, "_layout", None)
    shape, local = tuple(x.shape), tuple(platform.shape_of(x))
    placements: tuple[str, ...] = ()
    dims: tuple[str, ...] = ()
    if layout is not None:
        mesh = layout.mesh
        placements = tuple(map(repr, layout.placements))
        dims = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    size = 0 if shared else x.itemsize
    return TensorDescription(
        name=name,
        kind=kind,
        shape=shape,
        local_shape=local,
        dtype=dtype_name(x.dtype, platform.dtypes),
        placements=placements,
        mesh_dims=dims,
        bytes=math.prod(shape) * size,
        local_bytes=math.prod(local) * size,
        trained=kind == "parameter" and bool(x.requires_grad),
        shared=shared,
    )


def placements_text(placements: tuple[str, ...], mesh_dims: tuple[str, ...]) -> str:
    """Return placements as text, for example ``"Shard(0) on tp"``; empty for a plain tensor."""
    named = [f"{placement.replace('dim=', '')} on {dim}" for placement, dim in zip(placements, mesh_dims, strict=True)]
    return ", ".join(named)
