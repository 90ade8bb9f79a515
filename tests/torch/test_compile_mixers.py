"""torch.compile of the blocks of transformers' models whose plans are made here: mixers, towers, retrieved experts."""

from __future__ import annotations

import copy
import os
import warnings
from importlib.util import find_spec
from typing import Any

import pytest
from torch._dynamo import lookup_backend

from hyper_parallel.integrations.huggingface import parallelize_model
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.compiled import fresh
from tests.torch.huggingface_table_models import ROWS, is_real, loss_of
from tests.torch.support import close

#: Title -> modules that leave the compiled code.
LEFT = {
    "Bamba": (),
    "Doge": (),
    "Jamba": ("b_layernorm", "c_layernorm", "dt_layernorm", "experts"),
    "Mamba 2": (),
    "ModernBERT": (),
    "Whisper": (),
}


@on_mesh()
def compiled_blocks(mesh: Any, title: str) -> None:
    """Two steps of a model whose blocks are compiled: loss and all gradients are a single process's."""
    fresh(mesh)
    row = next(row for row in ROWS if row.title == title)
    single = row.make().double()
    given = {name: x.double() if is_real(x) else x for name, x in row.inputs(single).items()}
    model = parallelize_model(copy.deepcopy(single), mesh)
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, inputs)

    blocks = [
        module
        for module in model.modules()
        if not {cls.__name__ for cls in type(module).__mro__}.isdisjoint(model._no_split_modules)
    ]
    for block in blocks:
        block.compile(backend=backend)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            model.zero_grad()
            found = loss_of(model(**given))
            found.backward()
    wanted = loss_of(single(**given))
    wanted.backward()
    close(found, wanted, title, 1e-6)
    for (name, p), q in zip(model.named_parameters(), single.named_parameters(), strict=True):
        assert (p.grad is None) == (q[1].grad is None), name
        if p.grad is not None:
            close(p.grad, q[1].grad, name, 1e-6)
    assert len(blocks) >= 2 and graphs
    texts = [str(one.message) for one in said if "runs outside of compiled code" in str(one.message)]
    for text in texts:
        assert any(f"{name}'" in text for name in LEFT[title]), text


@pytest.mark.nightly
@pytest.mark.skipif(os.environ["HYPER_PARALLEL_PLATFORM"] != "torch-cpu", reason="double precision, and CPU kernels")
@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("title", LEFT)
def test_compiled_blocks(pool: Any, title: str) -> None:
    pool.run(2, compiled_blocks, title)
