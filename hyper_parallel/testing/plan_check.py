"""`check_plan`: compare a model under its plan, on local ranks, with the same model on one device."""

from __future__ import annotations

import copy
import json
import math
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from hyper_parallel.core.dtensor.tensor import DTensor
from hyper_parallel.core.mesh.device_mesh import DeviceMesh
from hyper_parallel.core.plain_code.api import check_plain_code
from hyper_parallel.core.plain_code.contexts import looking
from hyper_parallel.core.plain_code.first_call import without_first_calls
from hyper_parallel.core.trees import map_tensors, tensors_in
from hyper_parallel.debug.comm_trace import CommTrace
from hyper_parallel.debug.module_scopes import ModuleScopes
from hyper_parallel.debug.text import format_table
from hyper_parallel.planning.step import apply_plan, mesh_of
from hyper_parallel.platform import Platform, get_platform
from hyper_parallel.testing.pool import WorkerPool

__all__ = ["PlanCheck", "check_plan", "compare_on_ranks", "verdict_of"]


@dataclass
class PlanCheck:
    """Result of `check_plan`; ``str`` and ``print`` show it. A result is true if the plan is right.

    Attributes:
        ranks: number of ranks.
        differences: ``"output"``, ``"loss"``, ``"gradient of PATH"`` -> the largest difference from the single device,
            relative to the single device's largest number; infinity for a missing value or another shape.
        tolerance: largest difference that counts as equal.
        first_module: first module, in the order of calls, whose output differs. None where no output differs, and where
            the output cannot be compared, because it is a plain shard of unknown layout.
        communicates: numbers of collectives in a step, by kind.
        not_compared: for a wrong plan, earlier modules whose outputs are such plain shards.
        plain_code: findings in the code between styled modules, a line each; see `check_plain_code`. A plan with such
            findings is wrong, even if this sample does not show it.
        not_followed: operations in that code that the check does not know, by name -> number of calls.
    """

    ranks: int
    differences: dict[str, float]
    tolerance: float
    first_module: str | None
    communicates: dict[str, int] = field(default_factory=dict)
    not_compared: list[str] = field(default_factory=list)
    plain_code: list[str] = field(default_factory=list)
    not_followed: dict[str, int] = field(default_factory=dict)

    @property
    def wrong(self) -> dict[str, float]:
        """Entries of `differences` above the tolerance."""
        return {name: d for name, d in self.differences.items() if not d <= self.tolerance}

    def __bool__(self) -> bool:
        return not self.wrong and not self.plain_code

    def as_dict(self) -> dict[str, Any]:
        """Return the report as a dict for JSON."""
        return {**asdict(self), "right": bool(self), "wrong": self.wrong}

    def to_json(self) -> str:
        """Return `as_dict` as JSON."""
        return json.dumps(self.as_dict(), indent=2)

    def __str__(self) -> str:
        most = max(self.differences.values(), default=0.0)
        same = (
            f"output, loss and {len(self.differences) - 2} gradients on {self.ranks} ranks are those of one device, "
            f"within {most:.2g} (tolerance {self.tolerance:.2g})"
        )
        if self:
            return f"right: {same}"
        if not self.wrong:
            return "\n".join([f"wrong in plain code, though for this sample {same}", *self.plain_code])
        rows = [(name, f"{difference:.3g}") for name, difference in self.wrong.items()]
        first = (
            f"the first module that differs: {self.first_module}"
            if self.first_module
            else ("no module's output differs: look at the gradients")
        )
        if self.not_compared:
            first += f" (not compared, since each rank gives a part: {', '.join(self.not_compared)})"
        table = format_table(("what", "differs by"), rows, [1])
        return "\n".join([f"wrong on {self.ranks} ranks; {first}", *self.plain_code, table])

    __repr__ = __str__


