"""Compiled graphs would read shards as whole tensors: they are refused, however they are made.

But for modules with styles in graphs made from the source, of which test_jit is.

MindSpore's recordings (``capture_mode="trace"``) work only where all functions on the stack have a source file. That
holds neither under pytest nor in the worker pool. There `says_where` stands for the function that reads them, and a
program of its own does without.
"""

from __future__ import annotations

import functools
import json
import threading
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore.graph import jit_trace

from hyper_parallel import Shard, distribute_tensor
from hyper_parallel.platform.mindspore import graphs
from hyper_parallel.platform.mindspore.compiled import parsing
from hyper_parallel.platform.mindspore.compiled.reaching import reachable
from hyper_parallel.platform.mindspore.processes.launch import GroupVerbs
from hyper_parallel.platform.mindspore.tensors.tensor import InterceptedTensor, NoDispatch, is_dispatching
from hyper_parallel.testing.spmd import on_mesh
from tests.mindspore.nets import batch, error_of, make_net
from tests.support.programs import run_each

ROOT = Path(__file__).resolve().parents[2]
MODES = ("ast", "bytecode", "trace")


class Held:
    """Objects that functions of this module find by name: filled by the jobs."""

    net: Any = None
    tensor: Any = None
    plain = 2.0


held, holder, several = Held(), Held(), [None]


def argument(x: Any) -> Any:
    return x * 2


def first_of(xs: Any) -> Any:
    return xs[0] * 2


def by_module(ids: Any) -> Any:
    return held.net(ids)


def by_function(ids: Any) -> Any:
    return by_module(ids)


def by_attribute(x: Any) -> Any:
    return x + holder.tensor


def by_getattr(x: Any) -> Any:
    return x + getattr(holder, "tensor")  # noqa: B009


def by_list(x: Any) -> Any:
    return x + several[0]


def by_other_name(x: Any) -> Any:
    """The object holds a DTensor, and the function takes something else of it."""
    return x * holder.plain


def by_lookup(x: Any) -> Any:
    """Compute with a tensor that cannot be found before this runs."""
    return x + vars(holder)["ten" + "sor"]


class UsesNet(nn.Cell):
    """A cell that computes with a network which is none of its own."""

    def construct(self, ids: Any) -> Any:
        return by_module(ids)


class HoldsTensor(nn.Cell):
    """A cell with a DTensor that is no parameter."""

    def __init__(self, x: Any) -> None:
        super().__init__()
        self.constant = x

    def construct(self, x: Any) -> Any:
        return x + self.constant


def says_where() -> tuple[list[str], list[int]]:
    """Files and lines of the callers, for MindSpore's messages."""
    return [__file__], [1]


def make_closure(x: Any) -> Any:
    def closes_over(y: Any) -> Any:
        return y + x

    return closes_over


@on_mesh()
def compiled(mesh: Any, mode: str) -> dict[str, str]:
    jit_trace._get_caller_lines = says_where
    plain, ids = Tensor(np.ones((4, 2), np.float32)), batch()[0]
    x = distribute_tensor(plain, mesh, [Shard(0)])
    net = make_net(mesh)
    held.net, holder.tensor, several[0] = net, x, x
    jit = functools.partial(ms.jit, capture_mode=mode)
    calls = {
        "argument": lambda: jit(argument)(x),
        "keyword": lambda: jit(argument)(x=x),
        "in a list": lambda: jit(first_of)([x]),
        "attribute": lambda: jit(by_attribute)(plain),
        "getattr": lambda: jit(by_getattr)(plain),
        "list": lambda: jit(by_list)(plain),
        "closure": lambda: jit(make_closure(x))(plain),
        "partial": lambda: jit(make_closure(functools.partial(argument, x)))(plain),
        "constant": lambda: jit(HoldsTensor(x))(plain),
    }
    if mode != "ast":
        calls |= {
            "while it runs": lambda: jit(by_lookup)(plain),  # from the source, MindSpore refuses such a thing itself
            "network of the module": lambda: jit(by_module)(ids),
            "through a function": lambda: jit(by_function)(ids),
            "network": lambda: jit(net)(ids),
            "method": lambda: jit(net.construct)(ids),
            "erased linear": lambda: jit(net.up)(Tensor(np.ones((2, 8), np.float32))),
            "other cell": lambda: jit(UsesNet())(ids),
        }
    errors = {name: error_of(call) for name, call in calls.items()}
    # Functions without DTensors compile as usual, after the errors too, and twice.
    for _ in range(2):
        assert jit(argument)(plain).asnumpy().tolist() == [[2.0, 2.0]] * 4
    assert jit(by_other_name)(plain).asnumpy().tolist() == [[2.0, 2.0]] * 4
    assert net(ids).shape == (4, 5, 12), "and without jit the network works"
    return errors


@pytest.mark.parametrize("mode", MODES)
def test_jit_is_refused(pool: Any, mode: str) -> None:
    check_errors(pool.run(2, compiled, mode))


