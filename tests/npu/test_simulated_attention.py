"""The simulator's kernels of npu_fusion_attention against torch's attention on the CPU, values and gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.simulated_npu import preload

pytestmark = pytest.mark.skipif(not preload.is_simulated(), reason="the NPUs here are real")
VERSIONS = ("npu_fusion_attention", "npu_fusion_attention_v2", "npu_fusion_attention_v3")


def operator(version: str) -> Any:
    import torch_npu

    return getattr(torch_npu, version)


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """(batch, heads, length, features) in another layout."""
    x = x if layout == "BNSD" else x.transpose(1, 2)
    x = x.flatten(2) if layout in ("BSH", "SBH") else x.flatten(0, 1) if layout == "TND" else x
    return (x.transpose(0, 1) if layout == "SBH" else x).contiguous()


def causal(rows: int, columns: int, shift: int = 0) -> torch.Tensor:
    return torch.ones(rows, columns, dtype=torch.bool).triu(1 + shift)


def prefixed(rows: int, columns: int, free: list[int]) -> torch.Tensor:
    block = causal(rows, columns, columns - rows)
    return torch.stack([block & (torch.arange(columns) >= n) for n in free])[:, None]


SIX, EIGHT = 6, 8
#: sparse_mode -> (options, blocked places)
SPARSE = {
    0: ({"atten_mask": causal(SIX, EIGHT)}, causal(SIX, EIGHT)),
    1: ({"atten_mask": causal(SIX, EIGHT, 1)[None, None].expand(2, 1, -1, -1).contiguous()}, causal(SIX, EIGHT, 1)),
    2: ({"atten_mask": causal(64, 64)}, causal(SIX, EIGHT)),
    3: ({"atten_mask": causal(64, 64)}, causal(SIX, EIGHT, 2)),
    4: (
        {"atten_mask": causal(64, 64), "before": 1, "after": 1},
        causal(SIX, EIGHT, 3) | ~causal(SIX, EIGHT, 0),
    ),
    5: ({"atten_mask": prefixed(SIX, EIGHT, [4, 6]), "prefix": [4, 6]}, prefixed(SIX, EIGHT, [4, 6])),
    6: ({"atten_mask": causal(96, 64), "prefix": [4, 6]}, prefixed(SIX, EIGHT, [4, 6])),
}


def reference(q: Any, k: Any, v: Any, blocked: Any, **options: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=~blocked, enable_gqa=True, **options)


def compare(version: str, layout: str, blocked: torch.Tensor, options: dict, cpu: list[torch.Tensor]) -> None:
    """Comparison with four heads in the query; ``cpu`` are (batch, heads, length, features)."""
    cpu = [x.requires_grad_() for x in cpu]
    npu = [laid_out(x.detach(), layout).npu().requires_grad_() for x in cpu]
    wanted = reference(*cpu, blocked)
    found = operator(version)(*npu, 4, layout, scale=1 / math.sqrt(cpu[0].shape[-1]), **options)
    cotangent = numbers(*wanted.shape, seed=9)
    wanted.backward(cotangent)
    found[0].backward(laid_out(cotangent, layout).npu())
    torch.testing.assert_close(found[0].detach().cpu(), laid_out(wanted.detach(), layout), rtol=1e-5, atol=1e-5)
    for x, y in zip(cpu, npu, strict=True):
        torch.testing.assert_close(y.grad.cpu(), laid_out(x.grad, layout), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sparse_mode", SPARSE)
@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "SBH"])
def test_layouts_and_masks(layout: str, sparse_mode: int) -> None:
    """Grouped heads, and values with fewer features than keys."""
    options, blocked = SPARSE[sparse_mode]
    version = VERSIONS[sparse_mode % 3]
    names = {"before": "pre_tokens", "after": "next_tokens"}
    if version != "npu_fusion_attention_v2":
        names = {"before": "pre_tockens", "after": "next_tockens"}
    options = {names.get(name, name): x.npu() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    cpu = [numbers(2, 4, SIX, 16), numbers(2, 2, EIGHT, 16, seed=1), numbers(2, 2, EIGHT, 8, seed=2)]
    compare(version, layout, blocked, {**options, "sparse_mode": sparse_mode}, cpu)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("sparse_mode", [0, 2, 7, 8])
def test_sequences_of_their_own_lengths(version: str, sparse_mode: int) -> None:
    """Layout TND: each sequence attends to itself only; one of no length, and tokens of none at the end."""
    ends = [3, 3, 8, 0]
    lengths: Any = torch.tensor(ends) if version.endswith("v3") else ends
    cpu = [numbers(1, n, 10, 8, seed=n).requires_grad_() for n in (4, 2, 2)]
    npu = [laid_out(x.detach(), "TND").npu().requires_grad_() for x in cpu]
    options: dict[str, Any] = {"actual_seq_qlen": lengths, "actual_seq_kvlen": lengths, "scale": 1 / math.sqrt(8)}
    if sparse_mode:
        options.update(atten_mask=causal(64, 64).npu(), sparse_mode=sparse_mode)
        names = ("pre_tokens", "next_tokens") if version.endswith("v2") else ("pre_tockens", "next_tockens")
        if sparse_mode in (7, 8):
            options.update(zip(names, (100, 0), strict=True))
    out, largest, total, *_ = operator(version)(*npu, 4, "TND", **options)
    free = torch.zeros(1, 1, dtype=torch.bool)
    wanted = torch.cat(
        [
            reference(*(x[:, :, a:b] for x in cpu), causal(b - a, b - a) if sparse_mode else free)
            for a, b in ((0, 3), (3, 8))
        ],
        2,
    )
    cotangent = numbers(1, 4, 10, 8, seed=9)
    wanted.backward(cotangent[:, :, :8])
    out.backward(laid_out(cotangent, "TND").npu())
    torch.testing.assert_close(out[:8].detach().cpu(), laid_out(wanted.detach(), "TND"), rtol=1e-5, atol=1e-5)
    assert out[8:].abs().sum() == 0
    for x, y in zip(cpu, npu, strict=True):
        torch.testing.assert_close(y.grad.cpu(), laid_out(x.grad, "TND"), rtol=1e-5, atol=1e-5)
    tokens_first = operator(version)(*npu, 4, "TND", **options, softmax_layout="TND")
    assert largest.shape == total.shape == tokens_first[1].shape == (10, 4, 8)
    for x, y in zip((largest, total), tokens_first[1:3], strict=True):
        torch.testing.assert_close(x.view(4, 10, 8).transpose(0, 1), y)


def test_bias_and_one_more_score() -> None:
    """A bias is added before scaling, or, of type 0, after it. A sink takes part in the sum, and both get gradients."""
    cpu = [numbers(2, 4, SIX, 8, seed=i).requires_grad_() for i in range(3)]
    pse, sink = numbers(1, 4, SIX, SIX, seed=4).requires_grad_(), numbers(4, seed=5).requires_grad_()
    npu = [x.detach().npu().requires_grad_() for x in (*cpu, pse, sink)]
    for pse_type, scale_of_pse in ((1, 0.5), (0, 1.0)):
        found = operator("npu_fusion_attention_v2")(
            *npu[:3], 4, "BNSD", pse=npu[3], sink=npu[4], scale=0.5, pse_type=pse_type
        )[0]
        scores = cpu[0] @ cpu[1].mT * 0.5 + pse * scale_of_pse
        whole = torch.cat([scores, sink[:, None, None].expand(2, 4, SIX, 1)], -1).softmax(-1)
        wanted = whole[..., :-1] @ cpu[2]
        torch.testing.assert_close(found.detach().cpu(), wanted.detach(), rtol=1e-5, atol=1e-5)
        cotangent = numbers(*wanted.shape, seed=9)
        wanted.backward(cotangent)
        found.backward(cotangent.npu())
    for x, y in zip((*cpu, pse, sink), npu, strict=True):
        torch.testing.assert_close(y.grad.cpu(), x.grad, rtol=1e-5, atol=1e-5)


def test_further_features() -> None:
    """query_rope and key_rope: as if they were concatenated."""
    mask, lengths = causal(5, 5), [5]
    cpu = [numbers(1, 4, 5, n, seed=n).requires_grad_() for n in (8, 6, 7)]
    ropes = [numbers(1, 4, 5, 4, seed=i).requires_grad_() for i in (20, 21)]
    npu = [laid_out(x.detach(), "TND").npu().requires_grad_() for x in (cpu[0], cpu[0], cpu[2], *ropes)]
    found = operator("npu_fusion_attention_v2")(
        *npu[:3], 4, "TND", query_rope=npu[3], key_rope=npu[4], scale=0.3, atten_mask=mask.npu(),
        actual_seq_qlen=lengths, actual_seq_kvlen=lengths,
    )[0]  # fmt: skip
    key = cpu[0].detach().clone().requires_grad_()
    wanted = reference(torch.cat([cpu[0], ropes[0]], -1), torch.cat([key, ropes[1]], -1), cpu[2], mask, scale=0.3)
    cotangent = numbers(*wanted.shape, seed=9)
    wanted.backward(cotangent)
    found.backward(laid_out(cotangent, "TND").npu())
    for x, y in zip((cpu[0], key, cpu[2], *ropes), npu, strict=True):
        torch.testing.assert_close(y.grad.cpu(), laid_out(x.grad, "TND"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("version", VERSIONS)
def test_dropout(version: str) -> None:
    """Weights are kept as often as asked, new ones each time, and backward uses those of its forward."""
    torch.manual_seed(3)
    length, keep = 32, 0.75
    cpu = [numbers(2, 4, length, 8, seed=i) for i in range(2)]
    identity = torch.eye(length).expand(2, 4, -1, -1).contiguous()
    npu = [x.npu().requires_grad_() for x in (*cpu, identity)]
    fused = operator(version)
    state = torch.npu.get_rng_state()  # type: ignore[attr-defined]
    found = fused(*npu, 4, "BNSD", keep_prob=keep)
    again = fused(*npu, 4, "BNSD", keep_prob=keep)
    assert not torch.equal(found[0], again[0])
    torch.npu.set_rng_state(state)  # type: ignore[attr-defined]
    assert torch.equal(found[0], fused(*npu, 4, "BNSD", keep_prob=keep)[0]), "the same state, the same noise"
    leaves = [x.clone().requires_grad_() for x in (*cpu, identity)]
    weights = (leaves[0] @ leaves[1].mT).softmax(-1)
    noise = (found[0].detach().cpu() / weights.detach()).round(decimals=3)
    assert noise.unique().tolist() == pytest.approx([0, 1 / keep], abs=2e-3)
    assert abs((noise > 0).float().mean().item() - keep) < 0.02
    wanted = weights * (noise > 0) / keep @ leaves[2]
    cotangent = numbers(*wanted.shape, seed=9)
    wanted.backward(cotangent)
    found[0].backward(cotangent.npu())
    for x, y in zip(leaves, npu, strict=True):
        torch.testing.assert_close(y.grad.cpu(), x.grad, rtol=1e-4, atol=1e-5)
    if version != "npu_fusion_attention_v3":
        seed, offset, count = found[4:]
        assert count == noise.numel()
        own = fused(*npu, 4, "BNSD", keep_prob=keep, seed=seed, offset=offset)[0]
        assert torch.equal(found[0], own), "a seed and an offset that are given"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"input_layout": "NBSD"}, "input_layout 'NBSD' is none of BNSD, BSND, BSH, SBH, TND"),
        ({"input_layout": "TND"}, "belong to the layout TND"),
        ({"actual_seq_qlen": [2], "actual_seq_kvlen": [2]}, "belong to the layout TND"),
        ({"sparse_mode": 7}, "sparse_mode 7 does not exist with the layout BNSD"),
        ({"keep_prob": 0.0}, "keep_prob must be in"),
        ({"pse_type": 2}, "is simulated with pse_type 0 and 1, not 2"),
        ({"dropout_mask": torch.ones(4)}, "is simulated without padding_mask, and draws its dropout_mask itself"),
        (
            {"input_layout": "TND", "actual_seq_qlen": [2], "actual_seq_kvlen": [2], "pse": torch.ones(1, 1, 2, 2)},
            "is simulated without pse in the layout TND",
        ),
    ],
    ids=str,
)
def test_refusals(options: dict, said: str) -> None:
    x = torch.ones(1, 1, 2, 4).npu()
    options = {name: y.npu() if isinstance(y, torch.Tensor) else y for name, y in options.items()}
    layout = options.pop("input_layout", "BNSD")
    with pytest.raises(ValueError, match=said):
        operator("npu_fusion_attention_v2")(x, x, x, 1, layout, **options)