def check_plan(
    model: Any,
    mesh: Any,
    plan: Any,
    *sample: Any,
    loss: Callable[[Any], Any] | None = None,
    tolerance: float = 1e-4,
    platform: str | None = None,
    prove: bool = True,
    **kwargs: Any,
) -> PlanCheck:
    """Check that a model under its plan computes the results of one device: output, loss, and every gradient.

    The check starts a local CPU process for each rank of the mesh. Each process gets model, plan, sample and loss by
    pickle. So their classes and functions must be importable: lambdas and definitions in ``__main__`` are not. A
    program that calls `check_plan` at its top level needs ``if __name__ == "__main__":``.

    Args:
        model: module of the selected framework on the CPU, with values and without a plan. Or a function that makes
            one; every rank calls it after seeding the framework's generator.
        mesh: see `explain`. A few ranks are enough.
        plan: see `explain`.
        sample, kwargs: inputs of the full model, as tensors or NumPy arrays. One device and every rank get the same.
            The gradients of tensors that require one are compared too, as ``"gradient of input 0"`` and so on. The
            inputs of a block in a model have gradients; tables of positions need none.
        loss: ``loss(output)``, a scalar; by default the sum of the squares of the output.
        tolerance: the largest difference, relative to the largest number of a tensor, that still counts as rounding.
        platform: name of the backend of the processes; None for the selected backend.
        prove: whether to also follow the code between styled modules, see `check_plain_code`. A finding names the line
            of the program, and does not depend on the values of the sample.

    Raises:
        JobError: if the plan is refused, or a rank fails; the error has the tracebacks of all ranks.
        TypeError: for an argument that cannot be pickled.

    Example:
        >>> import torch
        >>> from hyper_parallel import ColwiseParallel, RowwiseParallel, check_plan  # doctest: +SKIP
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))
        >>> plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}  # doctest: +SKIP
        >>> bool(check_plan(model, 2, plan, torch.ones(2, 4)))  # doctest: +SKIP
        True
    """
    if not callable(model):
        raise TypeError(f"check_plan takes a model, or a function that makes one, got {type(model).__name__}")
    shape, names = mesh_of(mesh)
    # Pickled to bytes here, because the pool's own pickler would pass shared memory, which only one process can take.
    try:
        sent = pickle.dumps((model, plan, sample, kwargs, loss, prove))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"check_plan hands model, plan, sample and loss to other processes, and cannot pickle one: {error}. "
            "Define classes and functions at the top level of a file"
        ) from error
    with WorkerPool(platform or get_platform().name, size=math.prod(shape)) as pool:
        found = pool.run(math.prod(shape), compare_on_ranks, shape, names, sent)
    return verdict_of(found, tolerance)


def verdict_of(found: list[Any], tolerance: float) -> PlanCheck:
    """Combine the findings of all ranks into a `PlanCheck`.

    Args:
        found: the findings of `compare_on_ranks` on each rank.
        tolerance: see `check_plan`.
    """
    differences = {key: max(rank[0][key] for rank in found) for key in found[0][0]}
    order, communicates, plain_code, not_followed = found[0][2:]
    checked = PlanCheck(len(found), differences, tolerance, None, communicates)
    checked.plain_code, checked.not_followed = plain_code, not_followed
    if checked.wrong:
        modules = {path for _, of_rank, *_ in found for path in of_rank}
        differs = {path for _, of_rank, *_ in found for path, d in of_rank.items() if not d <= tolerance}
        checked.first_module = next((path for path in order if path in differs), None)
        before = order if checked.first_module is None else order[: order.index(checked.first_module)]
        checked.not_compared = [path for path in before if path not in modules]
    return checked


