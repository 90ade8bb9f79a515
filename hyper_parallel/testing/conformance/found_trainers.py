"""Random programs of trainers that once were wrong or hung, as small as the shrinker made them; see `test_fuzz`."""

from __future__ import annotations

from hyper_parallel.testing.fuzz.training.programs import Model, Program, Setup

__all__ = ["FOUND_TRAINERS"]

#: What was wrong -> the program.
FOUND_TRAINERS: dict[str, Program] = {
    "a unit of which a tensor-parallel rank has nothing of a parameter": Program(
        1,
        Model(6, 5, ("mlp",)),
        (Setup((1, 4), ("shard", "tp"), ("pair",)),),
        "same",
        (),
        "sgd",
        (("step", 1, 1, 0.0), ("step", 2, 1, 0.0)),
    ),
}
