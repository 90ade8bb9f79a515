"""Plans by the classes of blocks: gradients, words and refusals of such models, and the table of all models."""

from __future__ import annotations

import copy
import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from hyper_parallel import DTensor, Shard, check_plain_code, fully_shard, strict
from hyper_parallel.integrations.huggingface import parallelize_model
from hyper_parallel.testing.spmd import device_mesh, on_mesh
from tests.support.model_table import TOLERANCE
from tests.torch.huggingface_jobs import compare_gradients
from tests.torch.huggingface_models import build
from tests.torch.huggingface_table_models import BLOCKS, ROWS, compare
from tests.torch.support import close

pytestmark = [
    pytest.mark.skipif(
        find_spec("transformers") is None,
        reason="transformers is not installed: platform/torch-cpu/requirements.txt has the version that the gate uses",
    ),
    pytest.mark.skipif(
        os.environ["HYPER_PARALLEL_PLATFORM"] != "torch-cpu", reason="devices take several times as long for the same"
    ),
]

#: The rows of the gate: a scan by channels with norms, one by heads, a made mask, experts with biases, fused weights.
GATE = ["Jamba", "Mamba 2", "Doge", "gpt-oss", "ModernBERT"]


def row_of(title: str) -> Any:
    return next(row for row in ROWS if row.title == title)


@on_mesh()
def rows(mesh: Any, titles: list[str]) -> list[str]:
    """Compare rows with a single process; gives the failures."""
    wrong = []
    for title in titles:
        try:
            with strict():
                found = compare(row_of(title), mesh)
        except Exception as error:  # all are tried
            wrong.append(f"{title}: {type(error).__name__}: {error}")
            continue
        if not (max(found.loss, found.gradients) < TOLERANCE and found.sharded > 0.5):
            wrong.append(f"{title}: {found}")
    return wrong


def test_gradients_are_those_of_a_single_process(pool: Any) -> None:
    assert pool.run(2, rows, GATE)[0] == []


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_models_of_the_table(pool: Any, ranks: int) -> None:
    assert pool.run(ranks, rows, [row.title for row in ROWS])[0] == []


@on_mesh()
def followed(mesh: Any, titles: list[str]) -> list[str]:
    """The plain code between the layers is right, as far as it is followed; gives the reports of others."""
    found = []
    for title in titles:
        single = row_of(title).make()
        given = row_of(title).inputs(single)
        model = parallelize_model(single, mesh)
        with check_plain_code(model) as report:
            model(**given).loss.backward()
        found += [] if report and report.asked else [f"{title}: {report}"]
    return found


def test_plain_code_is_followed(pool: Any) -> None:
    assert pool.run(2, followed, ["Mamba", "Mamba 2", "gpt-oss", "Apertus"])[0] == []


@on_mesh()
def in_training(mesh: Any, title: str) -> None:
    """In training no kernel for a whole mixer is asked, which would read parts as the whole."""
    import transformers

    def whole_mixer(*args: Any, **options: Any) -> None:
        raise AssertionError("the kernel of a whole mixer was called with parts")

    row = row_of(title)
    single = row.make().train()
    model = parallelize_model(copy.deepcopy(single), mesh)
    single(**row.inputs(single)).loss.backward()
    names = {"mamba": "mamba_inner_fn", "mamba2": "mamba2_split_conv1d_scan_combined"}
    kind = single.config.model_type
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(getattr(transformers.models, kind).__dict__[f"modeling_{kind}"], names[kind], whole_mixer)
        model(**row.inputs(model)).loss.backward()
    assert all(module.training for module in model.modules())
    compare_gradients(single, model, 1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("title", ["Mamba", "Mamba 2"])
def test_training_asks_no_kernel_for_a_whole_mixer(pool: Any, title: str) -> None:
    pool.run(2, in_training, title)


@on_mesh()
def words(mesh: Any) -> None:
    """Greedy words with each rank's part of states and caches."""
    for row in BLOCKS:
        single = row.make()
        if not single.can_generate() or row.title == "Llama 4 with vision":
            continue
        inputs = {name: x for name, x in row.inputs(single).items() if name != "labels"}
        model = parallelize_model(copy.deepcopy(single), mesh)
        made = [one.generate(**inputs, max_new_tokens=5, do_sample=False) for one in (single, model)]
        assert torch.equal(*made), (row.title, made)


@pytest.mark.nightly
def test_words(pool: Any) -> None:
    pool.run(2, words)


def with_data_parallel(title: str) -> None:
    """Mixers under fully_shard over other ranks than those that divide their channels."""
    mesh = device_mesh(2, 2, names=("dp", "tp"))
    row = row_of(title)
    single = row.make()
    model = parallelize_model(copy.deepcopy(single), mesh["tp"])
    for layer in model.base_model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    for one in (single, model):
        one(**row.inputs(one)).loss.backward()  # the same batch on all ranks: the average is that of one
    for (name, p), q in zip(model.named_parameters(), single.parameters(), strict=True):
        assert isinstance(p.grad, DTensor), name
        close(p.grad, q.grad, name, 1e-4)


@pytest.mark.nightly
@pytest.mark.parametrize("title", ["Jamba", "Bamba"])
def test_mixers_under_fully_shard(pool: Any, title: str) -> None:
    pool.run(4, with_data_parallel, title)


@on_mesh()
def refused(mesh: Any) -> None:
    """Blocks that the ranks cannot share are refused, and so are changed blocks. Both stay as they are."""
    with pytest.raises(ValueError, match="15 features inside each expert, which do not divide over 2 ranks"):
        parallelize_model(build("gpt oss", intermediate_size=15), mesh)
    model = row_of("Mamba").make()
    model.backbone.layers[0].mixer.gain = torch.nn.Parameter(torch.ones(64))
    with pytest.raises(ValueError, match="has the parameters 'gain', which the library's plan for it lacks"):
        parallelize_model(model, mesh)
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    del model.backbone.layers[0].mixer.gain
    parallelize_model(model, mesh, plan={"lm_head": None})
    mixer = model.backbone.layers[0].mixer
    assert mixer.A_log.placements == mixer.conv1d.weight.placements == (Shard(0),)


def test_refused(pool: Any) -> None:
    pool.run(2, refused)
