"""Layers of pictures where a rank has no samples, and norms with running statistics wherever their input lies."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel import (
    CommDebugMode,
    DTensor,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    fully_shard,
)
from hyper_parallel.testing.extent import everything, on_ranks
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import close

#: Layers, and the dimensions of their input.
LAYERS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, padding=1), (4, 6)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3), (4, 5, 5)),
    "conv2d of groups": (lambda: nn.Conv2d(4, 6, 3, groups=2, bias=False), (4, 5, 5)),
    "conv3d": (lambda: nn.Conv3d(4, 2, 2), (4, 3, 3, 3)),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(4, 6, 3), (4, 5, 5)),
    "max_pool1d": (lambda: nn.MaxPool1d(2), (4, 6)),
    "max_pool2d": (lambda: nn.MaxPool2d(2), (4, 6, 6)),
    "max_pool2d and back": (lambda: _Unpooled(), (4, 6, 6)),
    "avg_pool2d": (lambda: nn.AvgPool2d(2), (4, 6, 6)),
    "lp_pool2d": (lambda: nn.LPPool2d(2.0, 2), (4, 6, 6)),
    "adaptive_max_pool2d": (lambda: nn.AdaptiveMaxPool2d(2), (4, 6, 6)),
    "adaptive_avg_pool2d": (lambda: nn.AdaptiveAvgPool2d(2), (4, 6, 6)),
    "bilinear upsampling": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), (4, 3, 3)),
    "bicubic upsampling": (lambda: nn.Upsample(scale_factor=2, mode="bicubic"), (4, 3, 3)),
    "nearest upsampling": (lambda: nn.Upsample(scale_factor=2), (4, 3)),
    "group_norm": (lambda: nn.GroupNorm(2, 4), (4, 5)),
    "instance_norm": (lambda: nn.InstanceNorm2d(4, affine=True), (4, 3, 3)),
    "unfold": (lambda: nn.Unfold(2), (4, 3, 3)),
    "fold": (lambda: nn.Fold((3, 3), 2), (8, 4)),
    "pixel_shuffle": (lambda: nn.PixelShuffle(2), (4, 3, 3)),
    "pixel_unshuffle": (lambda: nn.PixelUnshuffle(2), (4, 4, 4)),
    "channel_shuffle": (lambda: nn.ChannelShuffle(2), (4, 3, 3)),
    "reflection_pad": (lambda: nn.ReflectionPad2d(1), (4, 3, 3)),
    "replication_pad": (lambda: nn.ReplicationPad1d(1), (4, 3)),
    "circular pad": (lambda: nn.CircularPad2d(1), (4, 3, 3)),
    "local_response_norm": (lambda: nn.LocalResponseNorm(2), (4, 3, 3)),
    "grid_sample": (lambda: _Sampled(), (4, 3, 3)),
    "bilinear": (lambda: _Bilinear(), (4,)),
    "cumsum": (lambda: _Of(lambda x: x.cumsum(1)), (4, 3)),
    "cumprod": (lambda: _Of(lambda x: x.cumprod(1)), (4, 3)),
    "sort": (lambda: _Of(lambda x: x.sort(2)[0]), (4, 3)),
    "fft": (lambda: _Of(lambda x: torch.fft.rfft(x).abs()), (4, 3)),
    "quantile": (lambda: _Of(lambda x: x.quantile(0.3, dim=1)), (4, 3)),
    "attention": (
        lambda: _Of(lambda x: F.scaled_dot_product_attention(x, x.tanh(), x.sin(), is_causal=True)),
        (2, 4, 3),
    ),
    "cosine_similarity": (lambda: _Similar(), (4, 3)),
}


class _Unpooled(nn.Module):
    def forward(self, x: Any) -> Any:
        y, places = F.max_pool2d(x, 2, return_indices=True)
        return F.max_unpool2d(y, places, 2)


class _Sampled(nn.Module):
    def forward(self, x: Any) -> Any:
        return F.grid_sample(x, x[:, :2].permute(0, 2, 3, 1).tanh(), align_corners=False)


class _Bilinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Bilinear(4, 4, 3)

    def forward(self, x: Any) -> Any:
        return self.inner(x, x.tanh())


def _attended(x: Any) -> Any:
    return F.scaled_dot_product_attention(x, x.tanh(), x.sin(), is_causal=True)


class _Of(nn.Module):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


class _Similar(nn.Module):
    def forward(self, x: Any) -> Any:
        return F.cosine_similarity(x, x.tanh(), dim=1)


def _compare(mesh: Any, single: Any, sharded: Any, x: torch.Tensor, placement: Any, what: str) -> Any:
    """Output and gradients; the second model is already distributed."""
    alone, given = (t.requires_grad_() for t in (x.clone(), distribute_tensor(x, mesh, [placement])))
    wanted = single(alone)
    torch.manual_seed(1)
    weights = torch.randn(wanted.shape, dtype=x.dtype)
    with CommDebugMode() as comm:
        found = sharded(given)
    (wanted * weights).sum().backward()
    (found * distribute_tensor(weights, mesh, None)).sum().full_tensor().backward()
    close(found.full_tensor(), wanted, what)
    close(given.grad.full_tensor(), alone.grad, f"gradient of the input of {what}")
    for (name, p), q in zip(single.named_parameters(), sharded.parameters(), strict=True):
        close(q.grad.full_tensor(), p.grad, f"gradient of {name} of {what}")
        p.grad = q.grad = None
    return found.placements[0], comm.get_comm_counts()


@on_mesh()
def layers(mesh: Any, samples: int) -> None:
    for name, (make, sizes) in LAYERS.items():
        torch.manual_seed(0)
        single = make().double()
        sharded = distribute_module(copy.deepcopy(single), mesh)
        x = torch.randn(samples, *sizes, dtype=torch.float64)
        placed, counts = _compare(mesh, single, sharded, x, Shard(0), f"{name} of {samples} samples")
        assert placed == Shard(0), (name, placed)
        assert not counts, (name, counts)


@pytest.mark.parametrize("samples", [5, pytest.param(1, marks=pytest.mark.nightly)])
def test_ranks_without_samples(pool: Any, samples: int) -> None:
    """Parameters stay sharded, nothing is gathered, and gradients are the single device's."""
    pool.run(4, layers, samples)


