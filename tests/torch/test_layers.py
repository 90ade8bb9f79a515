"""Layers of `torch.nn` on shards: values, gradients and running statistics are those of one device, and nothing is
gathered that need not be."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hyper_parallel import CommDebugMode, DTensor, Partial, Replicate, Shard, strict
from hyper_parallel.testing.extent import on_ranks
from hyper_parallel.testing.spmd import on_mesh
from tests.torch.support import close, device, randn, shard

#: Letters -> size. 5 samples are uneven on three ranks, and leave one of four with nothing.
_SIZES = {"n": 5, "c": 8, "o": 4, "h": 6, "w": 5, "l": 7, "k": 3, "2": 2, "4": 4, "1": 1, "q": 16, "s": 3}

#: name -> (letters of the sizes of the tensors, call). Shapes that begin with "#" are of whole numbers.
CALLS: dict[str, tuple[str, Callable[..., Any]]] = {
    "conv1d": ("ncl ock o", lambda x, w, b: F.conv1d(x, w, b, padding=1)),
    "conv2d": ("nchw ockk o", lambda x, w, b: F.conv2d(x, w, b, stride=(2, 1), padding="valid", dilation=1)),
    "conv2d with groups": ("nchw q4kk q", lambda x, w, b: F.conv2d(x, w, b, padding="same", groups=2)),
    "conv2d of each channel": ("nchw c1kk c", lambda x, w, b: F.conv2d(x, w, b, groups=8)),
    "conv2d, equal channels in and out": ("nchw c4kk c", lambda x, w, b: F.conv2d(x, w, b, groups=2)),
    "conv2d without a batch": ("chw ockk o", F.conv2d),
    "conv3d": ("nchww ockkk", F.conv3d),
    "conv_transpose1d": ("ncl cok o", lambda x, w, b: F.conv_transpose1d(x, w, b, stride=2)),
    "conv_transpose2d": ("nchw cokk o", lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1, 1)),
    "conv_transpose2d with groups": ("nchw c4kk q", lambda x, w, b: F.conv_transpose2d(x, w, b, groups=4)),
    "max_pool2d": ("nchw", lambda x: F.max_pool2d(x, 2, ceil_mode=True)),
    "max_pool1d with places": ("ncl", lambda x: F.max_pool1d(x, 3, stride=2, return_indices=True)[0]),
    "max_unpool2d": ("nchw", lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2, output_size=(6, 5))),
    "avg_pool2d": ("nchw", lambda x: F.avg_pool2d(x, 3, padding=1, count_include_pad=False)),
    "lp_pool2d": ("nchw", lambda x: F.lp_pool2d(x.abs(), 3.0, 2)),
    "adaptive_avg_pool2d": ("nchw", lambda x: F.adaptive_avg_pool2d(x, (3, None))),
    "adaptive_max_pool1d": ("ncl", lambda x: F.adaptive_max_pool1d(x, 3)),
    "fractional_max_pool2d": ("nchw", lambda x: F.fractional_max_pool2d(x, 2, output_ratio=(0.5, 0.5))),
    "fractional_max_pool3d": ("chww", lambda x: F.fractional_max_pool3d(x, 2, output_size=(2, 2, 2))),
    "interpolate": ("nchw", lambda x: F.interpolate(x, scale_factor=1.5, mode="bicubic")),
    "upsample": ("ncl", lambda x: torch.nn.Upsample(size=9, mode="linear", align_corners=True)(x)),
    "pixel_shuffle": ("nqhw", lambda x: F.pixel_shuffle(x, 2)),
    "pixel_unshuffle": ("nchh", lambda x: F.pixel_unshuffle(x, 2)),
    "channel_shuffle": ("nchw", lambda x: F.channel_shuffle(x, 4)),
    "unfold and fold": ("nchw", lambda x: F.fold(F.unfold(x, 3, padding=1), (6, 5), 3, padding=1)),
    "grid_sample": ("nchw nhw2", lambda x, g: F.grid_sample(x, g.tanh(), align_corners=False)),
    "affine_grid": ("n2k", lambda x: F.affine_grid(x, (5, 8, 4, 3), align_corners=False)),
    "group_norm": ("nchw c c", lambda x, w, b: F.group_norm(x, 4, w, b)),
    "local_response_norm": ("nchw", lambda x: F.local_response_norm(x, 3)),
    "instance_norm": ("nchw c c", lambda x, w, b: F.instance_norm(x, weight=w, bias=b)),
    "batch_norm": ("nchw c c", lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True)),
    "batch_norm without parameters": ("nc", lambda x: F.batch_norm(x, None, None, training=True)),
    "batch_norm of running statistics": ("nchw c", lambda x, m: F.batch_norm(x, m.detach(), m.detach().abs() + 1)),
    "dropout1d": ("ncl", lambda x: F.dropout1d(x, 0.4)),
    "dropout2d": ("nchw", lambda x: F.dropout2d(x, 0.4)),
    "dropout3d": ("chww", lambda x: F.dropout3d(x, 0.4)),
    "alpha_dropout": ("nc", lambda x: F.alpha_dropout(x, 0.4, training=True)),
    "alpha_dropout of everything": ("nc", lambda x: F.alpha_dropout(x, 1.0, training=True)),
    "feature_alpha_dropout": ("ncl", lambda x: F.feature_alpha_dropout(x, 0.4, training=True)),
    "alpha_dropout in evaluation": ("nc", lambda x: torch.alpha_dropout(x, 0.4, train=False) * 2),
    "rrelu in evaluation": ("nc", F.rrelu),
    "glu": ("nch", lambda x: F.glu(x, 1)),
    "softmin": ("nc", lambda x: F.softmin(x, 1)),
    "prelu with a weight for each channel": ("nchw c", F.prelu),
    "prelu with one weight": ("nch 1", F.prelu),
    "gumbel_softmax": ("nc", lambda x: F.gumbel_softmax(x, tau=0.5)),
    "normalize": ("nc", F.normalize),
    "bilinear": ("nc nk ock o", F.bilinear),
    "cosine_similarity": ("nch 1ch", lambda x, y: F.cosine_similarity(x, y, dim=1)),
    "pairwise_distance": ("nc nc", lambda x, y: F.pairwise_distance(x, y, p=3.0)),
    "sum of bags": ("qc #nk nk", lambda w, i, p: F.embedding_bag(i, w, mode="sum", per_sample_weights=p)),
    "mean of bags": ("qc #nk", lambda w, i: F.embedding_bag(i, w, padding_idx=2)),
    "sum of padded bags": ("qc #nk", lambda w, i: F.embedding_bag(i, w, mode="sum", padding_idx=-14)),
    "sum of bags past a row of NaN": (
        "qc #nk nk",
        lambda w, i, p: F.embedding_bag(i, _with_nan(w), mode="sum", padding_idx=2, per_sample_weights=p),
    ),
    "mean of bags past a row of NaN": ("qc #nk", lambda w, i: F.embedding_bag(i, _with_nan(w), padding_idx=2)),
    "mean of whole bags": ("qc #nk", lambda w, i: F.embedding_bag(i, w)),
    "largest of bags": ("qc #nk", lambda w, i: F.embedding_bag(i, w, mode="max")),
    "bags of several sizes": ("qc #l", lambda w, i: F.embedding_bag(i, w, _starts(i))),
    "margin_ranking_loss": ("nc nc nc", lambda x, y, t: F.margin_ranking_loss(x, y, t.sign(), margin=0.5)),
    "cosine_embedding_loss": ("nc nc n", lambda x, y, t: F.cosine_embedding_loss(x, y, t.sign(), margin=0.1)),
    "triplet_margin_loss": ("nc nc nc", lambda x, y, z: F.triplet_margin_loss(x, y, z, swap=True)),
    "triplets by a distance": (
        "nc nc nc",
        lambda x, y, z: F.triplet_margin_with_distance_loss(x, y, z, reduction="sum"),
    ),
    "gaussian_nll_loss": ("nc nc nc", lambda x, y, v: F.gaussian_nll_loss(x, y, v.abs(), full=True)),
    "gaussian_nll_loss, a variance a sample": ("nc nc n", lambda x, y, v: F.gaussian_nll_loss(x, y, v.abs())),
    "gaussian_nll_loss, one variance": ("nc nc", lambda x, y: F.gaussian_nll_loss(x, y, 2.0, reduction="none")),
    "poisson_nll_loss": ("nc nc", lambda x, y: F.poisson_nll_loss(x, y.abs())),
    "hinge_embedding_loss": ("nc nc", lambda x, y: F.hinge_embedding_loss(x, y.sign(), reduction="sum")),
    "multi_margin_loss": ("nc #n c", lambda x, i, w: F.multi_margin_loss(x, i, weight=w.detach().abs())),
    "multilabel_margin_loss": ("nq #nq", lambda x, i: F.multilabel_margin_loss(x, i - 1, reduction="sum")),
    "multilabel_soft_margin_loss": ("nc nc", lambda x, y: F.multilabel_soft_margin_loss(x, y.detach().sigmoid())),
    "linear_cross_entropy": ("nc oc #n o", lambda x, w, i, b: F.linear_cross_entropy(x, w, i % 4, linear_bias=b)),
    "ctc_loss": ("lno #n2", lambda x, i: F.ctc_loss(x.log_softmax(2), i % 3 + 1, (7,) * 5, (2, 1, 2, 2, 1))),
    "ctc_loss, summed": ("lno #n2 #n", lambda x, i, n: F.ctc_loss(x.log_softmax(2), i % 3 + 1, n * 0 + 7, n * 0 + 2)),
    "lstm_cell": ("nc nk nk", lambda x, h, c: _cell(torch.nn.LSTMCell, x, (h, c))[0]),
    "gru_cell": ("nc nk", lambda x, h: _cell(torch.nn.GRUCell, x, h)),
    "rnn_cell": ("nc nk", lambda x, h: _cell(torch.nn.RNNCell, x, h)),
}
ON_NPU = os.environ.get("HYPER_PARALLEL_PLATFORM") == "torch-npu"
without_npu = pytest.mark.skipif(ON_NPU, reason="its simulation has no kernels for some layers")
#: Calls of a version of torch that is not the oldest.
_NEW = {"linear_cross_entropy": hasattr(F, "linear_cross_entropy")}


def _with_nan(weight: torch.Tensor) -> torch.Tensor:
    """Return rows whose third is NaN."""
    return weight.masked_fill(torch.ones_like(weight).cumsum(0) == 3, torch.nan)


def _starts(ids: Any) -> Any:
    starts = torch.tensor([0, 2, 2, 5], device=device())
    return shard(starts, ids.device_mesh, Replicate()) if isinstance(ids, DTensor) else starts


def _cell(kind: type, x: Any, states: Any) -> Any:
    torch.manual_seed(3)
    cell = kind(8, 3).to(device())
    if isinstance(x, DTensor):
        for name, parameter in list(cell.named_parameters()):
            setattr(cell, name, torch.nn.Parameter(shard(parameter.detach(), x.device_mesh, Replicate())))
    return cell(x, states)


def tensors(letters: str) -> list[torch.Tensor]:
    made = []
    for seed, word in enumerate(letters.split()):
        shape = [_SIZES[letter] for letter in word.lstrip("#")]
        whole = torch.arange(int(torch.tensor(shape).prod()), device=device()).reshape(shape) * 7 % 8
        made.append(whole if word[0] == "#" else randn(*shape, seed=seed))
    return made


def placed(letters: str) -> Iterator[list[Any]]:
    """Placements of all tensors: everything with a letter sharded, for each letter; the first one alone; a sum."""
    words = [word.lstrip("#") for word in letters.split()]
    for letter in dict.fromkeys(words[0] + "".join(words)):
        yield [Shard(word.index(letter)) if letter in word else Replicate() for word in words]
    yield [Shard(0), *(Replicate() for _ in words[1:])]
    yield [Partial(), *(Replicate() for _ in words[1:])]


def run(call: Callable[..., Any], given: list[Any]) -> tuple[Any, list[Any]]:
    leaves = [x.requires_grad_() for x in given if x.is_floating_point()]
    torch.manual_seed(0)
    value = call(*given)
    weights = torch.linspace(0.5, 1.5, value.numel(), device=device()).reshape(tuple(value.shape))
    if isinstance(value, DTensor):
        weights = shard(weights, value.device_mesh, *(Replicate(),) * value.device_mesh.ndim)
    (value * weights).sum().backward()
    return value, [x.grad for x in leaves]


def made(x: torch.Tensor, mesh: Any, *placements: Any) -> Any:
    """A new leaf; a sum has different summands."""
    if placements == (Partial(),):
        part = x if mesh.get_local_rank(0) == 0 else torch.zeros_like(x)
        return DTensor.from_local(part + (mesh.get_local_rank(0) * 2 - mesh.size() + 1), mesh, placements)
    return shard(x, mesh, *placements).detach()


def compare(mesh: Any, what: str, call: Callable[..., Any], letters: str, placements: list[list[Any]]) -> None:
    wanted, gradients = run(call, tensors(letters))
    given = [made(x, mesh, *p) for x, p in zip(tensors(letters), placements, strict=True)]
    with strict():
        value, got = run(call, given)
    assert value.dtype is wanted.dtype and tuple(value.shape) == tuple(wanted.shape), what
    close(value, wanted, what, tolerance=1e-4)
    for i, (one, other) in enumerate(zip(got, gradients, strict=True)):
        assert (one is None) == (other is None), what
        if one is not None:
            close(one, other, f"{what}: gradient {i}", tolerance=1e-3)


def has_kernels(call: Callable[..., Any], letters: str) -> bool:
    """Return whether one device can compute it: the simulated NPU lacks kernels of some layers."""
    try:
        run(call, tensors(letters))
    except (NotImplementedError, RuntimeError):
        return not ON_NPU
    return True


@on_mesh()
def calls(mesh: Any) -> list[str]:
    """Gives the names of the calls that were compared."""
    warnings.simplefilter("ignore")
    tried = [name for name, (letters, call) in CALLS.items() if _NEW.get(name, True) and has_kernels(call, letters)]
    for name in tried:
        letters, call = CALLS[name]
        for placements in placed(letters):
            compare(mesh, f"{name}, placed {placements}", call, letters, [[p] for p in placements])
    return tried


@on_mesh(2, 2)
def calls_on_a_grid(mesh: Any) -> None:
    """Batch and channels, on a mesh dimension each."""
    warnings.simplefilter("ignore")
    for name in ("conv2d", "conv2d with groups", "conv_transpose2d", "group_norm", "batch_norm", "instance_norm"):
        letters, call = CALLS[name]
        for channel in "co":
            words = [word.lstrip("#") for word in letters.split()]
            placements = [
                [Shard(word.index(letter)) if letter in word else Replicate() for letter in ("n", channel)]
                for word in words
            ]
            compare(mesh, f"{name}, placed {placements}", call, letters, placements)


@on_ranks(3, 4, name="ranks")
def test_values_and_gradients(pool: Any, ranks: int) -> None:
    for tried in pool.run(ranks, calls):
        assert len(tried) > (0.5 if ON_NPU else 0.95) * len(CALLS), tried


def test_on_a_grid(pool: Any) -> None:
    pool.run(4, calls_on_a_grid)


# ------------------------------------------------------------------------------------------------ messages
#: name of a call -> placements of its tensors -> collectives in forward, in backward.
COUNTS: dict[str, list[tuple[list[Any], dict[str, int], dict[str, int]]]] = {
    "conv2d": [
        ([Shard(0), Replicate(), Replicate()], {}, {"all_reduce": 2}),  # the gradients of weight and bias
        ([Replicate(), Shard(0), Shard(0)], {}, {"all_reduce": 1}),  # the gradient of the input
        ([Shard(1), Shard(1), Replicate()], {}, {}),  # gives a sum
    ],
    "conv_transpose2d": [([Replicate(), Shard(1), Shard(0)], {}, {"all_reduce": 1})],
    "conv2d with groups": [([Shard(1), Shard(0), Shard(0)], {}, {})],
    "max_pool2d": [([Shard(0)], {}, {}), ([Shard(1)], {}, {})],
    "interpolate": [([Shard(0)], {}, {}), ([Shard(1)], {}, {})],
    "group_norm": [([Shard(1), Shard(0), Shard(0)], {}, {})],
    "batch_norm": [
        ([Shard(1), Shard(0), Shard(0)], {}, {}),
        ([Shard(0), Replicate(), Replicate()], {"all_reduce": 2}, {"all_reduce": 4}),
    ],
    "dropout2d": [([Shard(0)], {}, {})],
}


@on_mesh()
def counts(mesh: Any) -> None:
    for name, rows in COUNTS.items():
        letters, call = CALLS[name]
        for placements, forward, backward in rows:
            # Sizes that four ranks divide.
            given = [x[:4] if x.dim() > 3 and len(x) == 5 else x for x in tensors(letters)]
            xs = [shard(x, mesh, p).detach().requires_grad_() for x, p in zip(given, placements, strict=True)]
            call(*xs)  # ranks agree about their generators once
            with CommDebugMode() as mode:
                y = call(*xs)
            assert mode.get_comm_counts() == forward, f"{name} {placements}: {mode.get_comm_counts()}"
            cotangent = shard(torch.ones(tuple(y.shape), device=device()), mesh, *y._layout.cotangent.placements)
            with CommDebugMode() as mode:
                y.backward(cotangent)
            assert mode.get_comm_counts() == backward, f"{name} {placements} backward: {mode.get_comm_counts()}"


def test_messages(pool: Any) -> None:
    pool.run(2, counts)
