"""Values that are put into distributed parameters: training then continues as that of the single cell."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import HeUniform, XavierUniform, initializer

from hyper_parallel import (
    ColwiseParallel,
    DTensor,
    NoParallel,
    Replicate,
    RowwiseParallel,
    Shard,
    distribute_tensor,
    fully_shard,
    parallelize_module,
    replicate,
)
from hyper_parallel.mindspore import value_and_grad
from hyper_parallel.testing.extent import everything, in_gate
from hyper_parallel.testing.spmd import on_mesh
from tests.mindspore.nets import error_of, rows_of, whole
from tests.mindspore.test_optimizers import OPTIMIZERS

STEPS = 5


def through_file(net: nn.Cell, values: Tensor, folder: str) -> None:
    file = str(Path(folder, f"{id(net)}.ckpt"))
    ms.save_checkpoint([{"name": "weight", "data": values}], file)
    ms.load_checkpoint(file, net)


def by_part(net: nn.Cell, values: Tensor, folder: str) -> None:
    layout = getattr(net.weight, "_layout", None)
    if layout is None:
        net.weight.set_data(values)
    else:
        net.weight.set_data(rows_of(values.asnumpy(), layout), slice_shape=True)


def from_distributed(net: nn.Cell, values: Tensor, folder: str, set_values: Callable[[Any, Any], Any]) -> None:
    weight = net.weight
    if isinstance(weight, DTensor):
        values = distribute_tensor(values, weight.device_mesh, weight.placements)
    set_values(weight, values)


def assigned(net: nn.Cell, values: Tensor, folder: str) -> None:
    net.weight.data = values


def as_attribute(net: nn.Cell, values: Tensor, folder: str) -> None:
    net.weight = values


#: Each gives a cell's weight its values.
WAYS: dict[str, Callable[[nn.Cell, Tensor, str], Any]] = {
    "set_data": lambda net, values, _: net.weight.set_data(values),
    "assign_value": lambda net, values, _: net.weight.assign_value(values),
    "load_param_into_net": lambda net, values, _: ms.load_param_into_net(
        net, {"weight": Parameter(values, name="weight")}
    ),
    "load_checkpoint": through_file,
    "load_state_dict": lambda net, values, _: net.load_state_dict({"weight": values}, strict=False),
    "a part": by_part,
    "a DTensor": functools.partial(from_distributed, set_values=lambda p, x: p.set_data(x)),
    "assign_value of a DTensor": functools.partial(from_distributed, set_values=lambda p, x: p.assign_value(x)),
    "ops.assign": functools.partial(from_distributed, set_values=ops.assign),
    "data": assigned,
    "attribute": as_attribute,
    "half precision": lambda net, values, _: net.weight.set_data(values.astype(ms.float16)),
}

PLACES: dict[str, Callable[[nn.Cell, Any], Any]] = {
    "columns": lambda net, mesh: parallelize_module(net, mesh, ColwiseParallel(output_layouts=Replicate())),
    "rows": lambda net, mesh: parallelize_module(net, mesh, RowwiseParallel(input_layouts=Replicate())),
    "replicated": lambda net, mesh: parallelize_module(net, mesh, NoParallel()),
    "fully_shard": lambda net, mesh: fully_shard(net, mesh=mesh),
    "replicate": lambda net, mesh: replicate(net, mesh),
}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return Tensor((np.random.default_rng(seed).integers(-8, 8, shape) / 8).astype(np.float32))


def trained(make: Callable[[], nn.Cell], way: str, optimizer: str, folder: str) -> tuple[np.ndarray, bool]:
    """The weight after `STEPS` steps from loaded values, and whether the loaded values have stayed as they were."""
    net = make()
    values, x = numbers(*net.weight.shape, seed=1), numbers(2, 4, seed=2)
    kept = values.asnumpy().copy()
    WAYS[way](net, values, folder)
    assert np.array_equal(whole(net.weight), kept), way
    step, descend = value_and_grad(lambda x: ops.square(net(x)).sum(), None, net.trainable_params()), None
    for _ in range(STEPS):
        _, gradients = step(x)
        descend = descend or OPTIMIZERS[optimizer](list(net.trainable_params()))
        descend(gradients)
    return whole(net.weight), bool(np.array_equal(values.asnumpy(), kept))


def single(rows: int) -> nn.Cell:
    return nn.Dense(4, rows, weight_init=numbers(rows, 4), has_bias=False)


@on_mesh()
def problems(mesh: Any, way: str, place: str, rows: int, optimizer: str, folder: str) -> list[str]:
    wanted, _ = trained(lambda: single(rows), way, optimizer, folder)
    got, kept = trained(lambda: PLACES[place](single(rows), mesh), way, optimizer, folder)
    moved = np.abs(wanted - numbers(rows, 4, seed=1).asnumpy()).max() > 1e-3
    near = np.allclose(got, wanted, rtol=1e-3, atol=1e-5)
    return [what for what, held in (("moved", moved), ("near", near), ("kept", kept)) if not held]


#: All ranks have rows, unevenly many, or the last one has none.
ROWS = (6, 5, 1)


@pytest.mark.parametrize("place", in_gate(PLACES, ("columns", "rows", "fully_shard")))
@pytest.mark.parametrize("rows", in_gate(ROWS, (5,)))
def test_ways(pool: Any, tmp_path: Path, place: str, rows: int) -> None:
    """A rank of which the loaded values stay a view of the whole does not train, or fails alone."""
    for way in WAYS:
        assert pool.run(2, problems, way, place, rows, "SGD", str(tmp_path)) == [[], []], way


@pytest.mark.parametrize("optimizer", in_gate(OPTIMIZERS, ("Adam", "experimental AdamW")))
@pytest.mark.parametrize("place", in_gate(PLACES, ("columns", "fully_shard")))
def test_optimizers(pool: Any, tmp_path: Path, optimizer: str, place: str) -> None:
    if optimizer == "groups, schedule":
        pytest.skip("takes more parameters than the cell has")
    for rows in (6, 5) if everything() else (5,):
        for way in ("set_data", "load_checkpoint") if everything() else ("set_data",):
            found = pool.run(2, problems, way, place, rows, optimizer, str(tmp_path))
            assert found == [[], []], (way, rows)


@on_mesh()
def initialized(mesh: Any, place: str, rows: int) -> list[bool]:
    """Ranks agree on the draws of an initializer, whatever their generators have drawn before."""
    net = PLACES[place](single(rows), mesh)
    weight = net.weight
    found = []
    np.random.seed(mesh.get_local_rank())
    for make in (XavierUniform, HeUniform):
        weight.set_data(initializer(make(), weight.shape, weight.dtype))
        values = whole(weight)
        everywhere = mesh.platform.all_gather_object(values, mesh.platform_group(0), mesh.size())
        found += [all(np.array_equal(values, other) for other in everywhere), values.shape == (rows, 4)]
        found += [len(np.unique(values)) > rows, isinstance(weight, DTensor)]
    for name, value in (("ones", 1.0), ("zeros", 0.0), (0.5, 0.5)):
        weight.set_data(initializer(name, weight.shape, weight.dtype))
        found.append(bool((whole(weight) == value).all()))
    drawn = weight.clone("normal")
    found.append(drawn.placements == weight.placements and len(np.unique(whole(drawn))) > rows)
    copy = weight.clone(numbers(rows, 4, seed=3))
    found.append(np.array_equal(whole(copy), numbers(rows, 4, seed=3).asnumpy()))
    found.append("has shape" in error_of(weight.set_data, initializer("ones", (7, 4), weight.dtype)))
    return found


@pytest.mark.parametrize("place", PLACES)
def test_initializers(pool: Any, place: str) -> None:
    for rows in ROWS if everything() else (5,):
        for found in pool.run(2, initialized, place, rows):
            assert all(found), found


@on_mesh()
def seeded(mesh: Any) -> list[bool]:
    """A seed gives the numbers of the single cell."""
    found = []
    for place in PLACES:
        weights = []
        for make in (lambda: single(5), lambda place=place: PLACES[place](single(5), mesh)):
            net = make()
            ms.set_seed(3)
            np.random.seed(3)
            net.weight.set_data(initializer(XavierUniform(), net.weight.shape, net.weight.dtype))
            weights.append(whole(net.weight))
        found.append(bool(np.array_equal(*weights)))
    return found


def test_initializers_with_a_seed(pool: Any) -> None:
    assert pool.run(2, seeded) == [[True] * len(PLACES)] * 2


@on_mesh()
def another_size(mesh: Any, place: str) -> list[tuple[str, str]]:
    """Errors and notices for a checkpoint of other rows or columns, of the single cell and of the parallel one."""
    said = []
    for rows, shape in ((8, (4, 4)), (5, (3, 4)), (5, (2, 4)), (8, (8, 2)), (8, (16, 4)), (2, (1, 4))):
        values = Parameter(numbers(*shape), name="weight")
        nets = single(rows), PLACES[place](single(rows), mesh)
        said.append(tuple(error_of(ms.load_param_into_net, net, {"weight": values}) for net in nets))
    return said


@pytest.mark.parametrize("place", PLACES)
def test_checkpoints_of_another_size(pool: Any, place: str) -> None:
    """A half of the values is not this rank's part."""
    for said in pool.run(2, another_size, place):
        for of_single, of_parallel in said:
            assert of_single.startswith("RuntimeError: For 'load_param_into_net', weight"), of_single
            assert of_parallel == of_single