def check_errors(errors_of_ranks: list[dict[str, str]]) -> None:
    for errors in errors_of_ranks:
        assert not [name for name, e in errors.items() if "work in PyNative mode, without jit. Use" not in e], errors
        for name in ("argument", "keyword", "in a list", "attribute", "getattr", "list", "closure", "constant"):
            assert "uses a DTensor" in errors[name], errors[name]
        if "network" not in errors:
            assert all("capture_mode='ast' support modules with styles that pass" in e for e in errors.values())
            continue
        assert all(", or use capture_mode='ast'. " in e for e in errors.values()), errors
        for name in ("network of the module", "through a function", "network", "method", "other cell"):
            assert "uses the distributed parameter 'embedding.embedding_table'" in errors[name], errors[name]
        assert "the function 'by_function' compiled with jit" in errors["through a function"]
        assert "uses the distributed parameter 'up.weight'" in errors["erased linear"]


@on_mesh()
def compiled_before(mesh: Any, modes: tuple[str, ...]) -> list[str]:
    """The graphs of plain networks are there already when these are parallelized."""
    jit_trace._get_caller_lines = says_where
    errors, ids = [], batch()[0]
    for mode in modes:
        net = make_net()
        run = ms.jit(net, capture_mode=mode)
        wanted = run(ids)
        assert wanted.shape == (4, 5, 12)
        make_parallel(net, mesh)
        if mode == "ast":
            assert np.allclose(run(ids).asnumpy(), wanted.asnumpy(), atol=1e-5), "another graph is made"
        else:
            errors.append(error_of(run, ids))
        assert np.allclose(net(ids).asnumpy(), wanted.asnumpy(), atol=1e-5)
    return errors


def make_parallel(net: Any, mesh: Any) -> None:
    from hyper_parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    parallelize_module(net, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def test_graphs_that_were_there_before(pool: Any) -> None:
    for errors in pool.run(2, compiled_before, MODES):
        assert all("uses the distributed parameter 'up.weight'" in e for e in errors), errors


@on_mesh()
def fails_in_a_recording(mesh: Any) -> None:
    jit_trace._get_caller_lines = says_where
    held.net = make_net(mesh)
    followed_by_others()


def test_a_recording_that_failed_does_not_stay(pool: Any) -> None:
    pool.run(2, fails_in_a_recording)


@on_mesh()
def in_graph_mode(mesh: Any) -> list[str]:
    plain, ids = Tensor(np.ones((4, 2), np.float32)), batch()[0]
    x = distribute_tensor(plain, mesh, [Shard(0)])
    net = held.net = make_net(mesh)
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        return [
            error_of(nn.ReLU(), x),
            error_of(HoldsTensor(x), plain),
            error_of(nn.TrainOneStepCell(net, nn.SGD(net.trainable_params())), ids),
            error_of(nn.AdaFactor(net.trainable_params()), tuple(net.trainable_params())),
            error_of(UsesNet().compile, ids),  # not called, as for export
        ]
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)


def test_what_graph_mode_refuses(pool: Any) -> None:
    for errors in pool.run(2, in_graph_mode):
        assert all("in a graph uses " in e or "in graph mode uses " in e for e in errors), errors
        assert all("work in PyNative mode, without jit. Use" in e for e in errors), errors
        assert all("Graph mode and jit with capture_mode='ast' support" in e for e in errors[:4]), errors
        assert errors[0].startswith("RuntimeError: ReLU in graph mode uses a DTensor")
        assert errors[2].startswith("RuntimeError: TrainOneStepCell in graph mode uses the distributed parameter")
        assert errors[3].startswith("RuntimeError: AdaFactor in graph mode uses ")
        assert "or call the cell in graph mode" in errors[4]


@on_mesh()
def found_by_the_parser(mesh: Any) -> str:
    """A DTensor that is not seen beforehand is an error where the parser comes across it."""
    x = distribute_tensor(Tensor(np.ones((4, 2), np.float32)), mesh, [Shard(0)])
    several[0] = x
    look = parsing.reachable
    parsing.reachable = lambda root, used: iter(())
    try:
        return error_of(ms.jit(by_list), Tensor(np.ones((4, 2), np.float32)))
    finally:
        parsing.reachable = look


def test_the_parser_refuses_too(pool: Any) -> None:
    for error in pool.run(2, found_by_the_parser):
        assert "a function or cell that is compiled uses a DTensor" in error


def test_graph_mode_is_refused_at_initialisation() -> None:
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        with pytest.raises(RuntimeError, match="MindSpore is in graph mode"):
            GroupVerbs().init_process_group()
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)


def run_program(folder: Path, text: str) -> list[str]:
    """The lines that a program printed, which is one rank alone."""
    program = folder / "program.py"  # MindSpore compiles from files only
    program.write_text(text)
    # Anew: a recording reads the source of all callers, of which a forked process has some without a file.
    (ended,) = run_each([program], [{"HYPER_PARALLEL_PLATFORM": "mindspore", "GLOG_v": "4"}], anew=True)
    assert ended.status == 0, ended.err
    return ended.out.splitlines()