# ---------------------------------------------------------------------- running statistics
NORMS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "BatchNorm1d": (nn.BatchNorm1d, (4,)),
    "BatchNorm1d of sequences": (nn.BatchNorm1d, (4, 3)),
    "BatchNorm2d": (nn.BatchNorm2d, (4, 3, 2)),
    "BatchNorm3d": (nn.BatchNorm3d, (4, 2, 2, 3)),
    "InstanceNorm1d": (nn.InstanceNorm1d, (4, 3)),
    "InstanceNorm2d": (nn.InstanceNorm2d, (4, 3, 2)),
}
IN_GATE = ("BatchNorm1d", "BatchNorm2d", "InstanceNorm1d")
OPTIONS: list[dict[str, Any]] = [
    {"affine": True},
    {"affine": False, "momentum": 0.3},
    {"affine": True, "momentum": None},
    {"affine": True, "track_running_stats": False},
]


@on_mesh()
def statistics(mesh: Any, samples: int, plain: bool) -> None:
    """Training twice, evaluating, and training again."""
    for name, (make, sizes) in NORMS.items() if everything() else [(n, NORMS[n]) for n in IN_GATE]:
        for options in OPTIONS if everything() else OPTIONS[:1]:
            tracked = {"track_running_stats": True, **options}
            if tracked.get("momentum", 0) is None and name.startswith("Instance"):
                continue
            single = make(4, **tracked).double()
            for placement in (Replicate(), Shard(0), Shard(1), Shard(len(sizes))):
                reference = copy.deepcopy(single)
                sharded = nn.Sequential(copy.deepcopy(single))
                if plain:
                    fully_shard(sharded, mesh=mesh)
                else:
                    distribute_module(sharded, mesh)
                torch.manual_seed(samples)
                for train in (True, True, False, True):
                    x = torch.randn(samples, *sizes, dtype=torch.float64) * 2 + 1
                    reference.train(train), sharded.train(train)
                    what = f"{name}({tracked}) of {samples} samples placed {placement}, train={train}"
                    placed, _ = _compare(mesh, reference, sharded, x, placement, what)
                    if placement in (Replicate(), Shard(0), Shard(1)):
                        assert placed == placement, (what, placed)
                    for (key, b), c in zip(reference.named_buffers(), sharded.buffers(), strict=True):
                        assert isinstance(c, DTensor) is not plain
                        close(c if plain else c.full_tensor(), b, f"{key} of {what}")


@on_ranks(1, 2, 4, gate=(1, 4))
def test_running_statistics(pool: Any, world_size: int) -> None:
    """Running statistics are those of one device, in every mode and placement."""
    for samples in (5, 8, 3) if everything() else (5,):
        for plain in (True, False):
            if plain or world_size == 4 or everything():
                pool.run(world_size, statistics, samples, plain)
