"""Inspection and checks of the operands of an operation."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Number
from typing import Any

from hyper_parallel.core.layouts.layout import Layout
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.modes import SUMMED_OVER
from hyper_parallel.core.operations.owners import owner_of, running_module
from hyper_parallel.core.program_places import variable_of
from hyper_parallel.core.rules.registry import CanonicalOp
from hyper_parallel.platform.contract.interception import name_of

#: The DTensor classes of the platforms in use.
DTENSOR_CLASSES: set[type] = set()
_SCALARS = frozenset({int, float, bool, complex, type(None), str})


def operand_key(x: Any) -> Any:
    """Return the facts about an operand that a recipe depends on.

    The facts are the layout of a DTensor, the shape of a plain tensor, or None for other operands.
    """
    if type(x) in _SCALARS:
        return None
    try:
        return x._layout
    except AttributeError:
        pass
    try:
        shape = getattr(x, "shape", None)
    except RuntimeError:
        shape = ()  # a nested tensor has no shape (see `refuse_foreign`)
    # Numbers of numpy have a shape too.
    return None if shape is None or (not shape and isinstance(x, Number)) else tuple(shape)


def common_mesh(layouts: tuple, func: Any) -> DeviceMesh | None:
    """Return the mesh of the operands, or None if no operand is distributed.

    Raises:
        ValueError: when operands are on different meshes.
    """
    mesh = None
    for layout in layouts:
        if isinstance(layout, Layout):
            if mesh is not None and layout.mesh is not mesh:
                raise ValueError(
                    f"{name_of(func)} got tensors on different meshes, {mesh} and {layout.mesh}: "
                    + (_SLICES if mesh.contains(layout.mesh) or layout.mesh.contains(mesh) else _MESHES)
                )
            mesh = layout.mesh
    return mesh


#: Remedies for operands on two meshes. The first is for a mesh that is a slice of the other.
_SLICES = (
    "in a distributed batch, a layer with use_local_output=False (the default of SequenceParallel) returns a tensor "
    "on both mesh dimensions. A layer with use_local_output=True returns a tensor on the data-parallel dimension "
    "alone. Use the same use_local_output for all layers of a residual stream. A module without a style has "
    "parameters on the data-parallel dimension alone: add a style for it to the plan, such as "
    "NoParallel(use_local_output=False)"
)
_MESHES = "move the tensors to one mesh (full_tensor, then distribute_tensor)"


def write_error(func: Any, layout: Layout) -> ValueError:
    """Return the error for a tensor of this layout, to which an operation in place cannot write its result."""
    return ValueError(
        f"{name_of(func)} cannot write into a tensor placed {list(layout.placements)} on {layout.mesh}: the result "
        "of the operands has another placement. Redistribute the tensor first, or use the operation that returns "
        "a new tensor"
    )


def mixed_error(func: Any, operands: Sequence[Any], plain: int, canonical: CanonicalOp | None = None) -> ValueError:
    """Return the error for a plain tensor, operand ``plain``, that meets a DTensor.

    Args:
        func: the native operation.
        operands: operands of the operation.
        plain: index of the plain tensor.
        canonical: the canonical operation, from which operands get their names, or None.
    """
    layouts = [operand_key(x) for x in operands]
    other = next(i for i, layout in enumerate(layouts) if isinstance(layout, Layout))
    platform = layouts[other].mesh.platform
    # A parameter explains the cause better than a tensor that the module created, such as an initial hidden state.
    names = {i: owner_of(operands[i], platform) for i, layout in enumerate(layouts) if isinstance(layout, tuple)}
    plain = next((i for i, name in names.items() if name), plain)
    if names.get(plain):
        remedy = _PLAIN_HELD
    elif _role(canonical, plain) == "ids":
        remedy = _PLAIN_IDS
    else:
        remedy = _PLAIN_TARGET if canonical is not None and canonical.loss else _PLAIN
    called = [operand_name(operands, i, platform, canonical) for i in (plain, other)]
    path = running_module(platform)
    where = f" in the forward of {path!r}" if path else ""
    return ValueError(  # not TypeError, which frameworks turn into "unsupported operand" in dunders
        f"{name_of(func)} got a plain tensor ({called[0]}, shape {layouts[plain]}) and a DTensor ({called[1]}, "
        f"global shape {tuple(layouts[other].shape)}, placements {list(layouts[other].placements)}){where}: {remedy}"
    )


def refuse_summed(func: Any, operands: Sequence[Any], i: int, mesh: DeviceMesh, op: CanonicalOp | None = None) -> None:
    """Check a plain operand that `implicit_replication` lets meet DTensors on ``mesh``.

    Raises:
        ValueError: on all ranks, for a tensor that a styled module computed from parameters whose gradients data
            parallelism sums, while the batch is distributed. Each rank has its full gradient.
    """
    summed, platform = SUMMED_OVER.get(), mesh.platform
    if summed is None or mesh.is_beside(summed) or not platform.requires_grad(operands[i]):
        return
    if all(platform.is_made_with(operands[i], kind) is False for kind in DTENSOR_CLASSES):
        return
    raise ValueError(
        f"{name_of(func)} got a DTensor on {mesh} and a plain tensor: {operand_name(operands, i, platform, op)}. It "
        "was computed from distributed parameters. Inside implicit_replication() each rank gets its full gradient, and "
        f"data parallelism would sum these over the ranks of {summed}. Call the module that made the plain tensor with "
        "a DTensor of the batch (positions: ones_like(ids).cumsum(1) - 1)"
    )


def operand_name(operands: Sequence[Any], i: int, platform: Any, canonical: CanonicalOp | None = None) -> str:
    """Return the name of operand ``i`` in messages.

    A parameter or buffer of a known module has its name there. Any other tensor is named by its argument and the
    program's variable.

    Args:
        operands: operands of the operation.
        i: index of the operand.
        platform: the platform.
        canonical: the canonical operation, from which arguments get their names, or None.
    """
    held = owner_of(operands[i], platform)
    if held:
        return held
    role, variable = _role(canonical, i), variable_of(operands[i], platform.Tensor)
    what = f"argument {role!r}" if role else f"the {_ORDINALS[i]} operand" if i < len(_ORDINALS) else f"operand {i}"
    return f"{what}, variable {variable!r}" if variable and variable != role else what


_ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")
_PLAIN = (
    "make the plain tensor a DTensor with DTensor.from_local or distribute_tensor, or compute with to_local(). If the "
    "plain tensor is the same on all ranks, use `with implicit_replication():`"
)
_PLAIN_HELD = (
    "add a style for the module to the plan, such as NoParallel(use_local_output=False). Or set "
    "output_layouts=Replicate() and use_local_output=True for the layer before it"
)
_PLAIN_IDS = (
    "derive the ids from the ids of the batch, such as positions ones_like(ids).cumsum(1) - 1, or make the ids a "
    "DTensor on the mesh of the batch with distribute_tensor"
)
_PLAIN_TARGET = (
    "compute the loss inside loss_parallel(), where targets and class weights may be plain, or make the plain tensor "
    "a DTensor with distribute_tensor"
)


def _role(canonical: CanonicalOp | None, i: int) -> str:
    signature = None if canonical is None or canonical.signature.several else canonical.signature
    return signature.operands[i].name if signature is not None and i < len(signature.operands) else ""


def check_parts(func: Any, layouts: Sequence[Any]) -> None:
    """Raise for an element-wise operation on a local shard and a full sequence, before operands are gathered.

    Args:
        func: the native operation, whose shapes do not broadcast.
        layouts: `operand_key` of each operand.

    Raises:
        ValueError: when sizes differ by the number of ranks of another dimension of the mesh.
    """
    shapes = [tuple(key.shape if isinstance(key, Layout) else key) for key in layouts if key is not None]
    mesh = next(key.mesh for key in layouts if isinstance(key, Layout))
    root = mesh.get_root_mesh()
    ndim = max(map(len, shapes))
    for dim in range(ndim if root is not mesh else 0):
        sizes = {shape[dim - ndim] for shape in shapes if len(shape) >= ndim - dim} - {1}
        if len(sizes) > 1 and min(sizes) and max(sizes) / min(sizes) in root.shape:
            raise ValueError(
                f"{name_of(func)} got tensors of global shapes {' and '.join(map(str, shapes))} on {mesh}, which do "
                f"not broadcast. A layer whose style has output_layouts=Shard({dim}) returns this rank's shard of "
                f"dimension {dim}. Use the same output_layouts for the layer that makes the other tensor. For an "
                f"embedding, use RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard({dim}))"
            )


def refuse_foreign(x: Any, platform: Any, what: str) -> None:
    """Raise TypeError if ``x`` is a tensor that cannot be combined with DTensors. ``what`` is the caller, for the
    message."""
    foreign = platform.foreign_tensor(x)
    if foreign is not None:
        raise TypeError(f"{what} got {foreign}")
