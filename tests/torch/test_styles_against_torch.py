"""The matrix of styles, modules and layouts with torch's own styles: where torch differs from the single device.

Ours equal it in all of these cases: that is tests/conformance/test_style_matrix.py.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.tensor as theirs
import torch.distributed.tensor.parallel as their_styles

import hyper_parallel as ours
from hyper_parallel.testing.adapters import torch_adapter as adapter
from hyper_parallel.testing.comparisons import slices_of
from hyper_parallel.testing.conformance import test_style_matrix as matrix
from tests.torch.test_against_torch import meshes


def translated(plan: Any) -> Any:
    """A plan of ours in torch's classes."""
    if plan is None or isinstance(plan, bool):
        return plan
    if isinstance(plan, dict):
        return {path: translated(style) for path, style in plan.items()}
    if isinstance(plan, (tuple, list)):
        return type(plan)(map(translated, plan))
    if isinstance(plan, ours.Shard):
        return theirs.Shard(plan.dim)
    if isinstance(plan, ours.Replicate):
        return theirs.Replicate()
    if isinstance(plan, ours.PrepareModuleInputOutput):
        before, after = plan.prepare_module_input, plan.prepare_module_output
        return their_styles.PrepareModuleInputOutput(
            input_layouts=translated(before.input_layouts),
            desired_input_layouts=translated(before.desired_input_layouts),
            use_local_input=before.use_local_output,
            output_layouts=translated(after.output_layouts),
            desired_output_layouts=translated(after.desired_output_layouts),
            use_local_output=after.use_local_output,
        )
    keywords = {
        "ColwiseParallel": ("input_layouts", "output_layouts", "use_local_output"),
        "RowwiseParallel": ("input_layouts", "output_layouts", "use_local_output"),
        "PrepareModuleInput": ("input_layouts", "desired_input_layouts", "use_local_output"),
        "PrepareModuleOutput": ("output_layouts", "desired_output_layouts", "use_local_output"),
        "SequenceParallel": ("use_local_output",),
    }[type(plan).__name__]
    arguments = {name: translated(getattr(plan, name)) for name in keywords}
    for name in ("input_layouts", "output_layouts"):
        if type(plan).__name__ in ("ColwiseParallel", "RowwiseParallel"):
            (arguments[name],) = arguments[name]
    if isinstance(plan, ours.SequenceParallel):
        arguments["sequence_dim"] = plan.sequence_sharding[0].dim
    return getattr(their_styles, type(plan).__name__)(**arguments)


def outcome(
    build: Any, plan: Any, array: np.ndarray, mesh: Any, own: Any, takes: Any, gives: Any, distributed: bool
) -> str:
    """``"equal"``, ``"refuses"``, or the wrong value of torch's styles: ``"output"``, ``"gradient of weight"``, ..."""
    single, sharded = (adapter.load(build(adapter), np.random.default_rng(5)) for _ in range(2))
    whole = adapter.tensor(array)
    local = whole[slices_of(takes, array.shape, own)].clone()
    for x in (whole, local):
        x.requires_grad_(x.is_floating_point())
    reference = single(whole)
    weights = torch.from_numpy(np.random.default_rng(6).standard_normal(tuple(reference.shape)).astype(np.float32))
    (reference * weights).sum().backward()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            their_styles.parallelize_module(sharded, mesh, translated(plan))
            x = local
            if distributed:
                stride = tuple(whole.stride())
                x = theirs.DTensor.from_local(local, mesh, [translated(takes)], shape=whole.shape, stride=stride)
            y = sharded(x)
            part = weights[slices_of(gives, tuple(reference.shape), own)]
            if y.shape != part.shape:
                return "output"
            (y * part).sum().backward()
    except (RuntimeError, ValueError, NotImplementedError, AssertionError, IndexError):
        return "refuses"
    checks = [("output", y, reference[slices_of(gives, tuple(reference.shape), own)])]
    if whole.grad is not None:
        checks.append(("gradient of the input", local.grad, whole.grad[slices_of(takes, array.shape, own)]))
    for name, parameter in sharded.named_parameters():
        gradient = parameter.grad
        if gradient is not None and isinstance(gradient, theirs.DTensor):
            gradient = gradient.full_tensor()
        checks.append((f"gradient of {name}", gradient, dict(single.named_parameters())[name].grad))
    for what, found, wanted in checks:
        if found is None or found.shape != wanted.shape or not torch.allclose(found, wanted, rtol=1e-4, atol=1e-4):
            return what
    return "equal"


def run_matrix(size: int, style: str, module: str, even: bool) -> list[tuple[Any, Any, bool, str]]:
    """Results of torch's styles in each case of the matrix, on this rank."""
    found = []
    both = meshes(size)
    if both:
        (_, mesh), (_, own) = both
        for given, wanted, distributed, (build, plan, array), layouts in matrix.cases(style, module, even, size):
            result = outcome(build, plan, array, mesh, own, layouts["takes"], layouts["gives"], distributed)
            found.append((given, wanted, distributed, result))
    return found


#: (style, module, given placement, distributed input) that torch's styles refuse when sizes are uneven, for every
#: output layout: features that do not divide, and a sequence that does not.
REFUSED = {("rowwise", "linear", -1, False), ("rowwise", "linear", 1, True)}


@pytest.mark.parametrize("even", [True, False], ids=["even", "uneven"])
def test_where_torch_differs(pool: Any, even: bool) -> None:
    differences: dict[tuple, set[str]] = {}
    tried = 0
    for style, module in matrix.MATRIX:
        if style == "whole":  # a style that torch does not have
            continue
        for rank in pool.run(2, run_matrix, 2, style, module, even):
            for given, _, distributed, result in rank:
                tried += 1
                if result != "equal":
                    differences.setdefault((style, module, given, distributed), set()).add(result)
    assert tried > 100
    assert differences == ({} if even else {key: {"refuses"} for key in REFUSED})