@on_mesh()
def as_the_single_cell(mesh: Any, place: str) -> list[bool]:
    """Dimensions of size 1 at the end, other dtypes, prefixes, numbers: taken or refused as on the single cell."""
    found = []
    for entry, strict in (
        (Parameter(numbers(6, 4, 1, 1, seed=5), name="weight"), False),
        (Parameter(numbers(6, 4, seed=5).astype(ms.float16), name="weight"), False),
        (Parameter(numbers(6, 4, seed=5).astype(ms.float16), name="weight"), True),
        (Parameter(numbers(6, 4, seed=5).astype(ms.int32), name="weight"), False),
        (Parameter(numbers(6, 4, seed=5), name="net.weight"), False),
    ):
        nets = single(6), PLACES[place](single(6), mesh)
        said = [error_of(ms.load_param_into_net, net, {entry.name: entry}, strict) for net in nets]
        # MindSpore itself keeps the dimensions of size 1, with which no layer runs.
        found.append(said[0] == said[1] and bool(np.array_equal(*(whole(net.weight).reshape(6, 4) for net in nets))))
        found.append(nets[1].weight.shape == (6, 4))
    return found


@pytest.mark.parametrize("place", PLACES)
def test_loading_is_as_on_the_single_cell(pool: Any, place: str) -> None:
    assert pool.run(2, as_the_single_cell, place) == [[True] * 10] * 2


