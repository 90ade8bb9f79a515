"""The contract is small: the verbs that a backend must bring, and the default answers of the other verbs."""

from __future__ import annotations

import re
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hyper_parallel.platform import contract
from hyper_parallel.platform.contract import Platform
from hyper_parallel.platform.contract.collectives import CollectiveRole

CONTRACT = Path(contract.__file__).parent
#: Results of `Platform.factory`, which a string chooses.
FACTORIES = ("full", "empty", "rand", "randn", "linspace", "logspace")


def required() -> set[str]:
    """Verbs that a backend must bring."""
    return set(Platform.__abstractmethods__)


def test_at_most_fifty_verbs() -> None:
    doc = " ".join((Platform.factory.__doc__ or "").split())
    assert all(f'``"{name}"``' in doc for name in FACTORIES) and doc.count('``"') == len(FACTORIES)
    assert len(required()) - 1 + len(FACTORIES) <= 50


def test_core_calls_every_verb_that_is_required() -> None:
    core = CONTRACT.parents[1] / "core"
    # `full` through `zeros` and `ones`, which a backend may bring too.
    paths = [*core.rglob("*.py"), CONTRACT / "tensors.py"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    assert {verb for verb in required() if not re.search(rf"\.{verb}\b", text)} == set()


def test_every_verb_is_called() -> None:
    package = CONTRACT.parents[1]
    paths = [
        *(package / "core").rglob("*.py"),
        *(package / "testing" / "conformance").glob("*.py"),
        *(path for part in ("checkpoint", "debug", "planning", "cli") for path in (package / part).rglob("*.py")),
        CONTRACT / "tensors.py",
        CONTRACT / "attention.py",
    ]
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    verbs = {name for cls in Platform.__mro__ for name, x in vars(cls).items() if isinstance(x, FunctionType)}
    # `unavailable_reason` is a class method, for the registry; users call `register_...`.
    verbs = {verb for verb in verbs if not verb.startswith(("_", "register_"))} | {"register_forward_hook"}
    assert {verb for verb in verbs if not re.search(rf"\.{verb}\b", text)} == set()


def test_the_page_shows_how_a_verb_is_added() -> None:
    page = (CONTRACT.parents[2] / "docs" / "platform.md").read_text(encoding="utf-8").split("## Adding a verb")[1]
    blocks = re.findall(r"`([^\s`]+\.py)`[^`]*```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 3
    for path, block in blocks:
        (file,) = CONTRACT.parents[1].glob(f"*{path}" if path.startswith("core") else f"platform/{path}")
        assert block in file.read_text(encoding="utf-8"), path


def test_a_role_is_on_two_screens() -> None:
    for path in CONTRACT.glob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 200, path.name


class _Arrays:
    """The verbs that the default answers use, for NumPy's arrays."""

    Tensor = np.ndarray

    def shape_of(self, x: np.ndarray) -> tuple[int, ...]:
        return x.shape

    def narrow(self, x: np.ndarray, dim: int, start: int, length: int) -> np.ndarray:
        return np.take(x, range(start, start + length), axis=dim)

    def full(self, shape: tuple[int, ...], value: float, like: np.ndarray) -> np.ndarray:
        return np.full(shape, value, like.dtype)

    def clone(self, x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x)

    def detach(self, x: np.ndarray) -> np.ndarray:
        return x.view()

    def cat(self, xs: Any, dim: int) -> np.ndarray:
        return np.concatenate(xs, dim)

    def all_gather(self, x: np.ndarray, group: Any, size: int) -> np.ndarray:
        return np.concatenate([x * (i + 1) for i in range(size)])

    def write(self, x: np.ndarray, values: np.ndarray) -> None:
        x[...] = values

    def own_parameters(self, module: Any) -> dict[str, Any]:
        return {"weight": module, "bias": None}

    def autograd_function(self, forward: Any, backward: Any) -> Any:
        return lambda x, *static: forward(SimpleNamespace(), x, *static)


def plain() -> Any:
    """A platform with `_Arrays` in place of everything that is required."""
    methods = {verb: getattr(_Arrays, verb, lambda self, *args: None) for verb in required()}
    return type("Plain", (Platform,), {**methods, "Tensor": np.ndarray, "name": "plain"})()


def test_what_verbs_answer_of_themselves() -> None:
    platform, x = plain(), np.arange(12.0).reshape(4, 3)
    assert platform.unavailable_reason() is None
    assert platform.is_tensor(x) and not platform.is_tensor(3.0)
    assert not platform.is_meta(x)
    assert platform.native_group("tp") == "tp"
    assert platform.to_device(x) is x and platform.host_tensor(x) is x
    assert list(platform.named_parameters(x)) == [("weight", x)]
    module = SimpleNamespace(register_forward_pre_hook=dict, register_forward_hook=lambda hook, **how: (hook, how))
    assert platform.register_forward_pre_hook(module, {}, prepend=True) == {"prepend": True, "with_kwargs": False}
    assert platform.register_forward_hook(module, print) == (print, {"prepend": False, "with_kwargs": False})
    assert [part.tolist() for part in platform.chunk(x, 2, 0)] == [x[:2].tolist(), x[2:].tolist()]
    assert platform.contiguous(x.T).flags.c_contiguous
    assert platform.zeros((2,), x).tolist() == [0.0, 0.0] and platform.ones((2,), x).tolist() == [1.0, 1.0]
    for dim, shape in ((0, (1, 4, 3)), (2, (4, 3, 1)), (-1, (4, 3, 1)), (-2, (4, 1, 3))):
        assert platform.unsqueeze(x, dim).shape == shape
    assert platform.as_index(x) is x
    assert platform.requires_grad(x)
    alias = platform.alias(x)
    assert alias is not x and np.shares_memory(alias, x)
    with platform.no_grad():
        platform.write_cache(x, "key", x)
    assert platform.read_cache(x, "key") is None
    platform.clear_cache(x)


def test_a_backend_supports_what_it_brings() -> None:
    platform, x = plain(), np.zeros(2)
    assert platform.supports("all_gather", "", x)
    for verb, arguments in {
        "all_reduce": (x, "sum", None),
        "reduce_scatter": (x, "sum", None, 2),
        "all_to_all": (x, None, 2),
        "shift": (x, None, 2),
        "broadcast": (x, 0, None),
        "scatter": (x, [x], 0, None),
    }.items():
        assert not platform.supports(verb, "sum", x)
        with pytest.raises(TypeError, match=f"Plain does not implement {verb}"):
            getattr(platform, verb)(*arguments)
    assert isinstance(platform, CollectiveRole)
    with pytest.raises(TypeError, match="Plain cannot give a tensor another shape"):
        platform.become(x, x)
    with pytest.raises(TypeError, match="Plain has no attention function for sharded sequences"):
        platform.attention_calls(lambda *operands: x, lambda name, lengths: None)


def test_what_is_there_for_data_parallelism_answers_for_itself() -> None:
    platform, x, y = plain(), np.arange(6.0).reshape(2, 3), np.arange(2.0)
    assert platform.join([x, y[:0], y]).tolist() == [*range(6), 0, 1]
    parts = platform.part(platform.join([x, y]), [(2, 3), (0, 4), (2,)])
    assert [part.tolist() for part in parts] == [x.tolist(), [], y.tolist()]
    swapped = platform.joint_function(lambda ctx, factor, a, b: [b * factor, a.T], lambda ctx, b, a: [a.T, b])
    assert [z.tolist() for z in swapped(2, x, y)] == [(y * 2).tolist(), x.T.tolist()]
    nothing = platform.joint_function(lambda ctx, static, a: [a * 2], lambda ctx, a: [None])
    assert nothing(None, y)[0].tolist() == (y * 2).tolist()
    assert platform.backward_pass() is None and not platform.accumulates_gradients
    with pytest.raises(TypeError, match="cannot detect the end of a backward pass"):
        platform.after_backward(lambda: None)
    assert platform.is_made_with(x, y) is None
    assert not platform.tells_beginning and not platform.backward_is_recorded()
    platform.before_backward(lambda runs, leads: None)  # and nothing will
    platform.device_type = "cpu"
    assert platform.to_host(x, True) is x
    platform.device_type = "cuda"
    with pytest.raises(TypeError, match="does not support parameters in host memory"):
        platform.to_host(x, False)
    assert not platform.tells_unused
    out = np.zeros(6)
    platform.start_collective("all_gather", out, y + 1, "", None, 3).wait()
    assert out.tolist() == [1, 2, 2, 4, 3, 6]
    assert platform.other_names(x) == () and platform.meta_tensor((2,), x.dtype) is None
    assert platform.collective_kind(x) is None and platform.describe_native_placement(x) is None
    assert platform.profiler_range("all_reduce") is None
    with platform.observe(None):
        pass
    with pytest.raises(TypeError, match="cannot make a mesh of existing process groups"):
        platform.describe_group("tp")
    assert not platform.frees_storage and not platform.is_compiling()
    assert not platform.in_loss_parallel()
    for refused in (lambda: platform.free_storage(x), lambda: platform.refill_storage(x, [x])):
        with pytest.raises(TypeError, match="Plain cannot free storage"):
            refused()


def test_what_is_there_for_dry_runs_answers_for_itself() -> None:
    platform, x = plain(), np.zeros(2)
    assert platform.needs_values and platform.dry_class is None and platform.usage() is None
    copied = platform.copy_without_data([x])
    assert copied[0] is not x and copied[0].tolist() == x.tolist()
    with platform.without_data():
        platform.synchronize()
    assert platform.optimizer_bytes([x], "AdamW") is None
    assert platform.device_count() == 1 and list(platform.patched_names()) == [] and platform.show_styles([x]) is None
    with pytest.raises(TypeError, match="Plain has no models by name: pass"):
        platform.make_decoder({})
    for refused in (lambda: platform.differentiate(x.sum, [x]), lambda: platform.recompute(x.sum)):
        with pytest.raises(TypeError, match="Plain does not"):
            refused()
    with pytest.raises(TypeError, match="Plain does not support tensors of bytes"):
        platform.from_bytes(b"", (0,), x.dtype)


def test_what_a_backend_does_not_bring_says_so() -> None:
    platform, x = plain(), np.zeros(2)
    for refused, message in (
        (lambda: platform.set_host_rng_state(b""), "Plain has no generator of random numbers on the host"),
        (lambda: platform.native_mesh(x, None, []), "Plain cannot convert meshes: its framework has no meshes"),
        (lambda: platform.describe_native_mesh(x), "Plain cannot convert meshes: its framework has no meshes"),
        (lambda: platform.give_memory(x), "Plain cannot allocate memory for tensors on the meta device"),
        (lambda: platform.optimizer_state(x), "Plain does not support optimizers"),
        (lambda: platform.set_optimizer_state(x, None), "Plain does not support optimizers"),
    ):
        with pytest.raises(TypeError, match=message):
            refused()
