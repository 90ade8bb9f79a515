"""`dry_run`: memory, communication and time of a training step of one rank, on a simulated mesh."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from hyper_parallel.core.data_parallel.fully_shard import fully_shard
from hyper_parallel.core.data_parallel.options import MixedPrecisionPolicy
from hyper_parallel.core.data_parallel.replicate import replicate
from hyper_parallel.core.tensor_parallel.styles.base import ParallelStyle
from hyper_parallel.core.tensor_parallel.styles.experts import ExpertParallel
from hyper_parallel.debug.collective import Collective
from hyper_parallel.debug.description import describe_on
from hyper_parallel.debug.text import TERMINAL, format_bytes, format_seconds, format_table
from hyper_parallel.planning.layers import matching, module_at, repeated_layers
from hyper_parallel.planning.machines import Machine, machine_of
from hyper_parallel.planning.sparse import spread_experts
from hyper_parallel.planning.step import DryStep, MeshLike, data_mesh, mesh_of

__all__ = ["DryRun", "Memory", "Traffic", "dry_run"]


@dataclass
class Memory:
    """Bytes of one rank. A number is None if the framework does not report its operations (MindSpore).

    Attributes:
        parameters, gradients, buffers: bytes of this rank's shards.
        optimizer: bytes of its state; None if the framework has no optimizer of that name.
        activations: tensors that live between forward and backward, including the output and parameters that stay
            gathered.
        gathered: the largest unsharded unit of `fully_shard`.
        peak: sum of parameters, buffers, optimizer state, and the maximum of other live tensors in a step, including
            gradients.
    """

    parameters: int
    gradients: int
    buffers: int
    optimizer: int | None
    activations: int | None
    gathered: int
    peak: int | None


@dataclass
class Traffic:
    """The collectives of a step over one mesh dimension.

    Attributes:
        ranks: number of ranks that communicate.
        within_node: whether these ranks are in one node of the machine.
        counts: number of collectives of each kind.
        bytes: bytes of the input tensors.
        wire_bytes: bytes that the rank sends, from `bytes_on_the_wire`.
        seconds: minimum duration, one collective after the other.
    """

    ranks: int
    within_node: bool
    counts: dict[str, int] = field(default_factory=dict)
    bytes: int = 0
    wire_bytes: int = 0
    seconds: float = 0.0


@dataclass
class DryRun:
    """Result of `dry_run`. ``str`` and ``print`` show it.

    Attributes:
        mesh: sizes by name.
        machine: name of the machine.
        memory: memory of the rank.
        memory_limit: memory of the machine, in bytes.
        traffic: traffic by mesh dimension.
        flops: floating point operations of the rank in a step; None if unknown.
        compute_seconds: minimum duration of its operations, one after the other. Each lasts as long as its arithmetic
            or its memory traffic, whichever takes longer (Williams et al. 2009, "Roofline"). None if unknown.
        unmatched: keys of the plan that match no module.
        collectives: collectives of the step.
        timelines: `Usage.timeline` of forward, and of backward.
    """

    mesh: dict[str, int]
    machine: str
    memory: Memory
    memory_limit: float
    traffic: dict[str, Traffic]
    flops: int | None
    compute_seconds: float | None
    unmatched: dict[str, str]
    collectives: list[Collective] = field(repr=False, default_factory=list)
    #: `Usage.timeline` of forward and of backward; empty if unknown.
    timelines: tuple[list[tuple[int, int]], list[tuple[int, int]]] = field(repr=False, default=((), ()))  # type: ignore[assignment]

    @property
    def communication_seconds(self) -> float:
        """Return the seconds of all collectives, one after the other."""
        return sum(traffic.seconds for traffic in self.traffic.values())

    @property
    def seconds(self) -> float | None:
        """Return the seconds of a step without any overlap."""
        return None if self.compute_seconds is None else self.compute_seconds + self.communication_seconds

    @property
    def seconds_overlapped(self) -> float | None:
        """Return the seconds of a step in which communication over all dimensions but ``"tp"`` overlaps with
        computation."""
        if self.compute_seconds is None:
            return None
        inside = sum(t.seconds for name, t in self.traffic.items() if name == "tp")
        return max(self.compute_seconds + inside, self.communication_seconds - inside)

    @property
    def fits(self) -> bool | None:
        """Return whether the peak is within the memory of the machine."""
        return None if self.memory.peak is None else self.memory.peak <= self.memory_limit

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {
            "mesh": self.mesh,
            "machine": self.machine,
            "memory": asdict(self.memory),
            "memory_limit": self.memory_limit,
            "fits": self.fits,
            "traffic": {name: asdict(traffic) for name, traffic in self.traffic.items()},
            "flops": self.flops,
            "compute_seconds": self.compute_seconds,
            "communication_seconds": self.communication_seconds,
            "seconds": self.seconds,
            "seconds_overlapped": self.seconds_overlapped,
            "unmatched": self.unmatched,
        }

    def to_json(self) -> str:
        """Return `as_dict` as JSON text."""
        return json.dumps(self.as_dict(), indent=2)

    def __str__(self) -> str:
        size = math.prod(self.mesh.values())
        shape = " x ".join(f"{name}={n}" for name, n in self.mesh.items())
        memory = [(name, "?" if n is None else format_bytes(n)) for name, n in asdict(self.memory).items()]
        fits = {None: "", True: "  (fits)", False: "  (does not fit)"}[self.fits]
        memory.append(("the machine has", format_bytes(self.memory_limit) + fits))
        traffic = [
            (
                f"{name} ({t.ranks} ranks, {'in a node' if t.within_node else 'across nodes'})",
                ", ".join(f"{n} {kind}" for kind, n in t.counts.items()) or "-",
                format_bytes(t.bytes),
                format_bytes(t.wire_bytes),
                format_seconds(t.seconds),
            )
            for name, t in self.traffic.items()
        ]
        lines = [f"{shape}: one of {size} ranks, {self.machine}", "", format_table(("memory", ""), memory, right=[1])]
        head = ("communication over", "collectives", "bytes", "sent", "at least")
        lines += ["", format_table(head, traffic, right=(2, 3, 4), width=TERMINAL), ""]
        if self.seconds is None:
            lines.append("time: unknown, because the framework does not report its operations")
        else:
            assert self.flops is not None
            time = (
                f"time: at least {format_seconds(self.seconds_overlapped)} a step with all but tp hidden, "
                f"{format_seconds(self.seconds)} with nothing hidden; {format_seconds(self.compute_seconds)} of it to "
                f"compute {self.flops / 1e12:.4g} TFLOP"
            )
            lines.append(textwrap.fill(time, TERMINAL))
        lines += [f"! the plan's {k!r} matches no module{'; ' + v if v else ''}" for k, v in self.unmatched.items()]
        return "\n".join(lines)

    __repr__ = __str__


def dry_run(
    model: Any,
    mesh: MeshLike,
    plan: Any,
    *inputs: Any,
    machine: Machine | str = "H100",
    optimizer: str = "AdamW",
    recompute: str | bool = False,
    data_parallel: str | None = "fully_shard",
    mixed_precision: bool = False,
    experts: Mapping[str, ExpertParallel] | None = None,
    loss: Callable[[Any], Any] | None = None,
    rank: int = 0,
    **kwargs: Any,
) -> DryRun:
    """Estimate memory, communication and time of a training step of one rank, without process groups, on tensors
    without data.

    MindSpore cannot compute on its meta device, so there the model computes on the CPU. Then activations, peak and time
    are unknown.

    Args:
        model, mesh, plan, inputs, loss, rank, kwargs: as for `explain`.
        machine: name in `MACHINES`, or a `Machine`.
        optimizer: name of the framework's optimizer, which has its defaults.
        recompute: modules that recompute their forward in backward (activation checkpointing): a path with ``*`` for a
            segment, or True for the repeated layers of the model.
        data_parallel: ``"fully_shard"`` or ``"replicate"``, applied after the plan over the mesh dimension ``"dp"``,
            joined with ``"cp"`` if that exists. `fully_shard` is applied to the repeated layers and to the model,
            `replicate` to the model. Nothing is applied for None, and for a plan that is a function.
        mixed_precision: whether `fully_shard` uses bfloat16 parameters in forward and backward, and float32 reductions.
        experts: path of expert modules, with ``*`` for a segment -> their style. It is applied over the mesh dimension
            ``"ep"``, and over ``"tp"`` too if the style has it as ``tp_dim`` and does not shard ``inside`` experts.
            Data parallelism then uses ``"dp"`` for the experts, and both dimensions for all other parameters.

    Raises:
        ValueError: for an unknown machine, and all that the plan's functions refuse.
        DryStepError: if the model needs values of tensors.

    Example:
        >>> import torch
        >>> from hyper_parallel import ColwiseParallel, RowwiseParallel
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8, bias=False), torch.nn.Linear(8, 4, bias=False))
        >>> plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
        >>> found = dry_run(model, {"dp": 64, "tp": 2}, plan, torch.ones(2, 4), data_parallel=None)
        >>> found.memory.parameters, found.memory.gradients, found.memory.optimizer
        (128, 128, 264)
    """
    named = machine_of(machine)
    if data_parallel not in (None, "fully_shard", "replicate"):
        raise ValueError(f"data_parallel takes 'fully_shard', 'replicate' or None, got {data_parallel!r}")
    if callable(plan) and not isinstance(plan, ParallelStyle):
        data_parallel = None

    def change(model: Any, device_mesh: Any) -> None:
        platform = device_mesh.platform
        _, layers = repeated_layers(model, platform)
        apart = spread_experts(model, device_mesh, experts) if experts else []
        if recompute:
            for path in _matching(recompute, layers, model, platform):
                _recompute(module_at(model, path, platform), platform)
        names = device_mesh.mesh_dim_names or ()
        if data_parallel is None or "dp" not in names:
            return
        over = data_mesh(device_mesh)
        units_apart = device_mesh["dp"].size() > 1 or mixed_precision
        if experts:
            over = device_mesh["dp", "ep"]._flatten("dp_ep") if units_apart else device_mesh["ep"]
        if over.size() == 1 and not mixed_precision:
            return
        if data_parallel == "replicate":
            for module in apart if units_apart else ():
                replicate(module, device_mesh=device_mesh["dp"])
            replicate(model, device_mesh=over)
            return
        dtypes = platform.dtypes
        policy = MixedPrecisionPolicy()
        if mixed_precision:
            policy = MixedPrecisionPolicy(param_dtype=dtypes["bfloat16"], reduce_dtype=dtypes["float32"])
        for module in apart if units_apart else ():
            fully_shard(module, mesh=device_mesh["dp"], mp_policy=policy)
        for path in layers:
            fully_shard(module_at(model, path, platform), mesh=over, mp_policy=policy)
        fully_shard(model, mesh=over, mp_policy=policy)

    step = DryStep(model, mesh, plan, rank, change)
    return measure(step, named, optimizer, loss, inputs, kwargs)


def measure(
    step: DryStep,
    machine: Machine,
    optimizer: str,
    loss: Callable[[Any], Any] | None,
    inputs: tuple,
    kwargs: dict[str, Any],
) -> DryRun:
    """Run a step and sum up its costs."""
    platform, usage = step.platform, step.platform.usage()
    between = forward_ends = 0
    if usage is None:
        collectives, used, most = step.run(*inputs, loss=loss, **kwargs), None, 0
    else:
        with usage as used:

            def after_forward() -> None:
                nonlocal between, forward_ends
                between, forward_ends = used.live, len(used.timeline)

            collectives = step.run(*inputs, loss=loss, after_forward=after_forward, **kwargs)
            most = used.peak
    described = describe_on(step.model, platform)
    tensors = [x for module in described.modules for x in module.tensors]
    parameters = sum(x.local_bytes for x in tensors if x.kind == "parameter")
    gradients = sum(x.local_bytes for x in tensors if x.trained)
    buffers = sum(x.local_bytes for x in tensors if x.kind == "buffer")
    state = step.optimizer_bytes(optimizer)
    shape, names = mesh_of(step.mesh)
    traffic = {
        name: Traffic(n, _within(shape, i, machine)) for i, (name, n) in enumerate(zip(names, shape, strict=True))
    }
    gathered = 0
    for c in collectives:
        of_dim = traffic.setdefault(c.mesh_dim, Traffic(c.ranks, False))
        of_dim.counts[c.kind] = of_dim.counts.get(c.kind, 0) + 1
        of_dim.bytes += c.bytes
        of_dim.wire_bytes += c.wire_bytes
        of_dim.seconds += machine.seconds_of(c, of_dim.within_node)
        if c.kind == "all_gather" and c.mesh_dim != "tp":
            gathered = max(gathered, c.bytes * c.ranks)
    memory = Memory(
        parameters=parameters,
        gradients=gradients,
        buffers=buffers,
        optimizer=state,
        activations=None if used is None else between,
        gathered=gathered,
        peak=None if used is None or state is None else parameters + buffers + state + most,
    )
    return DryRun(
        mesh=dict(zip(names, shape, strict=True)),
        machine=machine.name,
        memory=memory,
        memory_limit=machine.memory,
        traffic=traffic,
        flops=None if used is None else sum(flops * n for (_, flops, _, _), n in used.operations.items()),
        compute_seconds=None
        if used is None
        else sum(
            n * max(flops / machine.flops_of(size), moved / machine.memory_bandwidth)
            for (_, flops, moved, size), n in used.operations.items()
        ),
        unmatched=step.unmatched,
        collectives=collectives,
        timelines=([], []) if used is None else (used.timeline[:forward_ends], used.timeline[forward_ends:]),
    )


def _within(shape: tuple[int, ...], dim: int, machine: Machine) -> bool:
    """Return whether the ranks along a mesh dimension are in one node, assuming that ranks are numbered node by
    node."""
    return math.prod(shape[dim:]) <= machine.devices


def _matching(recompute: str | bool, layers: list[str], model: Any, platform: Any) -> list[str]:
    if recompute is True:
        found = layers
    else:
        found = matching(str(recompute), model, platform)
    if not found:
        raise ValueError(
            f"recompute={recompute!r} matches no module: pass a path such as 'model.layers.*'"
            if recompute is not True
            else "recompute=True: the model has no list of equal layers: pass a path such as 'model.layers.*'"
        )
    return found


def _recompute(module: Any, platform: Any) -> None:
    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda module, *args, **kwargs: platform.recompute(forward, module, *args, **kwargs)

    platform.replace_forward(module, make)