@on_mesh()
def refused(mesh: Any) -> dict[str, str]:
    net = PLACES["columns"](single(8), mesh)
    weight, part = net.weight, numbers(4, 4)
    return {
        "part": error_of(weight.set_data, part),
        "assigned part": error_of(weight.assign_value, part),
        "no part": error_of(lambda: weight.set_data(numbers(8, 4), slice_shape=True)),
        "number": error_of(weight.set_data, 0.5),
        "string": error_of(weight.set_data, "zeros"),
        "placement": error_of(weight.set_data, distribute_tensor(numbers(8, 4), mesh, [Shard(1)])),
        "DTensor": error_of(weight.set_data, distribute_tensor(numbers(16, 4), mesh, [Shard(0)])),
        "DTensor in a dict": error_of(
            lambda: ms.load_param_into_net(
                net, {"weight": Parameter(distribute_tensor(numbers(8, 4), mesh, [Shard(1)]), name="weight")}
            )
        ),
    }


def test_refused(pool: Any) -> None:
    shape = "ValueError: parameter 'weight' has shape (8, 4), "
    for said in pool.run(2, refused):
        assert said["part"].startswith(f"{shape}and the new data has shape (4, 4): pass the full"), said
        assert said["assigned part"] == said["part"]
        assert said["no part"].startswith(f"{shape}this rank's shard of it (4, 4); the new shard has shape (8, 4)"), (
            said
        )
        assert said["number"].startswith(f"{shape}and the new data has shape ()"), said
        assert said["string"].startswith("TypeError: Parameter data must be"), said
        assert "redistribute the data first" in said["placement"], said
        assert said["DTensor"].startswith(f"{shape}and the new data has shape (16, 4)"), said
        assert "redistribute the data first" in said["DTensor in a dict"], said
