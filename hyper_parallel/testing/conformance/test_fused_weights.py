"""Plans that shard a packed weight as one matrix: an error if the surrounding module shows that the weight is
packed."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from hyper_parallel import ColwiseParallel, Replicate, RowwiseParallel, parallelize_module, strict
from hyper_parallel.testing import spmd
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.conformance.test_errors import fails
from hyper_parallel.testing.extent import on_ranks


def holder(attributes: dict[str, int] | None = None, **sizes: tuple[int, int]) -> Any:
    """Return a module that has linear layers of these sizes (in, out), and these attributes."""
    adapter = get_adapter()
    module = adapter.Probe()
    for name, (n_in, n_out) in sizes.items():
        setattr(module, name, adapter.linear_module(n_in, n_out))
    for name, value in (attributes or {}).items():
        setattr(module, name, value)
    return module


def inside(module: Any, name: str = "attn") -> Any:
    """Return a module that has ``module`` as its child."""
    outer = get_adapter().Probe()
    setattr(outer, name, module)
    return outer


def apply(mesh: Any, module: Any, plan: dict[str, Any], in_strict: bool = False) -> None:
    with strict() if in_strict else nullcontext():
        parallelize_module(module, mesh, plan, src_data_rank=None)


ROW = RowwiseParallel()
#: Attributes of the attention module, the width of its input, and its projections.
ATTENTION = {
    "as in GPT": ({"n_head": 12}, 24, 72, 24, (12, 12, 12)),
    "with a size": ({"num_heads": 12, "head_dim": 4}, 24, 144, 48, (12, 12, 12)),
    "grouped": ({"num_heads": 12, "num_kv_heads": 4, "head_dim": 2}, 24, 40, 24, (12, 4, 4)),
}


@spmd.on_mesh()
def query_key_value(mesh: Any) -> None:
    for attributes, n_in, features, width, heads in ATTENTION.values():
        sizes = tuple(n * width // 12 for n in heads)

        def model(attributes: Any = attributes, n_in: int = n_in, n: int = features, width: int = width) -> Any:
            return inside(holder(attributes, qkv=(n_in, n), proj=(width, n_in)))

        words = (
            "'attn.qkv'",
            f"{features} output features",
            f"heads=({', '.join(map(str, heads))})",
            f"packed=({', '.join(map(str, sizes))})",
            "dimension 0",
            str(mesh),
        )
        for wrong in (ColwiseParallel(), ColwiseParallel(packed=2), ColwiseParallel(heads=4), "colwise"):
            for in_strict in (False, True):
                with fails(ValueError, *words):
                    apply(mesh, model(), {"attn.qkv": wrong, "attn.proj": ROW}, in_strict)
        for right in (
            ColwiseParallel(heads=heads),
            ColwiseParallel(packed=sizes),
            ColwiseParallel(packed=1),
            ColwiseParallel(packed=1, heads=heads[1]),
            ColwiseParallel(use_local_output=False),
            ColwiseParallel(output_layouts=Replicate()),
        ):
            apply(mesh, model(), {"attn.qkv": right, "attn.proj": ROW}, in_strict=True)
        with fails(ValueError, "'attn.qkv'", "heads="):  # the layer after attention is not needed to know
            apply(mesh, model(), {"attn.qkv": ColwiseParallel()})
    # The heads may be known further up only, where the name tells the kind of layer.
    outer = inside(holder(qkv=(24, 72), proj=(24, 24)))
    outer.n_head = 12
    with fails(ValueError, "'attn.qkv'", "heads=(12, 12, 12)", "Add use_local_output=False"):
        apply(mesh, outer, {"attn.qkv": ColwiseParallel(), "attn.proj": ROW})
    outer = inside(holder(wide=(24, 72), proj=(24, 24)))
    outer.n_head = 12
    with fails(ValueError, "'attn.wide'", "three times", "packed=3", "Add use_local_output=False"):
        apply(mesh, outer, {"attn.wide": ColwiseParallel(), "attn.proj": ROW})


@spmd.on_mesh()
def heads_of_packed(mesh: Any) -> None:
    """Check that the heads of a packed weight are checked too."""

    def model(attributes: dict[str, int], **sizes: tuple[int, int]) -> Any:
        return inside(holder(attributes, **{"proj": (24, 24), **sizes}))

    fine = mesh.size() in (1, 2, 3)
    for style in (ColwiseParallel(packed=3), ColwiseParallel(packed=1)):
        with nullcontext() if fine else fails(ValueError, "'attn.qkv'", "6 heads of", "4 ranks", "use_local_output"):
            apply(mesh, model({"n_head": 6}, qkv=(24, 72)), {"attn.qkv": style, "attn.proj": ROW})
    attributes = {"n_head": 12, "n_kv_heads": 6}
    with nullcontext() if fine else fails(ValueError, "'attn.kv'", "6 heads of 2", "n_kv_heads", "4 ranks"):
        apply(mesh, model(attributes, kv=(24, 24)), {"attn.kv": ColwiseParallel(packed=2), "attn.proj": ROW})
    # Parts that are no heads: left alone, as are heads of unknown size.
    apply(mesh, model(attributes, kv=(24, 20)), {"attn.kv": ColwiseParallel(packed=2), "attn.proj": ROW})
    apply(mesh, model({"n_head": 5}, kv=(24, 20)), {"attn.kv": ColwiseParallel(packed=2), "attn.proj": ROW})


@spmd.on_mesh()
def gate_and_up(mesh: Any) -> None:
    def model(**sizes: tuple[int, int]) -> Any:
        return inside(holder(**sizes), "mlp")

    for in_strict in (False, True):
        with fails(
            ValueError,
            "'mlp.up'",
            "24 output features",
            "twice the 12 input features of 'mlp.down'",
            "packed=2",
            str(mesh),
        ):
            apply(mesh, model(up=(6, 24), down=(12, 6)), {"mlp.up": ColwiseParallel(), "mlp.down": ROW}, in_strict)
    for style in (ColwiseParallel(packed=2), ColwiseParallel(packed=1), ColwiseParallel(use_local_output=False)):
        apply(mesh, model(up=(6, 24), down=(12, 6)), {"mlp.up": style, "mlp.down": ROW}, in_strict=True)
    # A layer next to it takes all of them.
    plan = {"mlp.up": ColwiseParallel(), "mlp.down": ROW, "mlp.other": ROW}
    apply(mesh, model(up=(6, 24), down=(12, 6), other=(24, 6)), plan, in_strict=True)


@spmd.on_mesh()
def no_false_alarm(mesh: Any) -> None:
    """Check that ordinary models raise no error inside `strict()`.

    The models have feed-forward layers of two to four times the width, and attention with wide heads. Outside
    `strict()`, weights may have the shape of a packed weight by chance.
    """
    for times in (1, 2, 3, 4):
        model = inside(holder({"n_head": 4}, up=(8, 8 * times), down=(8 * times, 8)), "mlp")
        apply(mesh, model, {"mlp.up": ColwiseParallel(), "mlp.down": ROW}, in_strict=True)
    for heads, key_value, size, n_in in ((12, 12, 2, 24), (24, 12, 4, 48), (24, 12, 8, 48)):
        for known in ({}, {"head_dim": size}):
            attributes = {"num_heads": heads, "num_kv_heads": key_value, **known}
            layers = {
                "q_proj": (n_in, heads * size),
                "k_proj": (n_in, key_value * size),
                "v_proj": (n_in, key_value * size),
                "o_proj": (heads * size, n_in),
            }
            plan = {f"attn.{name}_proj": ROW if name == "o" else ColwiseParallel() for name in "qkvo"}
            apply(mesh, inside(holder(attributes, **layers)), plan, in_strict=True)
    # Queries of another size than that of the attribute, compressed keys and values: as in DeepSeek's.
    attributes = {"num_heads": 12, "head_dim": 4}
    layers = {"q_b_proj": (24, 144), "kv_b_proj": (12, 192), "o_proj": (96, 24)}
    plan = {"attn.*_b_proj": ColwiseParallel(), "attn.o_proj": ROW}
    apply(mesh, inside(holder(attributes, **layers)), plan)
    # Queries with a gate, head by head.
    layers = {"q_proj": (48, 96), "k_proj": (48, 24), "v_proj": (48, 24), "o_proj": (48, 48)}
    plan = {"attn.[qkv]_proj": ColwiseParallel(), "attn.o_proj": ROW}
    apply(mesh, inside(holder({"num_heads": 12, "head_dim": 4}, **layers)), plan)
    for times in (2, 3):
        apply(mesh, inside(holder(any=(8, 8 * times))), {"attn.any": ColwiseParallel()})
    # Whose code takes them apart, or does not: the first call tells.
    for name in ("qkv", "gate_up_proj", "any"):
        apply(mesh, inside(holder(**{name: (12, 36)})), {f"attn.{name}": ColwiseParallel()}, in_strict=True)
    # Without a module around it; and a number of heads that fits nothing.
    parallelize_module(get_adapter().linear_module(8, 24), mesh, ColwiseParallel())
    apply(mesh, inside(holder({"n_head": 5}, qkv=(24, 72), proj=(24, 24))), {"attn.qkv": ColwiseParallel()})


@on_ranks(1, 2, 4, gate=(2, 4))
@pytest.mark.parametrize(
    "job",
    [query_key_value, heads_of_packed, gate_and_up, no_false_alarm],
    ids=lambda job: job.__name__,
)
def test_fused_weights(pool: Any, world_size: int, job: Any) -> None:
    pool.run(world_size, job)
