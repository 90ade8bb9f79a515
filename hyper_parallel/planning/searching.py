"""`search`: compare configurations of parallelism for a model by dry runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any

from hyper_parallel.core.tensor_parallel.styles.context import ContextParallel
from hyper_parallel.core.trees import map_tensors, tensors_in
from hyper_parallel.debug.svg import COLOURS, Svg
from hyper_parallel.debug.text import TERMINAL, format_bytes, format_seconds, format_table
from hyper_parallel.planning.estimate import DryRun, Memory, dry_run
from hyper_parallel.planning.layers import cut_to, repeated_layers
from hyper_parallel.planning.machines import Machine, machine_of
from hyper_parallel.planning.sparse import Experts, lies_over_tp, sizes_for_experts
from hyper_parallel.planning.step import apply_plan
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.dry import dry_world

__all__ = ["Candidate", "SearchResult", "search"]


@dataclass
class Candidate:
    """One configuration of parallelism for the model.

    Attributes:
        dp, tp: number of ranks of data and of tensor parallelism.
        plan: name of the plan.
        recompute: whether the layers compute their forward again in backward.
        run: dry run of the configuration; None if it is not possible.
        error: the reason why it is not possible, or an empty string.
        ep: number of ranks that share the experts; 1 without experts.
        cp: number of ranks that share a sequence.
    """

    dp: int
    tp: int
    plan: str
    recompute: bool
    run: DryRun | None = None
    error: str = ""
    ep: int = 1
    cp: int = 1

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {
            "dp": self.dp,
            "tp": self.tp,
            "ep": self.ep,
            "cp": self.cp,
            "plan": self.plan,
            "recompute": self.recompute,
            "run": None if self.run is None else self.run.as_dict(),
            "error": self.error,
        }


@dataclass
class SearchResult:
    """Result of `search`. ``str`` and ``print`` show the table.

    Attributes:
        candidates: configurations, the best first: those that fit, by time; then those that do not fit, by memory; then
            impossible ones.
        memory_limit: memory limit in bytes.
    """

    candidates: list[Candidate]
    memory_limit: float
    machine: str = field(default="")

    @property
    def best(self) -> Candidate | None:
        """Return the fastest configuration that fits; None if none fits."""
        first = self.candidates[0] if self.candidates else None
        return first if first is not None and _fits(first, self.memory_limit) else None

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return {
            "machine": self.machine,
            "memory_limit": self.memory_limit,
            "candidates": [candidate.as_dict() for candidate in self.candidates],
        }

    def to_json(self) -> str:
        """Return `as_dict` as JSON text."""
        return json.dumps(self.as_dict(), indent=2)

    def to_svg(self) -> str:
        """Return a plot of time over memory as SVG, with a dot for each configuration, and the limit of memory."""
        return _plot(self)

    def __str__(self) -> str:
        rows = []
        shown = ["dp", "tp", *(name for name in ("ep", "cp") if any(getattr(c, name) > 1 for c in self.candidates))]
        for c in self.candidates:
            sizes = [getattr(c, name) for name in shown]
            if c.run is None:
                rows.append((*sizes, c.plan, _yes(c.recompute), "-", "-", "-", f"not possible: {c.error}"[:90]))
                continue
            peak = c.run.memory.peak
            rows.append(
                (
                    *(*sizes, c.plan, _yes(c.recompute)),
                    "?" if peak is None else format_bytes(peak),
                    format_seconds(c.run.seconds_overlapped),
                    format_seconds(c.run.seconds),
                    "" if _fits(c, self.memory_limit) else "does not fit",
                )
            )
        head = (*shown, "plan", "recompute", "peak", "hidden", "not hidden", "")
        right = (*range(len(shown)), *range(len(shown) + 2, len(shown) + 5))
        return format_table(head, rows, right=right, width=TERMINAL)

    __repr__ = __str__


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _fits(candidate: Candidate, limit: float) -> bool:
    peak = None if candidate.run is None else candidate.run.memory.peak
    return peak is not None and peak <= limit


def search(
    model: Any,
    ranks: int,
    plans: Mapping[str, Any],
    *batch: Any,
    machine: Machine | str = "H100",
    memory: float | None = None,
    tensor_parallel: Sequence[int] | None = None,
    experts: Experts | None = None,
    expert_parallel: Sequence[int] | None = None,
    sequences: Mapping[str, ContextParallel] | None = None,
    context_parallel: Sequence[int] | None = None,
    recompute: Sequence[bool] = (False, True),
    **options: Any,
) -> SearchResult:
    """Return the best configurations to distribute a model over ``ranks`` ranks, found by dry runs of all
    configurations.

    For a model with a list of equal layers, dry runs use three and four layers. Their difference is added for each
    further layer. That is exact for parameters, gradients, optimizer, collectives and operations, which repeat.

    Args:
        model: as for `explain`.
        ranks: total number of ranks: ``dp * tp`` or ``dp * cp * tp`` in each configuration.
        plans: name -> plan for `parallelize_module`, such as one plan with sequence parallelism and one without. With
            ``tp=1`` no plan is applied.
        batch: tensors of all ranks together. Each is sharded along dimension 0 over dp, and along dimension 1 over cp.
            The numbers of ranks must divide these dimensions.
        machine: see `dry_run`.
        memory: maximum bytes of a rank; None is the memory of the machine.
        tensor_parallel: sizes of tp to try; None tries all that divide ``ranks`` and fit into a node.
        experts: path of expert modules -> style, as for `dry_run`.
        expert_parallel: numbers of ranks that share the experts, to try. None tries all that divide the ranks, up to
            the number of experts. If the style has ``tp_dim`` and does not shard ``inside`` experts, the ranks of
            tensor parallelism count among them.
        sequences: path of attention modules -> `ContextParallel`, which is applied if sequences are sharded. It cannot
            be combined with ``experts``.
        context_parallel: numbers of ranks that share a sequence, to try. None tries all that divide the ranks and fit
            into a node, including 1.
        recompute: whether to try without and with recomputation.
        options: further arguments of `dry_run`: ``optimizer``, ``data_parallel``, ``mixed_precision``, ``loss``.

    Returns:
        A `SearchResult`, whose first configuration is the best.

    Raises:
        ValueError: if there is nothing to try.
    """
    named = machine_of(machine)
    limit = named.memory if memory is None else float(memory)
    sizes = tensor_parallel or [n for n in range(1, named.devices + 1) if ranks % n == 0]
    wrong = [n for n in sizes if n < 1 or ranks % n]
    if wrong or not plans:
        raise ValueError(
            f"tensor_parallel={wrong} does not divide {ranks} ranks" if wrong else "search needs at least one plan"
        )
    with dry_world(ranks) as platform:
        parent, layers = repeated_layers(model, platform)
        count = len(layers)
        models = [(count, model)]
        if count > 4:
            # From three layers on, each further layer adds the same: three include the first, the last and the
            # prefetched layer.
            models = [(n, cut_to(model, parent, n, platform)) for n in (3, 4)]
    if experts and sequences:
        raise ValueError("search takes either experts or sequences, because dry_run has no mesh with both dimensions")
    found = []
    for tp in sizes:
        cuts = context_parallel or [n for n in range(1, named.devices + 1) if ranks // tp % n == 0]
        ways = sizes_for_experts(models[0][1], experts, expert_parallel, ranks, tp, platform)
        shared = tp if experts and lies_over_tp(experts) else 1
        named_plans = plans.items() if tp > 1 else [("-", None)]
        for ep, cp, (name, plan), again in product(ways, cuts if sequences else [1], named_plans, recompute):
            dp = ranks // tp // cp
            found.append(Candidate(dp, tp, name, again, ep=ep, cp=cp))
            own = ep // shared  # of each rank of tensor parallelism
            mesh = {"dp": dp // own, "ep": own, "tp": tp} if experts else {"dp": dp, "tp": tp}
            try:
                if dp % own:
                    raise ValueError(f"{dp} data-parallel ranks do not divide into groups of {own} for experts")
                if ranks // tp % cp:
                    raise ValueError(f"{ranks // tp} ranks do not divide into groups of {cp} for sequences")
                if sequences and cp > 1:
                    mesh, plan = {"dp": dp, "cp": cp, "tp": tp}, _with_sequences(plan, sequences)
                runs = [
                    dry_run(
                        cut,
                        mesh,
                        plan,
                        *_share(batch, dp, cp),
                        machine=named,
                        recompute=f"{parent}.*" if again and parent else again,
                        experts=experts,
                        **options,
                    )
                    for _, cut in models
                ]
            except (ValueError, TypeError, RuntimeError) as error:
                found[-1].error = str(error).splitlines()[0]
            else:
                found[-1].run = runs[0] if len(runs) == 1 else _continued(runs[0], runs[1], count - 4)

    def order(c: Candidate) -> tuple:
        if c.run is None:
            return (2, 0.0)
        if _fits(c, limit) or c.run.memory.peak is None:
            return (0, c.run.seconds if c.run.seconds is not None else c.run.communication_seconds)
        return (1, float(c.run.memory.peak))

    return SearchResult(sorted(found, key=order), limit, named.name)


def _with_sequences(plan: Any, sequences: Mapping[str, ContextParallel]) -> Any:
    """Return the plan with the styles for sharded sequences added. One path may have a tensor-parallel style and a
    style for sequences."""
    if plan is not None and not isinstance(plan, Mapping):
        raise ValueError("sequences cannot be searched with a plan that is a function: pass a dict of styles by path")
    styles = dict(plan or {})
    if styles.keys() & sequences.keys():
        return lambda model, mesh: apply_plan(apply_plan(model, mesh, styles), mesh, sequences)
    return {**styles, **sequences}


def _share(batch: tuple, dp: int, cp: int) -> Any:
    """Return one rank's part of a batch."""
    platform = get_platform()
    parts = {0: dp, 1: cp} if cp > 1 else {0: dp}
    for dim, ranks in parts.items():
        for x in tensors_in(batch, platform):
            if platform.shape_of(x)[dim] % ranks:
                raise ValueError(
                    f"dimension {dim} of a batch of shape {tuple(platform.shape_of(x))} is not divisible by "
                    f"{('dp', 'cp')[dim]}={ranks}"
                )

    def own(x: Any) -> Any:
        for dim, ranks in parts.items():
            x = platform.narrow(x, dim, 0, platform.shape_of(x)[dim] // ranks)
        return x

    return map_tensors(batch, own, platform, lambda x: x)


def _continued(three: DryRun, four: DryRun, further: int) -> DryRun:
    """Return the extrapolated dry run with ``further`` more layers. Each layer adds the difference between ``four`` and
    ``three``."""

    def more(a: Any, b: Any) -> Any:
        return None if a is None or b is None else b + further * (b - a)

    before, after = asdict(three.memory), asdict(four.memory)
    memory = Memory(**{name: more(before[name], after[name]) for name in before})
    memory.gathered = four.memory.gathered
    if memory.peak is not None and memory.optimizer is not None:
        held = memory.parameters + memory.buffers + memory.optimizer
        memory.peak = held + _continued_peak(three, four, further)
    traffic = {}
    for name, t in four.traffic.items():
        s = three.traffic[name]
        counts = {kind: more(s.counts.get(kind, 0), n) for kind, n in t.counts.items()}
        traffic[name] = replace(
            t,
            counts=counts,
            bytes=more(s.bytes, t.bytes),
            wire_bytes=more(s.wire_bytes, t.wire_bytes),
            seconds=more(s.seconds, t.seconds),
        )
    return replace(
        four,
        memory=memory,
        traffic=traffic,
        flops=more(three.flops, four.flops),
        compute_seconds=more(three.compute_seconds, four.compute_seconds),
    )


def _continued_peak(three: DryRun, four: DryRun, further: int) -> int:
    """Return the maximum of live bytes in a step with ``further`` more layers.

    The last events of forward are the same with three and with four layers. So are the first and the last events of
    backward. At these events, four layers have the activations, or the gradients, of one more layer. Each further layer
    adds the same bytes. In the layers between, fewer bytes are live than in the first or in the last layer.
    """
    peak = max(live for timeline in four.timelines for _, live in timeline)
    (forward, backward), (deeper_forward, deeper_backward) = three.timelines, four.timelines
    for shallow, deep in (
        (forward[::-1], deeper_forward[::-1]),
        (backward, deeper_backward),
        (backward[::-1], deeper_backward[::-1]),
    ):
        alike = 0
        for (what, _), (same, _) in zip(shallow, deep, strict=False):
            if what != same:
                break
            alike += 1
        # Operations of the head may look like those of a layer, so the last of the equal layers is skipped.
        for (_, less), (_, more) in zip(shallow[: max(0, alike - len(deep) + len(shallow))], deep, strict=False):
            peak = max(peak, more + further * (more - less))
    return peak


def _plot(result: SearchResult) -> str:
    picture, left, top, width, height = Svg(), 70.0, 40.0, 520.0, 300.0
    known = [c for c in result.candidates if c.run is not None and c.run.seconds is not None and c.run.memory.peak]
    picture.text(left, 24, f"{result.machine}: seconds a step over peak memory, dp x tp", bold=True)
    most = max([result.memory_limit, *(c.run.memory.peak or 0 for c in known if c.run)]) * 1.1
    slowest = max([c.run.seconds or 0.0 for c in known if c.run], default=1.0) * 1.1
    picture.box(left, top, width, height, "#fafafa")
    at = left + width * result.memory_limit / most
    picture.box(left, top, at - left, height, "#eaf4ea")
    picture.text(at + 4, top + 14, f"limit {format_bytes(result.memory_limit)}", colour="#070")
    plans = list(dict.fromkeys((c.plan, c.recompute) for c in known))
    dots = []
    for c in known:
        assert c.run is not None
        colour = COLOURS[plans.index((c.plan, c.recompute)) % len(COLOURS)]
        x = left + width * (c.run.memory.peak or 0) / most
        y = top + height - height * (c.run.seconds or 0.0) / slowest
        dots.append((x, y, colour, f"{c.dp}x{c.tp}"))
    picture.dots(dots)
    picture.text(left, top + height + 18, "0")
    picture.text(left + width - 60, top + height + 18, format_bytes(most))
    picture.text(4, top + 10, format_seconds(slowest))
    for i, (plan, again) in enumerate(plans):
        y = top + height + 40 + 18 * i
        picture.box(left, y - 9, 10, 10, COLOURS[i % len(COLOURS)])
        picture.text(left + 18, y, f"{'no plan' if plan == '-' else plan}{', recomputing' if again else ''}")
    return str(picture)