def compare_on_ranks(
    shape: tuple[int, ...], names: tuple[str, ...], sent: bytes
) -> tuple[dict[str, float], dict[str, float], list[str], dict[str, int], list[str], dict[str, int]]:
    """Compare one rank with one device, and return a tuple of six findings. The first three are
    `PlanCheck.differences`, the differences of the modules' outputs, and the modules in the order of calls. The last
    three are the numbers of collectives by kind, `PlanCheck.plain_code` and `PlanCheck.not_followed`. ``sent`` is a
    pickle of the other arguments of `check_plan`."""
    platform = get_platform()
    platform.manual_seed(0)
    model, plan, sample, kwargs, loss, prove = pickle.loads(sent)
    if not isinstance(model, platform.Module):
        model = model()
    ranks = np.arange(math.prod(shape)).reshape(shape)
    mesh = DeviceMesh(None, ranks, mesh_dim_names=names)
    reference = _step(copy.deepcopy(model), platform, sample, kwargs, loss)
    with without_first_calls():  # the check of first calls would refuse a wrong plan
        spread = apply_plan(model, mesh, plan)
    with CommTrace() as trace, check_plain_code(spread) if prove else nullcontext() as plain_code:
        found = _step(spread, platform, sample, kwargs, loss)
    differences = {
        "output": _difference(reference.output, found.output),
        "loss": _difference(reference.loss, found.loss),
    }
    for path, gradient in reference.gradients.items():
        differences[f"gradient of {path}"] = _difference(gradient, found.gradients.get(path))
    modules = {
        path: _difference(y, found.outputs.get(path))
        for path, y in reference.outputs.items()
        if path in found.outputs and np.shape(found.outputs[path]) == np.shape(y)
    }
    counts: dict[str, int] = {}
    for c in trace.collectives:
        counts[c.kind] = counts.get(c.kind, 0) + 1
    report = ([], {}) if plain_code is None else (plain_code.lines(), plain_code.unknown)
    return differences, modules, list(reference.outputs), counts, *report


@dataclass
class _Step:
    """Unsharded values of one step, as arrays."""

    output: Any
    loss: Any
    gradients: dict[str, Any]
    outputs: dict[str, Any]


def _step(model: Any, platform: Platform, sample: tuple, kwargs: dict[str, Any], loss: Any) -> _Step:
    held: dict[str, Any] = {}
    for path, module in platform.named_modules(model):
        for name, p in platform.named_parameters(module):
            if p.requires_grad and all(p is not other for other in held.values()):
                held[f"{path}.{name}" if path else name] = p
    kept: dict[str, Any] = {}
    seen: dict[str, Any] = {}

    def tell(path: str, args: Any, output: Any) -> None:
        first = next(iter(tensors_in(output, platform)), None)
        if first is not None and path not in seen:
            with looking():
                seen[path] = _whole(first, platform)

    def as_tensor(x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            return x
        return platform.from_bytes(np.ascontiguousarray(x), x.shape, platform.dtypes[str(x.dtype)])

    leaves: dict[str, Any] = {}

    def placed(x: Any) -> Any:
        y = platform.to_device(x)
        if platform.requires_grad(x):
            y = leaves[f"input {len(leaves)}"] = platform.detach(y).requires_grad_()
        return y

    args, named = map_tensors((sample, kwargs), placed, platform, as_tensor)
    held |= leaves

    def call() -> Any:
        output = model(*args, **named)
        kept["output"] = output
        kept["loss"] = value = (loss or _squares)(output)
        return value

    with ModuleScopes(model, platform, tell):
        gradients = platform.differentiate(call, list(held.values()))
    output = next(iter(tensors_in(kept["output"], platform)), None)
    return _Step(
        output=_whole(output, platform),
        loss=_whole(kept["loss"], platform),
        gradients={path: _whole(g, platform) for path, g in zip(held, gradients, strict=True)},
        outputs=seen,
    )


def _squares(output: Any) -> Any:
    platform = get_platform()
    total: Any = 0.0
    for x in tensors_in(output, platform):
        if platform.is_floating_point(x):
            total = total + (x * x).sum()
    return total


def _whole(x: Any, platform: Platform) -> Any:
    """Return the full tensor as a float64 array, or None for None."""
    if x is None:
        return None
    if not platform.is_tensor(x):
        return np.float64(x)
    with platform.no_grad():
        x = x.full_tensor() if isinstance(x, DTensor) else x
        x = platform.to_dtype(platform.detach(x), platform.dtypes["float64"])
        return np.frombuffer(platform.bytes_of(x), np.float64).reshape(tuple(x.shape))


def _difference(wanted: Any, found: Any) -> float:
    if wanted is None and found is None:
        return 0.0
    if wanted is None or found is None or np.shape(wanted) != np.shape(found):
        return math.inf
    if np.size(wanted) == 0:
        return 0.0
    scale = float(np.max(np.abs(wanted))) or 1.0
    difference = float(np.max(np.abs(wanted - found)))
    return math.inf if math.isnan(difference) else difference / scale
