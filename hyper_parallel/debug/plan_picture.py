"""`visualize_plan`: a model's modules and the sharding of each parameter, in the terminal or as SVG."""

from __future__ import annotations

from typing import Any

from hyper_parallel.debug.description import Description, ModuleDescription, TensorDescription, describe
from hyper_parallel.debug.svg import COLOURS, HEIGHT, WIDTH, Svg
from hyper_parallel.debug.text import format_bytes

__all__ = ["plan_picture", "visualize_plan"]

#: Maximum side of the rectangle of a tensor.
_SIDE = 120.0


def visualize_plan(model: Any, *, path: str | None = None) -> str:
    """Show how a model is placed on its mesh: each module with its style, each parameter with its sharding. In the
    terminal a tensor sharded along dimension 0 is drawn ``=``, and along dimension 1 ``|||``. A replicated tensor is
    ``[]``.

    Args:
        model: module of the selected platform.
        path: path of an SVG file to write as well.

    Returns:
        The text; ``print`` shows it.

    Raises:
        TypeError: for an object that is no module of the platform.

    Example:
        >>> import torch
        >>> from hyper_parallel import ColwiseParallel, init_device_mesh, parallelize_module, visualize_plan
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8, bias=False))
        >>> print(visualize_plan(parallelize_module(model, mesh, {"0": ColwiseParallel()})))
        0  Linear  ColwiseParallel()
           =   weight (8, 4) float32, Shard(0) on tp
    """
    description = describe(model)
    if path is not None:
        with open(path, "w", encoding="utf-8") as file:
            file.write(plan_picture(description))
    return "\n".join(_lines(description))


def _cut_dims(x: TensorDescription) -> dict[int, list[str]]:
    """Return a dict from each sharded tensor dimension to the mesh dimensions that shard it."""
    found: dict[int, list[str]] = {}
    for placement, mesh_dim in zip(x.placements, x.mesh_dims, strict=True):
        kind, _, rest = placement.partition("(")
        if kind.endswith("Shard"):
            digits = rest.removeprefix("dim=").split(",")[0].rstrip(")")
            found.setdefault(int(digits), []).append(mesh_dim)
    return found


def _shown(description: Description) -> list[ModuleDescription]:
    return [m for m in description.modules if m.styles or m.tensors]


def _lines(description: Description) -> list[str]:
    marks = {(): "[]", (0,): "=", (1,): "|||", (0, 1): "#"}
    lines = []
    for module in _shown(description):
        lines.append(f"{module.path or '(the model)'}  {module.kind}  {'; '.join(module.styles)}".rstrip())
        for x in module.tensors:
            mark = marks.get(tuple(sorted(_cut_dims(x))), "/")
            lines.append(f"   {mark:<3} {x.text}")
    return lines


def plan_picture(description: Description) -> str:
    """Return the plan as SVG: a rectangle for each parameter, in proportion, with its shards. The local shard is
    coloured."""
    picture = Svg()
    y = 28.0
    picture.text(12, y, "placements of the parameters; coloured: the size of this rank's shard", bold=True)
    y += HEIGHT
    styles: dict[str, str] = {}
    largest = max((size for m in description.modules for x in m.tensors for size in x.shape[:2]), default=1)
    for module in _shown(description):
        name = "; ".join(module.styles)
        kind = name.partition("(")[0]
        colour = styles.setdefault(kind, COLOURS[len(styles) % len(COLOURS)]) if kind else "#ddd"
        y += HEIGHT
        picture.text(12, y, module.path or "(the model)", bold=True)
        picture.text(12 + (len(module.path or "(the model)") + 2) * WIDTH, y, f"{module.kind}  {name}", colour="#555")
        for x in module.tensors:
            y = _draw(picture, x, y + 8, colour, largest)
    return str(picture)


def _draw(picture: Svg, x: TensorDescription, y: float, colour: str, largest: int) -> float:
    """Draw one tensor; return the y coordinate of its end."""
    rows, columns = (*x.shape, 1, 1)[:2] if len(x.shape) > 1 else ((*x.shape, 1)[0], 1)
    local = (*x.local_shape, 1, 1)[:2] if len(x.local_shape) > 1 else ((*x.local_shape, 1)[0], 1)
    height, width = (max(10.0, _SIDE * size / largest) for size in (rows, columns))
    left = 28.0
    picture.box(left, y, width, height, "#fff")
    share = [part / whole if whole else 0.0 for part, whole in zip(local, (rows, columns), strict=True)]
    if min(share) > 0:
        picture.box(left, y, width * share[1], height * share[0], colour)
    for axis, extent, part in ((0, height, height * share[0]), (1, width, width * share[1])):
        if axis in _cut_dims(x) and part > 3:
            steps = range(1, round(extent / part))
            for i in steps:
                # Lines, because a rectangle without width or height is not drawn.
                if axis == 0:
                    picture.line(left, y + i * part, left + width, y + i * part)
                else:
                    picture.line(left + i * part, y, left + i * part, y + height)
    size = "shared" if x.shared else f"{format_bytes(x.local_bytes)} of {format_bytes(x.bytes)}"
    picture.text(left + width + 10, y + min(height, HEIGHT) / 2 + 5, f"{x.text}: {size}")
    return y + max(height, HEIGHT)
