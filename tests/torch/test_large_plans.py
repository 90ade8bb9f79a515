"""Plans of many patterns for models of many layers: the work for each does not grow with their number."""

from __future__ import annotations

import fnmatch
import random
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from hyper_parallel import ColwiseParallel, RowwiseParallel, init_device_mesh, parallelize_module
from hyper_parallel.core.tensor_parallel.checks.paths import Paths, by_parent
from hyper_parallel.planning import DryStep
from tests.support.counted_calls import calls_of


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 2, 2
        self.q, self.k, self.v, self.o = (nn.Linear(4, 4, bias=False) for _ in range(4))
        self.q_norm = nn.LayerNorm(2)


def beside_each_other(count: int) -> tuple[nn.Module, dict[str, Any]]:
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(count)))
    return model, {str(i): ColwiseParallel() for i in range(count)}


def pairs(count: int) -> tuple[nn.Module, dict[str, Any]]:
    """Layers that take the outputs of others, as gate and up, of many sizes."""
    sizes = [(4, 6 + 2 * (i % 3)) if i % 2 else (6 + 2 * (i // 2 % 3), 4) for i in range(count)]
    model = nn.Sequential(*(nn.Linear(*of_layer, bias=False) for of_layer in sizes))
    return model, {str(i): ColwiseParallel() if i % 2 else RowwiseParallel() for i in range(count)}


def half_of_them(count: int) -> tuple[nn.Module, dict[str, Any]]:
    """Build layers of which a plan names every second one, and may have forgotten the others."""
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(2 * count)))
    return model, {str(2 * i): ColwiseParallel() for i in range(count)}


def attentions(count: int) -> tuple[nn.Module, dict[str, Any]]:
    model = nn.ModuleDict({"layers": nn.ModuleList(Attention() for _ in range(count // 4))})
    of_layer = {"q": ColwiseParallel, "k": ColwiseParallel, "v": ColwiseParallel, "o": RowwiseParallel}
    return model, {f"layers.{i}.{name}": style() for i in range(count // 4) for name, style in of_layer.items()}


def globs(count: int) -> tuple[nn.Module, dict[str, Any]]:
    model = nn.ModuleList(nn.Sequential(nn.Linear(2, 2, bias=False)) for _ in range(count))
    return model, {f"{i}.*": ColwiseParallel() for i in range(count)}


def calls_of_a_plan(make: Callable[[int], tuple[nn.Module, dict[str, Any]]], count: int) -> int:
    model, plan = make(count)
    steps: list[DryStep] = []
    called = calls_of(lambda: steps.append(DryStep(model, 2, plan)))
    assert not steps[0].unmatched and steps[0].model is not model
    return called


@pytest.mark.parametrize("make", [beside_each_other, pairs, half_of_them, attentions, globs])
def test_twice_as_many_patterns_take_twice_as_long(make: Callable[[int], tuple[nn.Module, dict[str, Any]]]) -> None:
    calls_of_a_plan(make, 8)  # look-ups that are made once
    few, many = calls_of_a_plan(make, 120), calls_of_a_plan(make, 240)
    assert many <= 2.1 * few, (few, many)


def test_many_keys_that_match_nothing() -> None:
    """Near paths are looked for of those that are listed, in one warning."""

    def calls(count: int) -> int:
        model, mesh = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(count))), init_device_mesh("cpu", (1,))
        plan = {f"layer{i}": ColwiseParallel() for i in range(count)}
        with pytest.warns(UserWarning, match="the plan's 'layer0' matches no module") as caught:
            called = calls_of(lambda: parallelize_module(model, mesh, plan))
        (warning,) = caught
        lines = str(warning.message).splitlines()
        assert len(lines) == 21 and lines[-1] == f"... and {count - 20} more"
        assert lines[1].startswith("the plan's 'layer1' matches no module")
        return called

    calls(30)
    few, many = calls(200), calls(400)
    assert many <= 2.1 * few, (few, many)


def test_patterns_name_what_they_named() -> None:
    """Compare with a match of each path against the pattern, segment by segment."""

    def matches(path: str, pattern: str) -> bool:
        if not path or not pattern:
            return path == pattern
        names, patterns = path.split("."), pattern.split(".")
        return len(names) == len(patterns) and all(map(fnmatch.fnmatchcase, names, patterns))

    draw = random.Random(5)
    names = ["a", "ab", "B", "", "0", "10", "[", "a]"]
    segments = [*names, "*", "?", "a*", "[ab]", "[!a]", "[", "1?", "]"]
    for _ in range(400):
        paths = [".".join(draw.choices(names, k=draw.randint(0, 3))) for _ in range(draw.randint(0, 20))]
        known = Paths(paths)
        for _ in range(10):
            pattern = ".".join(draw.choices(segments, k=draw.randint(0, 3)))
            assert known.matching(pattern) == [path for path in paths if matches(path, pattern)], (pattern, paths)


def test_what_lies_beside() -> None:
    model = nn.ModuleDict({"a": nn.Sequential(nn.Identity(), nn.Identity()), "b": nn.Identity()})
    assert {parent: [*below] for parent, below in by_parent(dict(model.named_modules())).items()} == {
        "": ["a", "b"],
        "a": ["a.0", "a.1"],
    }
