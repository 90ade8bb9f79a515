"""A trainer that performs the actions of a program, and checks all values after each action."""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from hyper_parallel import DTensor
from hyper_parallel.checkpoint import load, save
from hyper_parallel.checkpoint.ranks import Collective
from hyper_parallel.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from hyper_parallel.testing.fuzz.exchange import installed
from hyper_parallel.testing.fuzz.training import models
from hyper_parallel.testing.fuzz.training.job import Job, WrongError
from hyper_parallel.testing.fuzz.training.programs import ROWS, Program

__all__ = ["Trainer", "clear"]

FULL = StateDictOptions(full_state_dict=True)


class Trainer(Job):
    """A job with a method for each kind of action."""

    def run(self) -> None:
        """Perform all actions."""
        self._look("at first")
        for number, (word, *args) in enumerate(self.program.actions):
            self._at = f"{number} {word}"
            if self.takes_part or word == "resume":
                getattr(self, f"_{word}")(*args)
            self._look(f"after {self._at}")

    # ---------------------------------------------------------------------- steps
    def _accumulate(self, seed: int, without: str) -> None:
        """Run one more backward, perhaps with a method of the model that turns a part of gradient reduction off."""
        switch = getattr(self.root, without, None) if without else None
        if switch is not None:
            switch(False)
        self._backward(seed, 1)
        if switch is not None:
            switch(True)

    def _step(self, seed: int, calls: int, clip: float) -> None:
        self._backward(seed, calls)
        grads, self.total = self.total or {}, None
        if clip:
            given = {name: g for name, g in grads.items() if g is not None}
            grads = {**grads, **self.adapter.clip(self.root, given, clip)}
        for name, g in grads.items():
            self.see(f"gradient of {name} in {self._at}", g)
        self._reshard_all()
        self.take(grads)

    def _eval(self, seed: int) -> None:
        x = self._batch(seed)[0]
        if self.program.model.drops:
            self.adapter.seed(seed)
        for what, part, rows in self._forwards():
            with self.platform.no_grad():
                y = self.adapter.call(self.root, self._mine(self.adapter.tensor(x[part])))
            self.see(f"{what} of {self._at}", y, None if isinstance(y, DTensor) else rows)

    def _choose(self, *orders: tuple[int, ...]) -> None:
        """Let each data-parallel rank call its own choice of blocks from now on, with the same units."""
        if self.total is None or self.platform.accumulates_gradients:
            self.choice = orders

    def _order(self, order: tuple[int, ...]) -> None:
        if self.total is not None and not self.platform.accumulates_gradients:
            return  # accumulated gradients of a unit come with the next backward that reaches it
        self.root.order[0], self.order, self.choice = order, order, None

    def _differ(self, *orders: tuple[int, ...]) -> None:
        """Let each data-parallel rank run its own choice of units twice; then all ranks run the same units.

        A backend's collectives would hang until the time-out, so this needs an `Exchange`."""
        exchange = installed()
        if exchange is None:
            return
        self._reshard_all()
        self.inside = None
        # One of two tensor-parallel ranks may be refused before a collective of both.
        exchange.ranks_leave = self.meshes is not None
        ranks = range(self.now.data_ranks) if self.meshes is None else (self.rank,)
        for number in range(3):
            for rank in ranks:
                self.root.order[0] = orders[rank] if number < 2 else tuple(range(len(self.program.model.blocks)))
                part = slice(0, ROWS) if self.program.data == "batch" else self.rows[rank]
                with self.platform.no_grad():
                    x = self._mine(self.adapter.tensor(self._batch(number)[0][part]))
                    y = self.adapter.call(self.root, x)
                self.see(f"output {number} of rank {rank} in {self._at}", y)

    # ---------------------------------------------------------------------- saved values
    def _keep(self, how: str) -> None:
        root, adapter, platform = self.root, self.adapter, self.platform
        named = models.parameters(root)
        if how == "state_dict":
            taken = dict(root.state_dict() if hasattr(root, "state_dict") else root.parameters_dict())
        elif how == "model_state_dict":
            taken = dict(get_model_state_dict(root)) if self.meshes is not None else {}
        elif how == "detach":
            taken = {name: adapter.detach(p) for name, p in named.items()}
        elif how == "to_local":
            taken = {name: p.to_local() if isinstance(p, DTensor) else p for name, p in named.items()}
        elif how == "data" and all(hasattr(p, "data") for p in named.values()):
            taken = {name: p.data for name, p in named.items()}
        else:
            with platform.no_dispatch(), platform.no_grad():
                taken = {name: platform.detach(p) for name, p in named.items()}
        # Some frameworks have other names in state dicts, and tied parameters twice.
        ids = {id(p): name for name, p in named.items()}
        saved = {name: ids[id(x)] for name, x in platform.saved_tensors(root) if id(x) in ids}
        by_name = {ids.get(id(x)) or saved.get(name, name): x for name, x in taken.items()}
        if self.adapter.REPLACES_MEMORY:
            named = {name: p for name, p in named.items() if isinstance(p, DTensor)}
        self.kept.append((how, {name: x for name, x in by_name.items() if name in named}))

    def _scale(self, which: int) -> None:
        """Write to parameters through their saved aliases."""
        self._reshard_all()
        if not self.kept:
            return
        _, taken = ("", {}) if self.meshes is None else self.kept[which % len(self.kept)]
        with self.platform.no_dispatch(), self.platform.no_grad():
            for name, p in models.parameters(self.root).items():
                if name not in taken:
                    new = self.adapter.tensor(self._numpy(p) * self.dtype.type(0.75))
                    self.platform.write(self.platform.detach(p), new)
        with self.platform.no_grad():
            for x in taken.values():
                if self.adapter.WRITES_THROUGH_VIEWS:
                    self.adapter.IN_PLACE["mul_"][0](x, 0.75)
                else:
                    self.adapter.IN_PLACE["copy_"][0](x, x * 0.75)

    def _ema(self) -> None:
        """Update an average of the parameters."""
        with self.platform.no_grad():
            for name, p in models.parameters(self.root).items():
                new = self.adapter.detach(p) * 0.5
                self.shadow[name] = new + self.shadow[name] * 0.5 if name in self.shadow else new * 2

    # ---------------------------------------------------------------------- loading and saving
    def _load(self, seed: int, how: str) -> None:
        values = self._drawn(seed)
        if self.meshes is None or how == "write":
            self._write(values)
            return
        self._reshard_all()
        if how not in ("whole", "sharded"):
            # Optimizers that MindSpore has compiled lose a plain parameter that gets other memory.
            writes = self.adapter.REPLACES_MEMORY
            named = {n: p for n, p in models.parameters(self.root).items() if isinstance(p, DTensor) or not writes}
            self.adapter.LOADS[how](self.root, {n: (p, self.adapter.tensor(values[n])) for n, p in named.items()})
            self._write({name: x for name, x in values.items() if name not in named})
        else:
            self._set(values, how == "whole")

    def _set(self, values: dict[str, np.ndarray], whole: bool) -> None:
        """Set values by `set_model_state_dict`, from full tensors or from shards."""
        state: dict[str, Any] = {}
        own = dict(self.platform.saved_tensors(self.root))
        names = {id(x): name for name, x in models.held(self.root).items()}
        for name, x in own.items():
            new = self.adapter.tensor(values[names[id(x)]])
            if not whole and isinstance(x, DTensor):
                part = np.ascontiguousarray(values[names[id(x)]][x._layout.local_index()])
                new = self.platform.wrap(self.adapter.tensor(part), x._layout)
            state[name] = new
        set_model_state_dict(self.root, state, options=FULL if whole else None)

    def _save(self) -> None:
        """Save full values in memory, and compare them with a full state dict."""
        self.saved = self._whole()
        for name, x in self.saved.items():
            self.see(f"saved {name} in {self._at}", x)
        if self.meshes is not None:
            state = get_model_state_dict(self.root, options=FULL)
            for name, x in self.platform.saved_tensors(self.root):
                if not np.array_equal(self._numpy(state[name]), np.array(self.adapter.numpy(x))):
                    raise WrongError(f"{name} in the whole state dict")

    def _restore(self) -> None:
        if not self.saved:
            return
        if self.meshes is None:
            self._write(self.saved)
        else:
            self._reshard_all()
            self._set(self.saved, True)

    def _resume(self, which: int) -> None:
        """Save a checkpoint, and continue from it with a new job, perhaps on another mesh."""
        self.total = None
        if self.meshes is None:
            self.root.order[0], self.choice = self.order, None
            self.now = self.program.setups[which]
            self.rows = self.program.rows(self.now)
            self.kept, self.shadow = [], {}
            return
        path = directory(self.program) / self._at.replace(" ", "-")
        known: Any = None
        if self.takes_part:
            known = self.order, self.trained, self._asks(), str(self.dtype), self.saved
            save(self._state(), path, mesh=self.mesh)
        known = next(x for x in Collective(self._everyone).gather(known) if x is not None)
        self.dtype = np.dtype(known[3])
        self._setup(self.program.setups[which], seed=6)
        if self.takes_part:
            self._ask(known[1])
            self._optimizer()
            self._ask(known[2])
            load(self._state(), path, mesh=self.mesh)
            self.root.order[0], self.saved = known[0], known[4]
        self.order = known[0]

    def _state(self) -> dict[str, Any]:
        return {"model": self.root} | ({} if self.optimizer is None else {"optimizer": self.optimizer})

    # ---------------------------------------------------------------------- trained, whole, copied, moved
    def _freeze(self, which: int, wants: bool = False) -> None:
        if self.total is not None:
            return
        named = models.parameters(self.root)
        names = [n for n in named if not n.startswith(("writer.teacher", "writer.count", "tied"))]
        if not names:
            return
        chosen = names[which % len(names)]
        if not wants and not any(p.requires_grad for n, p in named.items() if n != chosen):
            return
        named[chosen].requires_grad = wants
        if not self.platform.accumulates_gradients:
            self._optimizer()

    def _unfreeze(self, which: int) -> None:
        self._freeze(which, True)

    def _unshard(self, which: int, asynchronous: bool) -> None:
        if self.meshes is None or not hasattr(self.root, "unshard"):
            return
        unit = self.units[which % len(self.units)]
        unit.unshard(async_op=asynchronous)
        self.by_hand.append(unit)

    def _reshard(self, which: int) -> None:
        if self.meshes is not None and hasattr(self.root, "reshard"):
            self.units[which % len(self.units)].reshard()

    def _inside(self, seed: int) -> None:
        """Unshard units by hand while the model runs, from now on."""
        self.inside = np.random.default_rng(seed)

    def _copy(self) -> None:
        """Continue with a copy of the model and a new optimizer."""
        if self.total is not None:
            return
        self._reshard_all()
        self.root = copy.deepcopy(self.root)
        self.kept, self.shadow = [], {}
        paths = [unit[0] for unit in self.now.units]
        self.units, self.inside = [models.module_at(self.root, path) for path in paths] + [self.root], None
        self._optimizer()

    def _cast(self, dtype: str) -> None:
        """Cast the model to another dtype, and forget saved aliases, which keep the old memory."""
        if self.total is not None:
            return
        self._reshard_all()
        self.root.to(self.platform.dtypes[dtype])
        self.dtype = np.dtype(dtype)
        self.kept, self.shadow, self.saved = [], {}, {}
        self._optimizer()

    def _empty(self, seed: int) -> None:
        """Give the model new memory and new values."""
        if self.total is not None:
            return
        self._reshard_all()
        first = next(iter(models.parameters(self.root).values()))
        self.root.to_empty(device=first.device)
        self.kept, self.shadow = [], {}
        self._write(self._drawn(seed))
        self._optimizer()


def directory(program: Program) -> Path:
    """Return the directory of a program's checkpoints, the same on all ranks."""
    place = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    return Path(place) / f"hyper-parallel-training-{os.getppid()}-{program.seed}"


def clear(program: Program) -> None:
    """Remove the checkpoints of a program."""
    with suppress(OSError):
        shutil.rmtree(directory(program))
