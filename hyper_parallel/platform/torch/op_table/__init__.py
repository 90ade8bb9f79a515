"""Mapping of torch's operations to the canonical operations of `core.rules`. Each module covers one subject.

A row is found by the function object that ``__torch_function__`` receives: ``torch.add``, ``Tensor.add``,
``Tensor.__radd__`` and ``Tensor.T.__get__`` are different keys.
"""

from hyper_parallel.platform.torch.op_table import (
    along,
    elementwise,
    index,
    layers,
    linalg,
    matmul,
    nn,
    reduction,
    scatter,
    shape,
)
from hyper_parallel.platform.torch.op_table.binding import Table, UnboundCallError

__all__ = ["OP_TABLE", "UnboundCallError"]


def _merge(*tables: Table) -> Table:
    merged: Table = {}
    for table in tables:
        for func in table.keys() & merged.keys():
            raise AssertionError(f"{func} has two rows: {merged[func].name} and {table[func].name}")
        merged.update(table)
    return merged


OP_TABLE: Table = _merge(
    *(module.table() for module in (along, elementwise, index, layers, linalg, matmul, nn, reduction, scatter, shape))
)
