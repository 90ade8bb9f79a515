"""Patches in MindSpore: none before the first DTensor, then the listed ones."""

from __future__ import annotations

from functools import partial

import mindspore
import pytest

from hyper_parallel.platform.mindspore.gradients.autograd import _Recording, counted_begin, counted_end
from hyper_parallel.platform.mindspore.patches import PATCHES
from tests.support.patch_table import table
from tests.support.patched_programs import IN_A_FORK, IN_THREADS, fresh, page_has

BEGINNING = """
import mindspore as ms, numpy as np
from mindspore import Parameter, Tensor, nn, ops
import mindspore.experimental.optim
from tests.support.framework_snapshot import changes, snapshot
Parameter(Tensor(np.ones(2, np.float32)))  # MindSpore makes the class of parameters
plain, plain_types = snapshot("mindspore"), dict(Parameter._base_type)
import hyper_parallel as hp
from hyper_parallel import Shard
from hyper_parallel.platform import patching
from hyper_parallel.core.tensor_parallel import api  # every module that a plan uses
import hyper_parallel.mindspore
import hyper_parallel.platform.mindspore.gradients.grad, hyper_parallel.platform.mindspore.patches

def unpatched():
    changed = changes(plain, snapshot("mindspore"))
    assert not changed, list(changed)
    assert Parameter._base_type == plain_types and not patching.installed()

mesh = hp.init_device_mesh("cpu", (WORLD,))
platform = hp.get_platform()
unpatched()
"""


def program(code: str, world: int = 1) -> str:
    return BEGINNING.replace("WORLD", str(world)) + code


def test_nothing_is_patched_without_dtensors() -> None:
    """Platform, mesh, groups, collectives and a barrier leave MindSpore as it is, defaults of functions included."""
    code = """
from mindspore.mint import distributed
from mindspore.mint.distributed import distributed as inner
assert {f.__defaults__ for f in (inner.get_cache_group_rank, inner.get_cache_group_size)} == {("hccl_world_group",)}
x = Tensor(np.ones(2, np.float32))
distributed.all_reduce(x, group=mesh.get_group())
platform.barrier(platform.world().group)
assert x.asnumpy().tolist() == [2, 2]
unpatched()
hp.DTensor.from_local(x, mesh, [Shard(0)])
assert patching.installed()["mindspore"] == hyper_parallel.platform.mindspore.patches.PATCHES.patches
platform.barrier(platform.world().group)
platform.destroy_process_group()
print("passed", flush=True)
"""
    fresh(program(code, world=2), ranks=2)


def test_exactly_what_is_listed_is_patched() -> None:
    """Plain cells are trained as before."""
    code = """
import inspect
from hyper_parallel.mindspore import value_and_grad
from hyper_parallel.platform.mindspore.patches import PATCHES
from hyper_parallel.platform.patch_places import _resolved
rng = np.random.default_rng(0)
weights = [rng.normal(size=s).astype(np.float32) for s in ((4, 3), (2, 4))]

def net():
    cells = [nn.Dense(n, m, Tensor(w), has_bias=False) for w in weights for m, n in [w.shape]]
    return nn.SequentialCell(cells)

def train(cell, step):
    optimizer = nn.Adam(cell.trainable_params(), 0.1)
    x = Tensor(np.ones((2, 3), np.float32))
    for _ in range(2):
        _, gradients = step(lambda x: ops.cross_entropy(cell(x), Tensor([0, 1])), None, cell.trainable_params())(x)
        optimizer(gradients)
    return cell(x).asnumpy()

def parallel():
    return hp.parallelize_module(net(), mesh, {"0": hp.ColwiseParallel(), "1": hp.RowwiseParallel()})

expected = train(net(), ms.value_and_grad)
plain, plain_types = snapshot("mindspore"), dict(Parameter._base_type)
assert np.allclose(train(parallel(), value_and_grad), expected, atol=1e-6)
found = {id(value) for value in changes(plain, snapshot("mindspore")).values()}
places = [t.rpartition(".") for p in PATCHES.patches for t in p.targets if not t.endswith("]")]
inside, others = [[p for p in places if ("[" in p[0]) is entry] for entry in (True, False)]
put = {id(inspect.getattr_static(_resolved(path), name)) for path, _, name in others}
assert found == put, (len(found), len(put))
assert {name for _, _, name in inside} <= set(vars(Parameter._base_type["Parameter"]))
assert set(Parameter._base_type) - set(plain_types) == {"ParameterDTensor"}
assert np.array_equal(train(net(), ms.value_and_grad), expected)
print("passed")
"""
    fresh(program(code))


def test_a_mindspore_that_is_not_as_expected() -> None:
    code = """
there = nn.Optimizer.__call__
nn.Optimizer.__call__ = lambda self, gradients: None
plain = snapshot("mindspore")
for _ in range(2):
    try:
        hp.DTensor.from_local(Tensor(np.ones(2, np.float32)), mesh, [Shard(0)])
        raise SystemExit("a DTensor was made")
    except RuntimeError as error:
        said = f"mindspore {ms.__version__}: mindspore.nn.Optimizer.__call__ is defined there, but expected to be inh"
        assert said in str(error), error
    unpatched()
del nn.Optimizer.__call__
hp.DTensor.from_local(Tensor(np.ones(2, np.float32)), mesh, [Shard(0)])
print("passed")
"""
    fresh(program(code))


def test_the_first_dtensor_may_be_made_inside_of_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recording's beginning was not counted, so its end must not make the count negative."""
    monkeypatch.setattr(_Recording, "forwards", 0)
    begin, end = partial(counted_begin, lambda: None), partial(counted_end, lambda executor, function, output: None)
    begin()
    end(None, None, None)
    end(None, None, None)
    assert _Recording.forwards == 0
    begin()
    assert _Recording.forwards == 1


def test_the_page_shows_what_is_listed() -> None:
    """The page is current; if not: python -m tests.support.patch_table mindspore."""
    assert page_has("mindspore", table(PATCHES.patches))
    assert mindspore.__version__.startswith(PATCHES.patches[0].versions)


MAKE = "from mindspore import mint\nmake = lambda: mint.ones((4, 4))\n"


def test_first_use_in_threads() -> None:
    """Four threads at once meet once, and get one class, whose tensors are patched."""
    fresh(MAKE + IN_THREADS)


def test_in_a_fork() -> None:
    """A collective in a forked child is an error at once, and its rank goes on."""
    fresh(MAKE + IN_A_FORK, ranks=2)
