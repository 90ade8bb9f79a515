"""`explain`: a model under a plan, and the collectives of a training step."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hyper_parallel.core.trees import tensors_in
from hyper_parallel.debug.collective import Collective, collective_rows
from hyper_parallel.debug.comm_trace import collective_table
from hyper_parallel.debug.description import Description, ModuleDescription, describe_on
from hyper_parallel.debug.svg import svg_of_lines
from hyper_parallel.debug.text import format_bytes
from hyper_parallel.planning.step import DryStep, MeshLike

__all__ = ["Explanation", "Output", "explain"]


@dataclass
class Output:
    """Output of a module in one call.

    Attributes:
        local_shape: shape of this rank's tensor.
        shape, placements: for a DTensor, the global shape and one placement for each mesh dimension; else None.
    """

    local_shape: tuple[int, ...]
    shape: tuple[int, ...] | None = None
    placements: tuple[str, ...] | None = None

    def __str__(self) -> str:
        if self.placements is None:
            return str(self.local_shape)
        return f"{self.local_shape} of {self.shape}, {', '.join(self.placements)}"


@dataclass
class Explanation:
    """Result of `explain`. ``str`` and ``print`` show it as a tree.

    Attributes:
        mesh: sizes by name.
        rank: the rank that is described.
        model: modules, styles, shards and bytes of the rank.
        outputs: path of a module -> the first tensor of its output in each call.
        collectives: collectives of a training step, forward and backward.
        setup: collectives of applying the plan.
        unmatched: keys of the plan that match no module, each with similar paths.
        plain_code: findings in the code between styled modules, one line each, from `check_plain_code`.
        not_followed: unknown operations in that code, by name -> number of occurrences.
    """

    mesh: dict[str, int]
    rank: int
    model: Description
    outputs: dict[str, list[Output]]
    collectives: list[Collective]
    setup: list[Collective]
    unmatched: dict[str, str]
    differentiated: bool = True
    plain_code: list[str] = field(default_factory=list)
    not_followed: dict[str, int] = field(default_factory=dict)
    _by_module: dict[str, list[dict[str, Any]]] = field(default_factory=dict, repr=False)

    @property
    def untouched(self) -> list[str]:
        """Return paths of modules without a style that hold parameters, none of which is distributed."""
        return [
            m.path
            for m in self.model.modules
            if not m.styles
            and any(x.kind == "parameter" for x in m.tensors)
            and not any(x.placements for x in m.tensors if x.kind == "parameter")
        ]

    def rows(self) -> list[dict[str, Any]]:
        """Return the collectives of the step as rows. Equal collectives form one row with their count."""
        return collective_rows(self.collectives)

    def table(self) -> str:
        """Return the collectives as a table for a terminal."""
        return collective_table(self.rows())

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {
            "mesh": self.mesh,
            "rank": self.rank,
            **self.model.as_dict(),
            "outputs": {path: [vars(y) for y in ys] for path, ys in self.outputs.items()},
            "collectives": self.rows(),
            "setup": collective_rows(self.setup),
            "unmatched": self.unmatched,
            "untouched": self.untouched,
            "plain_code": self.plain_code,
            "not_followed": self.not_followed,
        }

    def to_json(self) -> str:
        """Return `as_dict` as JSON text."""
        return json.dumps(self.as_dict(), indent=2)

    def to_svg(self) -> str:
        """Return the tree as an SVG picture."""
        return svg_of_lines(self.lines())

    def lines(self, detail: bool = True) -> list[str]:
        """Return the lines of the tree. Headings start with ``#``, and equal modules are listed once.

        Args:
            detail: whether to list parameters, outputs and collectives of each module.
        """
        size = 1
        for n in self.mesh.values():
            size *= n
        shape = " x ".join(f"{name}={n}" for name, n in self.mesh.items())
        lines = [f"# {shape}: rank {self.rank} of {size}"]
        for module, count in self._repeated():
            lines.extend(self._lines_of(module, count, detail))
        outside = [row for row in self.rows() if row["module"] not in self._names()]
        if outside and detail:
            lines.append("outside of modules")
            lines.extend(f"    {_collective_text(row)}" for row in outside)
        lines.append("# totals")
        lines.append(
            f"parameters and buffers: {format_bytes(self.model.local_bytes)} on this rank of "
            f"{format_bytes(self.model.bytes)}"
        )
        for direction in ("forward", "backward"):
            if direction == "backward" and not self.differentiated:
                continue
            chosen = [c for c in self.collectives if c.direction == direction]
            moved = format_bytes(sum(c.bytes for c in chosen))
            sent = format_bytes(sum(c.wire_bytes for c in chosen))
            lines.append(f"{direction}: {len(chosen)} collectives of {moved}, for which the rank sends {sent}")
        for key, near in self.unmatched.items():
            lines.append(f"! the plan's {key!r} matches no module{'; ' + near if near else ''}")
        if self.untouched:
            lines.append(f"! not in the plan, whole on every rank: {_listed(self.untouched)}")
        lines += [f"! plain code: {finding}" for finding in self.plain_code]
        if self.not_followed:
            lines.append(f"! plain code that could not be followed: {_listed(list(self.not_followed))}")
        return lines

    def __str__(self) -> str:
        return "\n".join(line.removeprefix("# ") for line in self.lines())

    __repr__ = __str__

    def _names(self) -> set[str]:
        return {_name(m) for m in self.model.modules}

    def _of(self, module: ModuleDescription) -> list[dict[str, Any]]:
        if not self._by_module:
            for row in self.rows():
                self._by_module.setdefault(row["module"], []).append(row)
        return self._by_module.get(_name(module), [])

    def _repeated(self) -> Iterator[tuple[ModuleDescription, int]]:
        """Yield modules in order, each with the number of equal siblings. Siblings are equal if their submodules are
        equal too. All but the first of equal siblings are skipped."""
        modules = self.model.modules
        below: dict[str, list[ModuleDescription]] = {}
        for m in modules:
            parts = m.path.split(".") if m.path else []
            for n in range(len(parts) + 1):
                below.setdefault(".".join(parts[:n]), []).append(m)
        looks: dict[str, tuple] = {}

        def look(path: str) -> tuple:
            if path not in looks:
                looks[path] = tuple((m.path[len(path) :], tuple(self._content(m))) for m in below[path])
            return looks[path]

        skipped: set[str] = set()
        by_parent: dict[str, list[str]] = {}
        for m in modules:
            if m.path:
                by_parent.setdefault(m.path.rpartition(".")[0], []).append(m.path)
        counts: dict[str, int] = {}
        for siblings in by_parent.values():
            first = None
            for path in siblings:
                if first is not None and path.rpartition(".")[2].isdigit() and look(path) == look(first):
                    counts[first] += 1
                    skipped.add(path)
                else:
                    first = path
                    counts[first] = 1
        for m in modules:
            parts = m.path.split(".")
            if not any(".".join(parts[: n + 1]) in skipped for n in range(len(parts))):
                yield m, counts.get(m.path, 1)

    def _content(self, module: ModuleDescription) -> list[str]:
        lines = [module.kind, *module.styles, *(x.text for x in module.tensors)]
        lines += sorted({str(y) for y in self.outputs.get(module.path, [])})
        return lines + [_collective_text(row) for row in self._of(module)]

    def _lines_of(self, module: ModuleDescription, count: int, detail: bool) -> Iterator[str]:
        indent = "  " * (module.path.count(".") + 1 if module.path else 0)
        name = module.path.rpartition(".")[2] or "(the model)"
        if count > 1:
            name += f" .. {int(name) + count - 1}, each"
        styles = f": {'; '.join(module.styles)}" if module.styles else ""
        yield f"{indent}{name} {module.kind}{styles}"
        if not detail:
            return
        for x in module.tensors:
            size = "shared" if x.shared else format_bytes(x.local_bytes)
            yield f"{indent}    {x.text}: {size}"
        if module.styles or module.tensors:
            for text in dict.fromkeys(str(y) for y in self.outputs.get(module.path, [])):
                yield f"{indent}    gives {text}"
        for row in self._of(module):
            yield f"{indent}    {_collective_text(row)}"


def _name(module: ModuleDescription) -> str:
    return module.path or module.kind


def _collective_text(row: dict[str, Any]) -> str:
    count = f"{row['count']} x " if row["count"] > 1 else ""
    each = row["bytes"] // row["count"]
    return f"{row['direction']}: {count}{row['kind']} over {row['mesh_dim']}, {format_bytes(each)}"


def _listed(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(name or "(the model)" for name in names[:most]) + more


def explain(
    model: Any,
    mesh: MeshLike,
    plan: Any,
    *inputs: Any,
    loss: Callable[[Any], Any] | None = None,
    backward: bool = True,
    rank: int = 0,
    **kwargs: Any,
) -> Explanation:
    """Show the effect of a plan on a model: the style, shards and bytes of each module, and the collectives of each
    call. It applies the plan and runs a training step on one rank of a simulated mesh. No process group is created,
    nothing is sent, and the model is not changed.

    On torch the model is copied to the meta device, or may be there already, and takes no memory. MindSpore cannot
    compute on its meta device, so there the copy computes on the CPU, with real tensors.

    Args:
        model: module of the selected framework, without a plan.
        mesh: a `DeviceMesh`, whose shape and names are used; a number of ranks; a shape; or sizes by name, such as
            ``{"dp": 64, "tp": 8}``.
        plan: as for `parallelize_module`, which gets the dimension ``"tp"`` of a mesh with several dimensions; or a
            function ``plan(model, mesh)`` that applies styles as a program does, for example with `fully_shard`.
        inputs, kwargs: arguments of one rank's call of the model; their values are ignored.
        loss: function ``loss(output)`` that returns a scalar; by default the sum of the local output.
        backward: whether to differentiate.
        rank: the rank to describe. With uneven sizes rank 0 has the largest shards.

    Returns:
        An `Explanation`: ``print`` shows it, ``to_json()`` and ``to_svg()`` return it as JSON and SVG.

    Raises:
        TypeError, ValueError: for all that `parallelize_module` refuses.
        DryStepError: if the model needs values of tensors.

    Example:
        >>> import torch
        >>> from hyper_parallel import ColwiseParallel, RowwiseParallel, explain
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))
        >>> plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        >>> explanation = explain(model, 512, plan, torch.ones(2, 4, requires_grad=True))
        >>> [(c.module, c.direction, c.kind, c.bytes) for c in explanation.collectives]
        [('2', 'forward', 'all_reduce', 32), ('0', 'backward', 'all_reduce', 32)]
    """
    step = DryStep(model, mesh, plan, rank)
    outputs: dict[str, list[Output]] = {}

    def tell(path: str, args: Any, output: Any) -> None:
        first = next(iter(tensors_in(output, step.platform)), None)
        if first is not None:
            outputs.setdefault(path, []).append(_output_of(first, step.platform))

    collectives = step.run(*inputs, loss=loss, backward=backward, tell=tell, **kwargs)
    # A separate run, because a followed program takes a slower path through its styles.
    step.run(*inputs, loss=loss, backward=backward, prove=True, **kwargs)
    assert step.plain_code is not None
    mesh_dims = step.mesh.mesh_dim_names or ()
    return Explanation(
        mesh=dict(zip(mesh_dims, step.mesh.shape, strict=True)),
        rank=rank,
        model=describe_on(step.model, step.platform),
        outputs=outputs,
        collectives=collectives,
        setup=step.setup,
        unmatched=step.unmatched,
        differentiated=backward,
        plain_code=step.plain_code.lines(),
        not_followed=step.plain_code.unknown,
    )


def _output_of(x: Any, platform: Any) -> Output:
    layout = getattr(x, "_layout", None)
    local = tuple(platform.shape_of(x))
    if layout is None:
        return Output(local)
    return Output(local, tuple(layout.shape), tuple(map(repr, layout.placements)))
