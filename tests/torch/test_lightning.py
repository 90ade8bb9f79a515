"""The programs of docs/lightning.md: with this library's names and with torch's, they print the same losses."""

from __future__ import annotations

import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hyper_parallel import ColwiseParallel, parallelize_module
from hyper_parallel.platform.torch.native.checkpoints import finds_distributed
from hyper_parallel.testing.spmd import on_mesh
from tests.support.programs import ROOT, program_of, run_ranks
from tests.torch.support import device

pytestmark = pytest.mark.skipif(
    os.environ["HYPER_PARALLEL_PLATFORM"] != "torch-cpu", reason="the programs are for processes on CPUs"
)

PAGE = ROOT / "docs" / "lightning.md"
OURS = "from hyper_parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module"
THEIRS = (
    "from torch.distributed.fsdp import fully_shard\n"
    "from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module"
)
#: Lightning knows torchrun by these.
LAUNCHED = {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "4"}


def losses_of(folder: Path, source: str) -> dict[str, list[float]]:
    """Run a program on four ranks. Gives losses by rank and step, in the order in which they were printed."""
    folder.mkdir()
    script = folder / "program.py"
    script.write_text(source)
    ended = run_ranks([script], 4, cwd=folder, **LAUNCHED)
    assert [rank.status for rank in ended] == [0] * 4, ended
    found: dict[str, list[float]] = {}
    for rank in ended:
        for place, loss in re.findall(r"^(rank \d, step \d+): ([\d.]+)$", rank.out, re.MULTILINE):
            found.setdefault(place, []).append(float(loss))
    return found


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is in platform/torch-cpu/requirements.txt")
@pytest.mark.parametrize(
    ("name", "changes", "count"),
    [
        ("lit.py", {}, 24),
        (
            "lit.py",
            {
                "data_parallel_size=2,": "data_parallel_size=2, save_distributed_checkpoint=False,",
                '"parts"': '"whole.ckpt"',
                "logger=False": "logger=False, gradient_clip_val=0.1",
            },
            24,
        ),
        ("fabric.py", {}, 16),
        (
            "fabric.py",
            {
                "model = fabric.setup(nn": "with fabric.init_module(empty_init=True):\n    model = (nn",
                "optimizer = fabric": "model = fabric.setup(model)\noptimizer = fabric",
            },
            16,
        ),
    ],
    ids=["trainer", "trainer, whole file, clipped", "fabric", "fabric, on meta"],
)
def test_losses_are_those_with_torchs_functions(tmp_path: Path, name: str, changes: dict[str, str], count: int) -> None:
    """With torch's functions, first values on meta depend on ranks: that is compared with a model in memory."""
    source = plain = program_of(PAGE, name)
    for old, new in changes.items():
        assert old in source, old
        source = source.replace(old, new)
    assert OURS in source
    got = losses_of(tmp_path / "ours", source)
    wanted = losses_of(tmp_path / "theirs", plain if "empty_init" in source else source.replace(OURS, THEIRS))
    assert sum(map(len, got.values())) == count and got.keys() == wanted.keys()
    for place, losses in wanted.items():
        assert got[place] == pytest.approx(losses, abs=1e-4), place


@on_mesh()
def found(mesh: Any) -> None:
    """Lightning's question whether there are distributed parameters, and its names of an optimizer's parameters."""
    from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType

    model = nn.Sequential(nn.Linear(4, 4)).to(device())
    assert not finds_distributed(lambda module: False, model) and not finds_distributed(lambda module: False, 3)
    parallelize_module(model, mesh, {"0": ColwiseParallel()})
    assert finds_distributed(lambda module: False, model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4, device=device())).sum().backward()
    optimizer.step()
    named = FullyShardedDataParallel.rekey_optim_state_dict(optimizer.state_dict(), OptimStateKeyType.PARAM_NAME, model)
    assert sorted(named["state"]) == ["0.bias", "0.weight"]


def test_what_lightning_asks(pool: Any) -> None:
    pool.run(2, found)