RECORDING = """
import json
from hyper_parallel import get_platform, init_device_mesh
from tests.mindspore import test_graph_mode as tests

get_platform().init_process_group()
mesh = init_device_mesh(mesh_shape=(1,))
tests.says_where = tests.jit_trace._get_caller_lines
print(json.dumps(tests.compiled.__wrapped__(mesh, "trace")))
print(json.dumps(tests.compiled_before.__wrapped__(mesh, ("trace",))))
tests.followed_by_others()
"""


def followed_by_others() -> None:
    """MindSpore records nothing more after a user's exception in a recording; the next DTensor mends that."""
    x = Tensor(np.ones((2, 2), np.float32))

    def fails(x: Any) -> Any:
        x = x * 2
        raise KeyError(x.shape)

    with pytest.raises(KeyError):
        ms.jit(fails, capture_mode="trace")(x)
    assert jit_trace._using_trace
    assert "the function 'fails' compiled with jit" in error_of(held.net, batch()[0])
    assert held.net(batch()[0]).shape == (4, 5, 12)
    assert ms.jit(argument, capture_mode="trace")(x).asnumpy().tolist() == [[2.0, 2.0]] * 2


def test_recordings_are_refused(tmp_path: Path) -> None:
    errors, before = map(json.loads, run_program(tmp_path, RECORDING))
    check_errors([errors])
    assert "the function 'by_lookup' compiled with jit uses a DTensor" in errors["while it runs"]
    assert "uses the distributed parameter 'up.weight'" in before[0]


#: jit and graph mode come before the library: functions are decorated, the mode is set.
BEFORE = """
import mindspore as ms, numpy as np
from mindspore import Tensor, nn

@ms.jit
def from_source(x):
    return x * 2

@ms.jit(capture_mode="bytecode")
def from_bytecode(x):
    return x * 2

@ms.jit(capture_mode="trace")
def from_run(x):
    return x * 2

plain = Tensor(np.ones((4, 2), np.float32))
for function in (from_source, from_run):
    function(plain)
ms.set_context(mode=ms.GRAPH_MODE)
from hyper_parallel import Shard, distribute_tensor, get_platform, init_device_mesh
try:
    get_platform("mindspore").init_process_group()
except RuntimeError as error:
    print("init:", error)
ms.set_context(mode=ms.PYNATIVE_MODE)
get_platform("mindspore").init_process_group()
x = distribute_tensor(plain, init_device_mesh(mesh_shape=(1,)), [Shard(0)])
for function in (from_source, from_bytecode, from_run):
    try:
        print("no error:", function(x).shape)
    except RuntimeError as error:
        print(f"{function.__name__}:", error)
    print(function(plain).asnumpy().sum())
"""


def test_decorated_and_set_before_the_library_is_imported(tmp_path: Path) -> None:
    lines = run_program(tmp_path, BEFORE)
    assert lines[0].startswith("init: MindSpore is in graph mode")
    assert lines[2::2] == ["16.0"] * 3
    for name, line in zip(("from_source", "from_bytecode", "from_run"), lines[1::2], strict=True):
        assert line.startswith(f"{name}: the function {name!r} compiled with jit uses a DTensor"), line


# ------------------------------------------------------------------------------------------------ recorded calls
def other_threads_during_a_recording() -> None:
    """Operations of other threads are not recorded: they work on local tensors as before."""
    inside: list[bool] = []

    def work() -> None:
        with NoDispatch():
            inside.append(is_dispatching())
        inside.append(is_dispatching())

    thread = threading.Thread(target=work)
    graphs._refuse_operations("a function", "")
    try:
        thread.start()
        thread.join()
        with pytest.raises(RuntimeError, match="a function uses a DTensor"), NoDispatch():
            pass
    finally:
        graphs._allow_operations()
    assert inside == [False, True]
    with NoDispatch():
        assert not is_dispatching()


def test_other_threads_during_a_recording(pool: Any) -> None:
    pool.run(1, other_threads_during_a_recording)


def test_what_can_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that can lead to a tensor, each thing once, and no name that a function does not use."""
    found = Tensor._make_subclass(InterceptedTensor, Tensor([1.0]))
    holder_of_it = Held()
    holder_of_it.net = found

    def default(x: Any = found) -> Any:
        return x

    def keyword_only(*, x: Any = found) -> Any:
        return x

    def nested() -> Any:
        return lambda: found

    def unfilled() -> Any:
        return later

    for root in (
        found,
        {"a": [{1}, (found,)]},
        default,
        keyword_only,
        nested,
        functools.partial(print, found),
        functools.partial(print, x=found),
        functools.wraps(default)(lambda: None),
    ):
        assert list(reachable(root)) == [found], root
    circle: list[Any] = [found]
    circle.append(circle)
    assert list(reachable(circle)) == [found]
    for root in (None, 1, "net", Held, holder_of_it, unfilled, ops.relu, nn.Dense(2, 2)):
        assert list(reachable(root)) == [], root
    later = found
    assert list(reachable(unfilled)) == [found]
    monkeypatch.setattr(holder, "tensor", found)
    assert list(reachable(by_attribute)) == list(reachable(by_getattr)) == [found]
    assert list(reachable(by_other_name)) == []
