"""Shrunk random trainer programs that once gave wrong results or hung. `test_fuzz` runs them again."""

from __future__ import annotations

from hyper_parallel.testing.fuzz.training.programs import Action, Model, Program, Setup

__all__ = ["FOUND_TRAINERS"]


def _of(model: Model, setup: Setup, *actions: Action, data: str = "same", optimizer: str = "sgd") -> Program:
    return Program(1, model, (setup,), data, (), optimizer, actions)


#: The former error -> the program.
FOUND_TRAINERS: dict[str, Program] = {
    "a unit of which a tensor-parallel rank has nothing of a parameter": _of(
        Model(6, 5, ("mlp",)),
        Setup((1, 4), ("shard", "tp"), ("pair",)),
        ("step", 1, 1, 0.0),
        ("step", 2, 1, 0.0),
    ),
    "a unit of which a tensor-parallel rank has nothing": _of(
        Model(3, 4, ("linear", "mlp"), bias=False),
        Setup((1, 4), ("shard", "tp"), ("col", "pair"), (("block0",),), (None, None)),
        ("step", 1, 1, 0.0),
        ("step", 2, 1, 0.0),
    ),
    "gradients that were kept of a unit to which the next backward does not come": _of(
        Model(5, 4, ("rms", "linear")),
        Setup((2,), ("shard",), (), (("block0",),), (None, True)),
        ("accumulate", 1, "set_requires_gradient_sync"),
        ("order", (1,)),
        ("step", 2, 1, 0.0),
        data="parts",
    ),
    "gradients that were kept, and a backward that comes to no parameters": _of(
        Model(5, 4, ("linear",)),
        Setup((2,), ("shard",), (), (("block0",),), (None, None)),
        ("accumulate", 1, "set_requires_gradient_sync"),
        ("order", ()),
        ("step", 2, 1, 0.0),
        data="parts",
    ),
    "gradients of a distributed batch that were kept, and a backward that comes to no parameters": _of(
        Model(3, 7, ("mlp",), bias=False),
        Setup((3,), ("copy",)),
        ("accumulate", 1, "set_requires_gradient_sync"),
        ("order", ()),
        ("step", 2, 1, 0.0),
        data="batch",
    ),
    "gradients that were kept of parameters that some ranks have not used": _of(
        Model(5, 4, ("rms", "norm", "linear")),
        Setup((2,), ("shard",), (), (("block0", "block1"),), (None, True)),
        ("choose", (0, 2), (1, 2)),
        ("accumulate", 1, "set_requires_gradient_sync"),
        ("order", (2,)),
        ("step", 2, 1, 0.0),
        data="parts",
    ),
    "gradients that were reduced over shards alone of a unit to which the next backward does not come": _of(
        Model(5, 4, ("rms", "linear")),
        Setup((2, 2), ("rep", "shard"), (), (("block0",),), (None, True)),
        ("accumulate", 1, "set_requires_all_reduce"),
        ("order", (1,)),
        ("step", 2, 1, 0.0),
        data="parts",
    ),
    "a parameter of one element, saved with its optimizer": _of(
        Model(4, 1, ("mlp",)),
        Setup((3,), ("shard",)),
        ("step", 1, 1, 0.0),
        ("resume", 0),
        ("step", 2, 1, 0.0),
        optimizer="adamw",
    ),
    "a unit that is gathered by hand while it runs, and writes": _of(
        Model(4, 3, ("rms",), writer="counter"),
        Setup((2,), ("shard",)),
        ("inside", 59660147),
        ("eval", 1),
        ("step", 2, 1, 0.0),
    ),
    "a teacher that follows by copy_": _of(
        Model(3, 1, ("rms",), writer="teacher"),
        Setup((2,), ("shard",)),
        ("eval", 1),
        ("step", 2, 1, 0.0),
    ),
    "writes in a forward to a tensor made whole by hand, where a tensor-parallel rank has nothing": _of(
        Model(6, 4, ("linear",), writer="teacher"),
        Setup((1, 4), ("shard", "tp"), ("", "col")),
        ("unshard", 0, False),
        ("eval", 1),
        ("step", 2, 1, 0.0),
    ),
    "writes in a forward to a tensor made whole by hand, where a rank has no part": _of(
        Model(3, 4, ("linear",), writer="teacher"),
        Setup((4,), ("shard",)),
        ("unshard", 0, False),
        ("eval", 1),
        ("eval", 2),
        ("step", 3, 1, 0.0),
    ),
    "a rank that uses none of the parameters that are trained": _of(
        Model(5, 7, ("rms", "rms"), bias=False),
        Setup((2, 1), ("rep", "shard"), (), (), (None,)),
        ("choose", (0, 0), (1, 1, 1)),
        ("freeze", 1),
        ("step", 1, 1, 0.0),
    ),
    "experts that are computed again, in a unit of a batch": Program(
        8404166,
        Model(4, 4, ("experts",), experts=2, chosen=2, again="inside"),
        (Setup((2, 2), ("shard", "tp"), ("",), (), (None,), experts="tp"),),
        "batch",
        (),
        "sgd",
        (("step", 1, 1, 0.0),),
    ),
    # Right, and taken for wrong: an error of 6e-8 in the loaded values changes gradients of the second step by 3e-2.
    "values that are loaded before steps that enlarge each rounding": Program(
        9400247,
        Model(5, 2, ("linear", "linear", "linear", "experts"), bias=False, dtype="float32", experts=4, chosen=2),
        (Setup((2, 2), ("shard", "tp"), ("row", "col", "", ""), (), (None,), small_buckets=True, experts="inside"),),
        "batch",
        (),
        "sgd",
        (("load", 596108588, "write"), ("step", 207600105, 2, 0.0), ("step", 25084547, 2, 0.0)),
    ),
}
