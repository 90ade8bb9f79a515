"""Private parts of torch are checked before they are used. A missing or different one is replaced by another way, or
the backend names the tested versions of torch."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed.tensor as theirs
import torch.distributed.tensor.parallel as theirs_parallel
import torch.nn.functional as F
from torch import nn
from torch.nn.modules import module as nn_module

import hyper_parallel
from hyper_parallel.platform import versions
from hyper_parallel.platform.torch import fast, operators
from hyper_parallel.platform.torch.basics import private
from hyper_parallel.platform.torch.gradients import autograd
from hyper_parallel.platform.torch.modules import calls
from hyper_parallel.platform.torch.processes import collectives
from tests.torch.decoder import Sizes, decoder, plan
from tests.torch.test_against_torch import meshes
from tests.torch.test_optimizer_matrix import compare, train

PACKAGE = Path(hyper_parallel.__file__).parent / "platform" / "torch"
ROOT = PACKAGE.parents[2]


def load() -> ModuleType:
    """The module once more, under another name, as it is with the torch of this moment."""
    spec = importlib.util.spec_from_file_location("private_once_more", private.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_tested_torch_has_all_of_it() -> None:
    assert private.REPLACED == []
    assert load().REPLACED == []


#: Names that have another way: path -> the answer of that way, outside of everything.
OTHER_WAYS: dict[str, Any] = {
    "_C._len_torch_function_stack": lambda m: m.function_modes() == 1,
    "_C._len_torch_dispatch_stack": lambda m: m.dispatch_modes() == 1,
    "utils._python_dispatch.is_in_torch_dispatch_mode": lambda m: m.in_dispatch_mode() is False,
    "_C._is_any_autocast_enabled": lambda m: m.any_autocast() is False,
    "_C._autograd._top_saved_tensors_default_hooks": lambda m: m.saved_tensor_hooks(True) is not None,
    "_C._current_autograd_node": lambda m: m.current_node() is None,
    "_C._will_engine_execute_node": lambda m: m.will_execute(None) is False,
    "_C._FunctionBase": lambda m: m.bare_apply(Doubled)(torch.ones(2)).tolist() == [2, 2],
    "_has_compatible_shallow_copy_type": lambda m: m.same_implementation(torch.ones(1), torch.ones(2)) is True,
    "_nested_tensor_from_mask_left_aligned": lambda m: m.nested_left_aligned is None,
    "_C._get_tracing_state": lambda m: m.tracer() is None,
    "autograd._make_grads": lambda m: m.make_grads((leaf(1),), (None,), False)[0].tolist() == [1],
}


def leaf(size: int) -> torch.Tensor:
    return torch.ones(size, requires_grad=True)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, cotangent: torch.Tensor) -> torch.Tensor:
        return 2 * cotangent


def owner_of(path: str) -> tuple[Any, str]:
    *places, name = path.split(".")
    owner: Any = torch
    for place in places:
        owner = getattr(owner, place)
    return owner, name


def other_than_expected(*args: Any) -> str:
    raise TypeError("this function takes something else now")


@pytest.mark.parametrize("path", OTHER_WAYS)
def test_missing_and_done_in_another_way(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.delattr(*owner_of(path))
    loaded = load()
    assert [f"torch.{path}"] == loaded.REPLACED
    assert OTHER_WAYS[path](loaded)


@pytest.mark.parametrize(
    "path", [path for path in OTHER_WAYS if "will_" not in path and "shallow" not in path and "tracing" not in path]
)
def test_different_and_done_in_another_way(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setattr(*owner_of(path), other_than_expected)
    loaded = load()
    assert [f"torch.{path}"] == loaded.REPLACED
    assert OTHER_WAYS[path](loaded)


@pytest.mark.parametrize(
    "path",
    [
        "_C._is_torch_function_enabled",
        "_C._current_graph_task_id",
        "_C._swap_tensor_impl",
        "_ops.OpOverload",
        "autograd.graph._engine_run_backward",
        "distributed.ProcessGroup._get_backend",
        "distributed.distributed_c10d._get_default_store",
    ],
)
def test_without_another_way(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.delattr(*owner_of(path))
    expected = (
        f"torch.{path} is missing from torch {torch.__version__}, or is not what HyperParallel expects. Use a version "
        "of torch that is tested: 2.13.0, 2.14.0, 2.14.1 and 2.15.0"
    )
    with pytest.raises(RuntimeError, match=re.escape(expected)):
        load()


def test_autocast_without_the_private_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C, "_is_any_autocast_enabled")
    loaded = load()
    with torch.autocast("cpu"):
        assert loaded.any_autocast() is True


def test_cotangents_of_scalars_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.autograd, "_make_grads")
    loaded = load()
    given = torch.ones(2)
    assert loaded.make_grads((leaf(2),), (given,), False)[0] is given
    with pytest.raises(RuntimeError, match="only for scalar outputs"):
        loaded.make_grads((leaf(2),), (None,), False)


def test_native_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._nn, "silu")
    loaded = load()
    assert loaded.native("silu") is F.silu and loaded.native("relu6") is torch._C._nn.relu6
    assert loaded.REPLACED == ["torch._C._nn.silu"]


def test_the_loss_context_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's loss context is recognised by a table of torch's DTensors. Without that table, or with another one, it is
    not."""
    dispatcher: Any = theirs.DTensor._op_dispatcher
    assert not private.in_loss_parallel()
    with theirs_parallel.loss_parallel():
        assert private.in_loss_parallel()
    assert not private.in_loss_parallel()
    monkeypatch.setattr(dispatcher, "_custom_op_handlers", {"nll_loss": None})
    loaded = load()
    assert not loaded.in_loss_parallel()
    monkeypatch.delattr(dispatcher, "_custom_op_handlers")
    assert not loaded.in_loss_parallel()
    assert loaded.REPLACED == ["torch.distributed.tensor.DTensor._op_dispatcher._custom_op_handlers"]
    monkeypatch.delitem(sys.modules, "torch.distributed.tensor.parallel")
    assert not private.in_loss_parallel()


