"""Training programs as data: a model, its distributions, and the actions of a trainer, step by step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

__all__ = [
    "EXPERTS",
    "ROWS",
    "WORDS",
    "Action",
    "Model",
    "Program",
    "Setup",
    "TrainingLimits",
    "generate",
    "unit_order",
]

#: Rows of a full batch, for any number of ranks.
ROWS = 12


@dataclass(frozen=True)
class Model:
    """A model: optional embedding, blocks called in a chosen order, optional module that writes, optional head.

    Attributes:
        features, hidden: sizes.
        blocks: kinds of blocks: ``"linear"``, ``"mlp"``, ``"norm"``, ``"rms"``, ``"experts"``.
        bias: whether linear layers have a bias.
        vocabulary: size of the vocabulary of the embedding, which is tied to the head; 0 for no embedding.
        writer: module that writes in forward: ``""``, ``"teacher"``, ``"counter"``, ``"book"``, ``"buffer"``.
        way: method of writing: ``"copy"``, ``"add"``, or one of the adapter's `WRITES`.
        dtype: dtype of parameters and data.
        drops: whether each block is followed by dropout.
        experts, chosen: number of experts in a block, and number of experts for each token.
        by_index: whether experts are called by index, or with sorted tokens.
        again: checkpointing of experts: ``""``, ``"inside"`` for the forward of the block, ``"around"`` and
            ``"reentrant"`` for a call of the block.
    """

    features: int
    hidden: int
    blocks: tuple[str, ...]
    bias: bool = True
    vocabulary: int = 0
    writer: str = ""
    way: str = "copy"
    dtype: str = "float64"
    drops: bool = False
    experts: int = 0
    chosen: int = 1
    by_index: bool = True
    again: str = ""


@dataclass(frozen=True)
class Setup:
    """A way to distribute a model.

    Attributes:
        shape, names: mesh: ``"rep"`` and ``"shard"`` of `fully_shard`, ``"copy"`` of `replicate`, ``"tp"``.
        styles: styles of the blocks, and of the submodules of a module that writes: ``""``, ``"col"``, ``"row"``,
            ``"pair"``.
        units: paths of the modules of each unit except the root, in the order of calls.
        reshard: ``reshard_after_forward`` of each unit, and of the root.
        by_last: whether parameters are sharded along their last dimension.
        two_meshes: whether tensor and data parallelism have separate meshes over the same ranks.
        small_buckets: whether `replicate` has small buckets.
        meta: whether the model is made without memory, and gets it when it is distributed.
        experts: placement of experts, a key of `EXPERTS`; empty without experts.
    """

    shape: tuple[int, ...]
    names: tuple[str, ...]
    styles: tuple[str, ...] = ()
    units: tuple[tuple[str, ...], ...] = ()
    reshard: tuple[Any, ...] = (None,)
    by_last: bool = False
    two_meshes: bool = False
    small_buckets: bool = False
    meta: bool = False
    experts: str = ""

    @property
    def data_ranks(self) -> int:
        """Number of data-parallel ranks, each of which has a shard of a batch."""
        return int(np.prod([n for n, name in zip(self.shape, self.names, strict=True) if name != "tp"], dtype=int))


#: A word and its arguments; `Trainer` has a method for each word.
Action = tuple[Any, ...]


@dataclass(frozen=True)
class Program:
    """A training program.

    Attributes:
        seed: seed that generated the program.
        model: the model.
        setups: the first setup, and the setups to which ``resume`` may change.
        data: ``"parts"``: each rank has its own rows. ``"same"``: each has all rows. ``"batch"``: DTensors, one loss.
        cuts: positions where a batch is split, as fractions; empty for equal shards.
        optimizer: ``"sgd"``, ``"momentum"``, ``"adamw"``.
        actions: actions of the trainer.
        least: least number of rows of a rank.
    """

    seed: int
    model: Model
    setups: tuple[Setup, ...]
    data: str
    cuts: tuple[float, ...]
    optimizer: str
    actions: tuple[Action, ...]
    least: int = 0

    def __str__(self) -> str:
        lines = [f"# seed {self.seed}, {self.data}{list(self.cuts) if self.cuts else ''}, {self.optimizer}"]
        lines += [repr(self.model), *map(repr, self.setups)]
        return "\n".join([*lines, *(f"{word}({', '.join(map(repr, args))})" for word, *args in self.actions)])

    def rows(self, setup: Setup) -> list[slice]:
        """Return each data-parallel rank's slice of the rows of a batch."""
        size = setup.data_ranks
        if self.data == "same":
            return [slice(0, ROWS)] * size
        if not self.cuts or self.data == "batch":
            return [slice(ROWS * r // size, ROWS * (r + 1) // size) for r in range(size)]
        free = ROWS - size * self.least
        borders = [0, *sorted(round(free * self.cuts[r]) for r in range(size - 1)), free]
        borders = [at + r * self.least for r, at in enumerate(borders)]
        return [slice(a, b) for a, b in pairwise(borders)]


@dataclass(frozen=True)
class TrainingLimits:
    """Features that training programs may use with one framework.

    Attributes:
        dtypes: dtypes of models.
        without: words that the framework does not have.
        writers, ways: modules that may write in forward, and their methods of writing.
        optimizers: names of the adapter's optimizers.
        least: least number of rows of a rank.
        loads: methods of loading.
        again: kinds of checkpointing of experts.
    """

    dtypes: tuple[str, ...] = ("float64", "float64", "float64", "float32")
    without: frozenset[str] = frozenset()
    writers: tuple[str, ...] = ("teacher", "counter", "buffer", "book")
    ways: tuple[str, ...] = ("copy", "add")
    optimizers: tuple[str, ...] = ("sgd", "momentum", "adamw")
    least: int = 0
    loads: tuple[str, ...] = ("write", "whole", "sharded")
    again: tuple[str, ...] = ()


def generate(seed: int, limits: TrainingLimits) -> Program:
    """Return the program of a seed."""
    rng = np.random.default_rng((seed, 7723))
    model = _model(rng, limits)
    setups = tuple(_setup(rng, model, limits) for _ in range(3))
    # `resume` may change the number of data-parallel ranks. Averages then agree only if shards do not matter.
    data = str(rng.choice(("parts", "parts", "same", "batch")))
    cuts = tuple(float(x) for x in rng.random(3)) if rng.random() < 0.3 else ()
    optimizer = str(rng.choice(limits.optimizers))
    if data == "batch" and model.writer == "buffer":
        model = replace(model, writer="")  # a plain buffer meets a distributed batch
        setups = tuple(_without_writer(setup) for setup in setups)
    actions: list[Action] = []
    at = setups[0]
    for _ in range(int(rng.integers(3, 9))):
        action = _action(rng, model, at, len(setups), limits, actions, data)
        if action[0] == "resume":
            at = setups[action[1]]
        actions.append(action)
    if at.units and all(len(u) == 1 for u in at.units) and not model.writer and rng.random() < 0.3:
        # A rank that runs no unit communicates nothing, and reaches its next call when others are still at their first.
        orders = [_order(rng, model) for _ in range(4)]
        if all(unit_order(at, order) for order in orders):
            actions.append(("differ", *orders))
    if not any(word in ("step", "eval", "differ") for word, *_ in actions):
        actions.append(("step", int(rng.integers(1 << 30)), 1, 0.0))
    model, actions = _later(seed, model, actions, data, limits)
    model, setups = _with_experts(seed, model, setups, actions, data, limits.again)
    return Program(seed, model, setups, data, cuts, optimizer, tuple(actions), limits.least)


def _later(
    seed: int, model: Model, actions: list[Action], data: str, limits: TrainingLimits
) -> tuple[Model, list[Action]]:
    """Add newer features to a program, with a separate generator. So the older choices of a seed do not change."""
    rng = np.random.default_rng((seed, 7724))
    # Ranks with their own rows or blocks draw other dropout masks than one device.
    drops = data != "parts" and not any(word in ("choose", "differ") for word, *_ in actions) and rng.random() < 0.3
    more = [how for how in limits.loads if how not in TrainingLimits().loads]
    if more:
        actions = [
            (a[0], a[1], _draw(rng, tuple(more))) if a[0] == "load" and rng.random() < 0.5 else a for a in actions
        ]
    return replace(model, drops=bool(drops)), actions


#: Placement of experts -> mesh dimensions; the mesh needs one of them.
EXPERTS: dict[str, tuple[str, ...]] = {
    "data": ("shard", "copy"),  # over data parallelism; replicated over tensor parallelism
    "both": ("tp",),  # over all ranks of data and tensor parallelism
    "inside": ("tp",),  # over data parallelism, with each expert sharded over tensor parallelism
    "tp": ("tp",),  # over tensor parallelism only
}


def _with_experts(
    seed: int, model: Model, setups: tuple[Setup, ...], actions: list[Action], data: str, again: tuple[str, ...]
) -> tuple[Model, tuple[Setup, ...]]:
    """Make one block a block of experts, with a separate generator. Programs in which ranks choose blocks have no such
    block, because all ranks must call experts."""
    rng = np.random.default_rng((seed, 7725))
    inner = {path.split(".")[0] for setup in setups for unit in setup.units for path in unit if path.count(".")}
    free = [i for i in range(len(model.blocks)) if f"block{i}" not in inner]
    if rng.random() > 0.3 or not free or any(word in ("choose", "differ") for word, *_ in actions):
        return model, setups
    which = free[int(rng.integers(len(free)))]
    count = int(rng.integers(1, 6))
    blocks = (*model.blocks[:which], "experts", *model.blocks[which + 1 :])
    model = replace(
        model,
        blocks=blocks,
        hidden=max(model.hidden, 2),  # one token for one hidden unit has a wrong gradient on MindSpore
        experts=count,
        chosen=int(rng.integers(1, min(count, 3) + 1)),
        # The order of sorted tokens is a plain tensor, which does not index a distributed one.
        by_index=bool(rng.random() < 0.5) or data == "batch",
        again=_again(seed, again) if rng.random() < 0.2 and again and not model.drops else "",
    )
    return model, tuple(_lying(rng, setup, model, which) for setup in setups)


def _again(seed: int, ways: tuple[str, ...]) -> str:
    return str(np.random.default_rng((seed, 7726)).choice(ways))


def _lying(rng: np.random.Generator, setup: Setup, model: Model, which: int) -> Setup:
    """Choose the placement of experts on the mesh."""
    styles = tuple("" if i == which else style for i, style in enumerate(setup.styles))
    sizes = dict(zip(setup.names, setup.shape, strict=True))
    data = [name for name in setup.names if name != "tp"]
    ways = [way for way, names in EXPERTS.items() if any(name in names for name in setup.names)]
    if not data:
        ways = ["tp"]
    tp = sizes.get("tp", 1)
    if "inside" in ways and -(-model.hidden // tp) * (tp - 1) >= model.hidden:  # no rank may have an empty shard
        ways.remove("inside")
    if "rep" in setup.names or int(np.prod(setup.shape)) < 4:
        # The ranks of "rep" have the same experts. Ranks outside the mesh would have to join the new flattened group.
        ways = [way for way in ways if way != "both"]
    return replace(setup, styles=styles, experts=str(rng.choice(ways)), two_meshes=False)


def _draw(rng: np.random.Generator, values: tuple[Any, ...]) -> Any:
    return values[int(rng.integers(len(values)))]


def _model(rng: np.random.Generator, limits: TrainingLimits) -> Model:
    features = int(rng.choice((3, 4, 5, 6)))
    blocks = tuple(str(b) for b in rng.choice(("linear", "mlp", "norm", "rms"), int(rng.integers(1, 5)), p=_KINDS))
    writers = ("", "", *limits.writers)
    return Model(
        features,
        int(rng.choice((1, 2, 3, 4, 5, 7))),
        blocks,
        bool(rng.random() < 0.7),
        int(rng.choice((0, 0, 5, 6))),
        str(rng.choice(writers)),
        str(rng.choice(limits.ways)),
        str(rng.choice(limits.dtypes)),
    )


_KINDS = (0.35, 0.35, 0.15, 0.15)
_MESHES: tuple[tuple[tuple[int, ...], tuple[str, ...]], ...] = (
    *(((n,), ("shard",)) for n in (2, 3, 4)),
    *(((n,), ("copy",)) for n in (2, 3, 4)),
    *(((n,), ("tp",)) for n in (2, 3, 4)),
    *((shape, ("rep", "shard")) for shape in ((2, 2), (1, 3), (3, 1), (2, 1))),
    *((shape, ("shard", "tp")) for shape in ((2, 2), (2, 2), (1, 2), (1, 3), (1, 4), (4, 1), (2, 1))),
    *((shape, ("copy", "tp")) for shape in ((2, 2), (1, 3), (3, 1))),
    *((shape, ("rep", "shard", "tp")) for shape in ((2, 1, 2), (1, 2, 2), (2, 2, 1))),
)


def _setup(rng: np.random.Generator, model: Model, limits: TrainingLimits) -> Setup:
    shape, names = _draw(rng, _MESHES)
    styles: tuple[str, ...] = ()
    if "tp" in names:
        choices = {"linear": ("", "col", "row", "col"), "mlp": ("", "pair", "pair")}
        kinds = (*model.blocks, "linear" if model.writer == "teacher" else "")
        styles = tuple(_draw(rng, choices.get(kind, ("",))) for kind in kinds)
    units: list[tuple[str, ...]] = []
    if "shard" in names:
        left = [f"block{i}" for i in range(len(model.blocks))] + (["writer"] if model.writer else [])
        for i, kind in enumerate(model.blocks):
            if kind == "mlp" and rng.random() < 0.2:
                units.append((f"block{i}.{_draw(rng, ('up', 'down'))}",))
        while left and rng.random() < 0.65:
            count = 2 if len(left) > 1 and rng.random() < 0.2 else 1
            unit = tuple(left.pop(int(rng.integers(len(left)))) for _ in range(count))
            # A write by one module of a unit would change the unit's other parameters between forward and backward.
            units += [unit] if "writer" not in unit else [(path,) for path in unit]
    options: tuple[Any, ...] = (None, True, False)
    if shape[0] == 4 and names == ("shard",):
        options = (*options, 2)  # the mesh has all ranks, so all take part in new groups
    reshard = tuple(_draw(rng, options) for _ in range(len(units) + 1))
    return Setup(
        shape,
        names,
        styles,
        tuple(units),
        reshard,
        by_last=bool(rng.random() < 0.2),
        two_meshes=len(shape) == 2 and int(np.prod(shape)) == 4 and bool(rng.random() < 0.4),
        small_buckets=bool(rng.random() < 0.5),
        # On one device too, a tensor that gets memory for the first time loses its tie.
        meta=bool(rng.random() < 0.15) and not model.vocabulary and "empty" not in limits.without and "tp" not in names,
    )


def _without_writer(setup: Setup) -> Setup:
    kept = [i for i, unit in enumerate(setup.units) if unit != ("writer",)]
    units = tuple(tuple(path for path in setup.units[i] if path != "writer") for i in kept)
    return replace(setup, units=units, reshard=(*(setup.reshard[i] for i in kept), setup.reshard[-1]))


def _order(rng: np.random.Generator, model: Model) -> tuple[int, ...]:
    return tuple(int(i) for i in rng.integers(0, len(model.blocks), int(rng.integers(0, 5))))


def _choices(rng: np.random.Generator, model: Model, at: Setup) -> list[tuple[int, ...]]:
    """Return the blocks that each of four ranks calls. Blocks in units are the same on all ranks, other blocks
    differ."""
    in_units = {path.split(".")[0] for unit in at.units for path in unit}
    free = [i for i in range(len(model.blocks)) if f"block{i}" not in in_units]
    orders = []
    common = _order(rng, model)
    for _ in range(4):
        kept = [i for i in common if f"block{i}" in in_units]
        # At least one block of the root unit, because only a rank with gradients reduces them.
        for i in rng.choice(free, int(rng.integers(1, 4))) if free else ():
            kept.insert(int(rng.integers(len(kept) + 1)), int(i))
        orders.append(tuple(kept))
    return orders


#: Methods that a backward may call to skip a part of gradient reduction.
SWITCHES = ("", "set_requires_gradient_sync", "set_requires_gradient_sync", "set_requires_all_reduce")
#: Kinds of aliases of a parameter that a trainer may save.
TAKEN = ("state_dict", "model_state_dict", "detach", "to_local", "memory", "data")
_WORDS = {
    "step": 6.0,
    "accumulate": 2.0,
    "eval": 1.0,
    "order": 2.0,
    "choose": 1.0,
    "keep": 3.0,
    "scale": 1.0,
    "ema": 1.5,
    "load": 1.5,
    "save": 0.7,
    "restore": 0.7,
    "resume": 1.0,
    "freeze": 1.0,
    "unfreeze": 0.5,
    "unshard": 2.0,
    "reshard": 1.0,
    "inside": 1.0,
    "copy": 0.4,
    "cast": 0.4,
    "empty": 0.4,
}
#: All words; ``differ`` ends a program.
WORDS = (*_WORDS, "differ")


def _action(
    rng: np.random.Generator,
    model: Model,
    at: Setup,
    setups: int,
    limits: TrainingLimits,
    before: list[Action],
    data: str,
) -> Action:
    known = {word for word, *_ in before}
    weights = dict(_WORDS)
    without = [] if "shard" in at.names else ["unshard", "reshard", "inside"]
    without += limits.without
    # A loss of all ranks, or a module that writes, must be the same on all ranks.
    without += ["choose"] if at.data_ranks == 1 or data == "batch" or model.writer else []
    without += [] if "keep" in known else ["scale"]
    without += [] if "save" in known else ["restore"]
    without += [] if "freeze" in known else ["unfreeze"]
    words = [word for word in weights if word not in without]
    odds = np.array([weights[word] for word in words])
    word = str(rng.choice(words, p=odds / odds.sum()))
    seed = int(rng.integers(1 << 30))
    if word == "step":  # with a writer, a second call would overwrite values that backward of the first needs
        return word, seed, 1 if model.writer else int(rng.choice((1, 1, 2))), float(rng.choice((0.0, 0.0, 0.05)))
    if word == "accumulate":
        return word, seed, str(rng.choice(SWITCHES))
    if word == "order":
        return word, _order(rng, model)
    if word == "choose":
        return word, *_choices(rng, model, at)
    if word == "keep":
        return word, str(rng.choice(TAKEN))
    if word == "load":
        return word, seed, str(rng.choice(("write", "whole", "sharded")))
    if word == "resume":
        return word, int(rng.integers(setups))
    if word in ("freeze", "unfreeze", "scale", "reshard"):
        return word, int(rng.integers(8))
    if word == "unshard":
        return word, int(rng.integers(8)), bool(rng.random() < 0.5)
    if word == "cast":
        return word, str(rng.choice(("float32", "float64")))
    if word in ("eval", "empty", "inside"):
        return word, seed
    return (word,)


def unit_order(setup: Setup, order: tuple[int, ...]) -> list[int]:
    """Return the indices of the units that are reached when blocks are called in ``order``."""
    where = {path.split(".")[0]: i for i, unit in reversed([*enumerate(setup.units)]) for path in unit}
    return [where[f"block{i}"] for i in order if f"block{i}" in where]
