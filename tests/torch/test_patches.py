"""Patches in torch: none before the first DTensor, then the listed ones."""

from __future__ import annotations

from pathlib import Path

from hyper_parallel.core import operations
from hyper_parallel.platform.torch.compiler.dynamo import not_compiled
from hyper_parallel.platform.torch.patches import PATCHES
from tests.support.patch_table import table
from tests.support.patched_programs import IN_A_FORK, IN_THREADS, fresh, page_has

BEGINNING = """
import importlib
import torch
from tests.support.framework_snapshot import changes, snapshot
modules = ["torch.optim.optimizer", "torch.utils._foreach_utils"]
lists = [importlib.import_module(name)._foreach_supported_types for name in modules]
plain, plain_lists = snapshot("torch"), [tuple(x) for x in lists]
import hyper_parallel as hp
from hyper_parallel import Shard
from hyper_parallel.platform import patching
from hyper_parallel.core.tensor_parallel import api  # every module that a plan uses

def unpatched():
    assert not changes(plain, snapshot("torch")), list(changes(plain, snapshot("torch")))
    assert [tuple(x) for x in lists] == plain_lists and not patching.installed()

mesh = hp.init_device_mesh("cpu", (WORLD,))
unpatched()
"""


def program(code: str, world: int = 1) -> str:
    return BEGINNING.replace("WORLD", str(world)) + code


def test_nothing_is_patched_without_dtensors() -> None:
    """Platform, mesh, groups, collectives and a barrier leave torch as it is."""
    code = """
platform = hp.get_platform()
torch.distributed.barrier(mesh.get_group())
import hyper_parallel.platform.torch.patches, hyper_parallel.integrations.huggingface, hyper_parallel.debug
unpatched()
hp.DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
listed = hyper_parallel.platform.torch.patches.PATCHES.patches
assert patching.installed()["torch"] == tuple(p for p in listed if not p.waits)
print("passed")
platform.destroy_process_group()
"""
    fresh(program(code, world=2), ranks=2)


def test_exactly_what_is_listed_is_patched() -> None:
    """Optimizers step plain parameters as before, and hooks are called."""
    code = """
import warnings
import torch._dynamo, torch.distributed.checkpoint, torch.nn.attention.flex_attention  # some patches wait for these
from torch._dynamo import trace_rules
from torch import nn
from hyper_parallel.platform.torch.patches import PATCHES
warnings.simplefilter("error")

def train(net, x):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    called = []
    optimizer.register_step_post_hook(lambda *_: called.append(True))
    for _ in range(2):
        optimizer.zero_grad()
        net(x).square().sum().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
    return net(x).detach(), called, optimizer

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))

def parallel():
    plan = {"0": hp.ColwiseParallel(), "1": hp.RowwiseParallel()}
    return hp.parallelize_module(net(), mesh, plan)

x = torch.ones(2, 3)
before_any_instance = torch.optim.AdamW.step
expected = train(net(), x)[0]
hooked = torch.optim.AdamW.step  # torch has put its hooks around it
assert hooked is not before_any_instance
plain, plain_lists = snapshot("torch"), [tuple(x) for x in lists]  # torch has loaded more of itself
result, called, optimizer = train(parallel(), x)
assert torch.allclose(result, expected) and called == [True] * 2
found = {id(value) for value in changes(plain, snapshot("torch")).values()}
of_torch = [p for p in PATCHES.patches if not p.after.startswith("lightning")]  # which need not be installed
listed = {t for p in of_torch for t in p.targets if not t.endswith("]")}
import inspect, pkgutil
def there(target):
    holder, _, name = target.rpartition(".")
    found = pkgutil.resolve_name(holder)
    return found.__code__ if name == "__code__" else inspect.getattr_static(found, name)
put = {id(there(t)) for t in listed}
assert found == put, (found - put, put - found)
assert [len(x) for x in lists] == [len(x) + 1 for x in plain_lists]

from hyper_parallel.platform.torch.compiled.placed import Outside
from hyper_parallel.core.operations import dispatch
assert Outside.run is not None and Outside.leave is not None
own_file = dispatch.__file__
assert trace_rules.check_file(own_file).skipped and not trace_rules.check_file(api.__file__).skipped
trace_rules.add("json")  # torch makes its pattern anew
assert trace_rules.check_file(own_file).skipped and not trace_rules.check_file(api.__file__).skipped
assert torch.optim.AdamW.step is not hooked
result, called, _ = train(net(), x)
assert torch.equal(result, expected) and called == [True] * 2
print("passed")
"""
    fresh(program(code))


def test_a_torch_that_is_not_as_expected() -> None:
    """No DTensor can be made, however often one tries; patches that only save time are left out."""
    code = """
import warnings
del torch.optim.NAdam._init_group
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    hp.DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
message, = [str(w.message) for w in seen]
assert message.startswith(f"torch {torch.__version__}: torch.optim.NAdam._init_group is missing"), message
print("passed")
"""
    fresh(program(code))
    code = """
torch.autograd.Function.apply = 3
there = snapshot("torch")
for _ in range(2):
    try:
        hp.DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
        raise SystemExit("a DTensor was made")
    except RuntimeError as error:
        assert f"torch {torch.__version__}: torch.autograd.Function.apply is not a function" in str(error), error
    assert not changes(there, snapshot("torch")) and not patching.installed()
print("passed")
"""
    fresh(program(code))


def test_all_floors_but_styles_are_left_out_of_compiled_code() -> None:
    """A folder of core that is new would be compiled, function by function."""
    core = Path(operations.__file__).parents[1]
    floors = {f"{path}/" for path in core.iterdir() if (path / "__init__.py").exists()}
    assert floors - set(not_compiled(None)) == {f"{core}/tensor_parallel/", f"{core}/rules/"}
    rules = [path.name for path in (core / "rules").rglob("*.py") if not str(path).startswith(not_compiled(None))]
    assert {*rules} <= {"__init__.py", "class_losses.py"} and "class_losses.py" in rules


def test_the_page_shows_what_is_listed() -> None:
    """The page is current; if not: python -m tests.support.patch_table torch."""
    assert page_has("torch", table(PATCHES.patches))


MAKE = "import torch\nmake = lambda: torch.ones(4, 4)\n"


def test_first_use_in_threads() -> None:
    """Four threads at once meet once, and get one class, whose tensors are patched."""
    fresh(MAKE + IN_THREADS)


def test_in_a_fork() -> None:
    """A collective in a forked child is an error at once, and its rank goes on."""
    fresh(MAKE + IN_A_FORK, ranks=2)