def test_hooks_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch with one more kind of hooks on modules, or on all modules, calls them itself."""
    assert private.calls_quickly
    monkeypatch.setattr(nn_module, "_global_forward_hooks_of_a_new_kind", {}, raising=False)
    assert load().REPLACED == ["torch.nn.Module.__call__"]
    monkeypatch.undo()
    original = nn.Module.__init__

    def init(self: Any) -> None:
        original(self)
        self.__dict__["_forward_hooks_of_a_new_kind"] = {}

    monkeypatch.setattr(nn.Module, "__init__", init)
    assert not load().calls_quickly


# ---------------------------------------------------------------------- the other ways are right


@contextmanager
def without_privates() -> Iterator[None]:
    """The backend as with a torch that lacks everything that has another way."""
    with pytest.MonkeyPatch.context() as patch:
        with pytest.MonkeyPatch.context() as missing:
            for path in OTHER_WAYS:
                missing.delattr(*owner_of(path))
            loaded = load()
        assert len(loaded.REPLACED) == len(OTHER_WAYS)
        for name in ("any_autocast", "saved_tensor_hooks", "current_node", "will_execute"):
            patch.setattr(fast, name, getattr(loaded, name))
        patch.setattr(autograd, "bare_apply", loaded.bare_apply)
        patch.setattr(collectives, "dispatch_modes", loaded.dispatch_modes)
        patch.setattr(operators, "function_modes", loaded.function_modes)
        patch.setattr(calls, "calls_quickly", False)
        patch.setattr(calls, "_with_quick_call", calls._with_quick_call.__wrapped__)
        patch.setattr(calls, "_with_replaced_forward", calls._with_replaced_forward.__wrapped__)
        yield


def train_without_privates() -> None:
    with without_privates():
        for lib, mesh in meshes(2)[1:]:
            wanted = train(decoder(dtype=torch.float32), Sizes(), "SGD", {}, steps=3)
            sharded = lib.parallelize_module(decoder(dtype=torch.float32), mesh, plan(lib))
            assert "__call__" not in vars(type(sharded.block.attention)), "modules are called in torch's own way"
            compare(train(sharded, Sizes(), "SGD", {}, steps=3), wanted, "without privates", 1e-4)


def test_training_without_privates(pool: Any) -> None:
    pool.run(2, train_without_privates)


# ---------------------------------------------------------------------- nothing else is taken


def test_all_of_it_is_in_the_docs() -> None:
    table = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    paths = re.findall(r'_take\(\s*f?"([\w.]+)"', Path(private.__file__).read_text(encoding="utf-8"))
    assert len(paths) > 15
    missing = [path for path in paths if path.rpartition(".")[2] not in table]
    assert missing == []


#: Where torch is patched: the patches check their targets there.
PATCHES = {"patches.py", "handlers/functions.py", "handlers/optimizers.py", "handlers/clipping.py"}
PUBLIC = {"torch._C.DisableTorchFunctionSubclass"}


def taken_from_torch(source: str) -> set[str]:
    """Private names of torch's modules in a file."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("torch.")}
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            found.add(ast.unparse(node))
    roots = ("torch.", "dist.", "nn.", "F.", "graph.", "distributed_c10d.")
    private_part = re.compile(r"\._(?!_)(?!foreach_|amp_foreach_)")
    return {name for name in found if name.startswith(roots) and private_part.search(name)}


def test_privates_are_taken_in_one_place() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        if (name := path.relative_to(PACKAGE).as_posix()) not in PATCHES | {"basics/private.py"}:
            taken = {t for t in taken_from_torch(path.read_text(encoding="utf-8")) if not t.startswith(tuple(PUBLIC))}
            assert taken - {"torch._C"} == set(), f"{name}: take it from platform/torch/basics/private.py"


def test_what_is_taken_is_seen() -> None:
    for line in ("from torch._C import _x", "import torch._dynamo", "y = torch._C._y()", "z = dist._z"):
        assert taken_from_torch(line), line
    assert not taken_from_torch("from torch import nn\nx = torch.add(y._layout, nn.Linear)\n")


# ---------------------------------------------------------------------- versions


def test_an_untested_torch_is_mentioned_when_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = type(hyper_parallel.get_platform())
    monkeypatch.setattr(versions, "_warned", set())
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    with pytest.warns(RuntimeWarning, match=r"tested with torch 2\.13\.0, .* but the installed version is 2\.99\.0"):
        platform()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        platform()


def test_this_torch_is_tested() -> None:
    assert versions.is_tested("torch", torch.__version__)
