"""First calls of all models of transformers, followed as by default: no error and no warning."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from hyper_parallel import fully_shard
from hyper_parallel.core.plain_code.first_call import VARIABLE
from hyper_parallel.core.plain_code.following import FOLLOWING
from hyper_parallel.integrations.huggingface import parallelize_model
from hyper_parallel.platform.torch.compiled.hooks import EagerHook
from hyper_parallel.testing.spmd import device_mesh
from tests.torch.huggingface_adapters import adapted
from tests.torch.huggingface_models import CASES, FURTHER, SPARSE, batch, build
from tests.torch.huggingface_table_models import ROWS, TESTED
from tests.torch.test_plain_code import by_default

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed"),
    pytest.mark.skipif(
        os.environ["HYPER_PARALLEL_PLATFORM"] != "torch-cpu", reason="devices take several times as long for the same"
    ),
]

#: Models that so many ranks cannot share.
IMPOSSIBLE = re.compile(r"cannot share|heads|or pad")


def models() -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], dict[str, Any]]]]:
    """Yield a name, a function that makes the model, and a function of the model that makes its inputs."""
    for row in ROWS:
        yield row.title, row.make, row.inputs
    for name in dict.fromkeys((*CASES, *FURTHER, *SPARSE)):
        if name not in TESTED:
            yield name, lambda name=name: build(name), lambda model: batch(model.config.vocab_size)


def heard(run: Callable[[], None]) -> list[str]:
    """Return the warnings about first calls, and the error, of ``run``."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            run()
        except ValueError as error:
            if VARIABLE not in str(error):
                raise
            return [str(error)]
    return [str(one.message) for one in caught if VARIABLE in str(one.message)]


def watched(model: Any) -> list[bool]:
    """Return a list to which each call of a module appends a bool: it is followed."""
    followed: list[bool] = []
    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(lambda *given: followed.append(bool(FOLLOWING)))
    return followed


def is_left(model: Any) -> bool:
    """Return whether a hook of the first call is still there."""
    hooks = (*model._forward_pre_hooks.values(), *model._forward_hooks.values())
    return any(isinstance(hook, EagerHook) for hook in hooks)


def trained(model: Any, inputs: dict[str, Any]) -> None:
    """A step of training, in train mode."""
    output = model.train()(**inputs)
    loss = getattr(output, "loss", None)
    (output.logits_per_image.mean() if loss is None else loss).backward()


#: Layers that get adapters, in any model that has them.
ADAPTED = ("q_proj", "o_proj")


def alarms_of(make: Callable[[], Any], inputs: Callable[[Any], dict[str, Any]], mesh: Any, way: str) -> list[str]:
    """Return the alarms of one model in one way. A way that is not for this model gives no alarm."""
    model = make()
    given = inputs(model)
    if way == "words" and not model.can_generate():
        return []
    if way == "adapters":
        names = {path.rpartition(".")[2] for path, _ in model.named_modules()} & set(ADAPTED)
        if not names:
            return []
        model = adapted(model, sorted(names), dropout=0.1)
    with by_default():
        model = parallelize_model(model, mesh["tp"])
    if way == "units":
        fully_shard(model, mesh=mesh["dp"])
    if way.startswith("checkpointing") and model.supports_gradient_checkpointing:
        options = {"use_reentrant": way.endswith("reentrant")}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
    found, followed = [], watched(model)
    if way == "words":
        prompt = {name: x for name, x in given.items() if name != "labels"}
        found += heard(lambda: model.generate(**prompt, max_new_tokens=3, do_sample=False))
    found += heard(lambda: trained(model, given))
    assert any(followed) and (found or not is_left(model))
    return found


def zoo(ways: list[str], sizes: tuple[int, ...]) -> list[str]:
    """Return the alarms of all models."""
    mesh = device_mesh(*sizes, names=("dp", "tp"))
    alarms = []
    for name, make, inputs in models() if mesh is not None else ():
        for way in ways:
            try:
                found = alarms_of(make, inputs, mesh, way)
            except Exception as error:  # all are tried
                found = [f"{type(error).__name__}: {error}"]
            alarms += [f"{name}, {way}: {text}" for text in found if not IMPOSSIBLE.search(text)]
    return alarms


@pytest.mark.parametrize("ways", [["step"], ["words", "checkpointing"], ["checkpointing, reentrant", "adapters"]])
def test_on_two_ranks(pool: Any, ways: list[str]) -> None:
    for alarms in pool.run(2, zoo, ways, (1, 2)):
        assert not alarms


@pytest.mark.parametrize(("ways", "sizes"), [(["step"], (1, 4)), (["units"], (2, 2))])
def test_on_four_ranks(pool: Any, ways: list[str], sizes: tuple[int, ...]) -> None:
    for alarms in pool.run(4, zoo, ways, sizes):
        assert not alarms
