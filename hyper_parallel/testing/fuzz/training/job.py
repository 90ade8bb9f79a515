"""Job of a trainer: a model on one device or distributed, an optimizer, and the values that are compared.

A job on one device records the reference. In a distributed job, each rank compares its shards with the reference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from hyper_parallel import DTensor, Replicate, Shard, distribute_tensor
from hyper_parallel.platform import get_platform
from hyper_parallel.testing.adapters import get_adapter
from hyper_parallel.testing.fuzz.training import models
from hyper_parallel.testing.fuzz.training.programs import ROWS, Program, Setup

__all__ = ["Job", "WrongError"]

RATES = {"sgd": 0.05, "momentum": 0.02, "adamw": 0.01}


class WrongError(Exception):
    """Raised for a value that differs from the single device's."""


class Job:
    """A model, its optimizer, and their recorded values.

    Args:
        program: the program to run.
        meshes: for each setup its mesh, its data-parallel mesh and its tensor-parallel mesh; None on a rank outside.
            None in place of the list means one device.
        everyone: mesh of all ranks that take part in any setup.
        compare: ``compare(what, got, part)``, called for each recorded value. ``got`` is this rank's value, ``part``
            its index in the full value. With None, values are recorded in `seen`.
        shaken: a positive number adds small errors to initial and loaded values, different for each number.
    """

    def __init__(
        self,
        program: Program,
        meshes: list[Any] | None = None,
        everyone: Any = None,
        compare: Any = None,
        shaken: int = 0,
    ) -> None:
        self.program, self.meshes, self._everyone, self._compare = program, meshes, everyone, compare
        self._shaken = shaken
        self.adapter, self.platform = get_adapter(), get_platform()
        self.seen: dict[str, np.ndarray | None] = {}
        self._at = "at first"
        self.dtype = np.dtype(program.model.dtype)
        self.order = tuple(range(len(program.model.blocks)))  # order of the blocks, unless ranks choose
        self._setup(program.setups[0])
        if shaken:
            self._write(self._moved(self._whole()))

    def _moved(self, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return values with small random errors, if the job was created with ``shaken``."""
        if not self._shaken:
            return values
        errors = {
            n: np.random.default_rng([self._shaken, *n.encode()]).standard_normal(x.shape) for n, x in values.items()
        }
        return {n: (x + 1e-6 * (1 + np.abs(x)) * errors[n]).astype(x.dtype) for n, x in values.items()}

    # ---------------------------------------------------------------------- recorded values
    def see(self, what: str, x: Any, rows: slice | None = None) -> None:
        """Record or compare a tensor, DTensor, array or None; ``rows`` are this rank's rows of the full value."""
        if self.meshes is None:
            self.seen[what] = None if x is None else np.array(self._numpy(x))
            return
        part: Any = ... if rows is None else rows
        if isinstance(x, DTensor):
            part, x = x._layout.local_index(), x.to_local()
        self._compare(what, None if x is None else self._numpy(x), part)

    def _numpy(self, x: Any) -> np.ndarray:
        return x if isinstance(x, np.ndarray) else np.asarray(self.adapter.numpy(x))

    def _look(self, when: str) -> None:
        """Record or compare parameters, buffers and averages, and check that saved aliases have the present values."""
        if not self.takes_part:
            return
        named = models.parameters(self.root)
        for name, p in named.items():
            if self.meshes is not None and not isinstance(p, DTensor) and self.now.data_ranks > 1:
                raise WrongError(f"{name} is no DTensor {when}")
            self.see(f"{name} {when}", p)
        for name, b in models.buffers(self.root).items():
            self.see(f"{name} {when}", b)
        for how, taken in self.kept:
            for name, x in taken.items():
                got, wanted = (self._numpy(y.to_local() if isinstance(y, DTensor) else y) for y in (x, named[name]))
                if not np.array_equal(got, wanted):
                    raise WrongError(f"{how} of {name} {when}: {got.tolist()} in place of {wanted.tolist()}"[:400])
        for name, x in self.shadow.items():
            self.see(f"average of {name} {when}", x)

    # ---------------------------------------------------------------------- models and optimizers
    def _setup(self, setup: Setup, seed: int = 5) -> None:
        """Make a new model and optimizer for ``setup``."""
        program = self.program
        self.now, self.takes_part = setup, True
        self.dp = self.tp = self.mesh = None
        if self.meshes is not None:
            found = self.meshes[program.setups.index(setup)]
            self.takes_part = found is not None
            if found is None:
                return
            self.mesh, self.dp, self.tp = found
        model = replace(program.model, dtype=str(self.dtype))
        self.by_hand: list[Any] = []
        self.root = models.build(model, None if setup.meta and self.meshes is not None else seed)
        if self.meshes is not None:
            models.distribute(self.root, program.model, setup, self.dp, self.tp)
            if setup.meta:
                self.root.to_empty(device=self.adapter.tensor(np.zeros(1)).device)
                whole = models.build(model, seed)
                self._write({name: self._numpy(x) for name, x in models.held(whole).items()})
        self.rows = program.rows(setup)
        self.rank = 0
        if self.dp is not None:
            self.rank = int(np.argwhere(self.dp.ranks.reshape(-1) == self.dp.get_rank())[0][0])
        self.kept: list[tuple[str, dict[str, Any]]] = []
        self.shadow: dict[str, Any] = {}
        self.saved: dict[str, np.ndarray] = {}
        self.total: dict[str, Any] | None = None
        self.inside: np.random.Generator | None = None
        self.choice: tuple[tuple[int, ...], ...] | None = None
        self.units = [models.module_at(self.root, paths[0]) for paths in setup.units] + [self.root]
        self._watch()
        self._optimizer()

    def _watch(self) -> None:
        """Let ``inside`` unshard random units by hand while the model runs.

        Without storage to free, a unit that is unsharded after its forward stays unsharded until `reshard`. So backends
        that cannot free storage are left out."""
        if self.meshes is None or not hasattr(self.root, "unshard") or not self.platform.frees_storage:
            return

        def act() -> None:
            if self.inside is None or self.choice is not None or self.platform.in_backward():
                return
            unit, how = self.units[int(self.inside.integers(len(self.units)))], int(self.inside.integers(4))
            if how < 3:
                handle = unit.unshard(async_op=how > 0)
                self.by_hand.append(unit)
                if how == 2:
                    handle.wait()

        for i in range(len(self.program.model.blocks)):
            block = models.module_at(self.root, f"block{i}")
            self.platform.register_forward_pre_hook(block, lambda module, args: act())
            self.platform.register_forward_hook(block, lambda module, args, output: act())

    def _asks(self) -> list[bool]:
        """Return whether each parameter requires gradients."""
        return [p.requires_grad for p in models.parameters(self.root).values()]

    def _ask(self, flags: list[bool]) -> None:
        for p, wants in zip(models.parameters(self.root).values(), flags, strict=True):
            p.requires_grad = wants

    def _optimizer(self) -> None:
        name, self.trained = self.program.optimizer, self._asks()
        if name == "sgd":
            self.optimizer, self.take = None, self.adapter.sgd(self.root, RATES[name])
        else:
            self.optimizer, self.take = self.adapter.optimizer(self.root, name, RATES[name])

    def _whole(self) -> dict[str, np.ndarray]:
        """Return the full values of all parameters and buffers."""
        named = models.held(self.root)
        return {name: np.array(self.adapter.numpy(x)) for name, x in named.items()}

    def _write(self, values: dict[str, np.ndarray]) -> None:
        """Write full values into the parameters and buffers of these names."""
        self._reshard_all()
        for name, x in models.held(self.root).items():
            if name not in values:
                continue
            part = values[name] if not isinstance(x, DTensor) else values[name][x._layout.local_index()]
            if part.size:
                with self.platform.no_dispatch(), self.platform.no_grad():
                    self.platform.write(self.platform.detach(x), self.adapter.tensor(np.ascontiguousarray(part)))

    def _drawn(self, seed: int) -> dict[str, np.ndarray]:
        """Return new random values for all parameters and buffers."""
        named, rng = models.held(self.root), np.random.default_rng(seed)
        return self._moved(
            {n: (rng.standard_normal(tuple(x.shape)) * 0.3).astype(self.dtype) for n, x in named.items()}
        )

    # ---------------------------------------------------------------------- steps
    def _loss(self, x: Any, weights: np.ndarray, calls: int) -> Any:
        adapter, total, y = self.adapter, None, None
        for i in range(calls):
            y = adapter.tanh(adapter.call(self.root, x if self.program.model.vocabulary else x * (1.0 + i)))
            w: Any = adapter.tensor(weights)
            if isinstance(y, DTensor):
                w = distribute_tensor(w, y.device_mesh, [Shard(0)] * y.device_mesh.ndim, src_data_rank=None)
            term = adapter.weighted_sum(y * y, w)
            total = term if total is None else total + term
        return total, y

    def _batch(self, seed: int) -> tuple[np.ndarray, np.ndarray]:
        model, rng = self.program.model, np.random.default_rng(seed)
        if model.vocabulary:
            x: np.ndarray = rng.integers(0, model.vocabulary, (ROWS, 2)).astype(np.int64)
        else:
            x = rng.standard_normal((ROWS, 2, model.features)).astype(self.dtype)
        weights = rng.standard_normal((ROWS, 2, model.vocabulary or model.features)).astype(self.dtype)
        return x, weights

    def _mine(self, x: Any) -> Any:
        """Return a batch as this rank passes it to the model: a DTensor for data ``"batch"``, else unchanged."""
        if self.program.data == "batch" and self.dp is not None:
            return distribute_tensor(x, self.dp, [Shard(0)] * self.dp.ndim, src_data_rank=None)
        return x

    def _forwards(self) -> Iterator[tuple[str, slice, slice | None]]:
        """Yield the calls of the model, with the order of blocks set.

        A call is a name, its rows of the batch, and the rows of its result. If ranks choose blocks, one device makes
        the calls of all ranks."""
        whole = self.meshes is None or self.program.data == "batch"
        if self.choice is None:
            yield "output", slice(0, ROWS) if whole else self.rows[self.rank], self.rows[self.rank]
            return
        for rank in range(self.now.data_ranks) if self.meshes is None else (self.rank,):
            self.root.order[0] = self.choice[rank]
            yield f"output of rank {rank}", self.rows[rank], None

    def _backward(self, seed: int, calls: int) -> None:
        """Run forward and backward, and accumulate the gradients."""
        adapter, program, one = self.adapter, self.program, self.meshes is None
        x, weights = self._batch(seed)
        if one and (program.data == "parts" or self.choice):
            weights = weights / np.asarray(self.now.data_ranks, self.dtype)
        mine = slice(0, ROWS) if one or program.data == "batch" else self.rows[self.rank]
        outputs: dict[str, tuple[Any, slice | None]] = {}
        if program.model.drops:
            adapter.seed(seed)

        def loss(given: Any) -> Any:
            sums = None
            for what, part, rows in self._forwards():
                total, y = self._loss(self._mine(given[part] if one and self.choice else given), weights[part], calls)
                if isinstance(total, DTensor):
                    total = total.redistribute(placements=[Replicate()] * total.device_mesh.ndim).to_local()
                outputs[what] = y, rows
                sums = total if sums is None else sums + total
            return sums, None

        accumulates = self.platform.accumulates_gradients
        if self.total is None or not accumulates:
            _, _, grads = adapter.model_value_and_grads(self.root, loss, x[mine])
        else:
            adapter.value_and_grads(loss, [x[mine]])
            grads = None
        if accumulates:
            grads = {name: p.grad for name, p in models.parameters(self.root).items()}
        elif self.total is not None:
            before = self.total
            grads = {n: g if before[n] is None else before[n] if g is None else before[n] + g for n, g in grads.items()}
        self.total = grads
        for what, (y, rows) in outputs.items():
            self.see(f"{what} of {self._at}", y, None if isinstance(y, DTensor) else rows)

    def _reshard_all(self) -> None:
        """Reshard the units that were unsharded by hand, before parameters change."""
        units, self.by_hand = self.by_hand, []
        for unit in units:
            unit.reshard()
