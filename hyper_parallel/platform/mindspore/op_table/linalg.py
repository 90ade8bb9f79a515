"""Linear algebra on batches of matrices, diagonals, and Fourier transforms."""

from __future__ import annotations

from mindspore import ops

from hyper_parallel.platform.arguments import dims_of
from hyper_parallel.platform.contract import NativeOp
from hyper_parallel.platform.mindspore.op_table.as_called import Facts, Given, as_called, shapes_of
from hyper_parallel.platform.mindspore.op_table.binding import by_name, instead, repeated, row
from hyper_parallel.platform.mindspore.op_table.layers import labelled

__all__ = ["OPS"]

#: Functions of one matrix.
_OF_ONE = """
Cholesky CholeskyInverse MatrixDeterminant LogMatrixDeterminant MatrixInverse MatrixInverseExt MatrixPower Svd Qr
LinalgQr Eig Geqrf Pdist
"""
#: Functions of several tensors: names -> their arguments, with the dimensions after the batch.
_OF_SEVERAL = {
    "CholeskySolve MatrixSolve TriangularSolve Lstsq": "x(n,n) other(n,k)",
    "Orgqr MatrixSetDiagV3": "x(m,n) other(k)",
}
#: Fourier transforms -> number of last dimensions that are transformed by default, None for all.
_TRANSFORMS = {
    "FFT IFFT RFFT IRFFT": 1,
    "FFT2 IFFT2 RFFT2 IRFFT2": 2,
    "FFTN IFFTN RFFTN IRFFTN": None,
}


def _behind(given: Given) -> tuple:
    """Return the static arguments of ``batched``."""
    shapes, counts = given.shapes, given.behind
    found = None
    if all(len(shape) >= count for shape, count in zip(shapes, counts, strict=True)):
        behind = tuple(shape[len(shape) - count :] for shape, count in zip(shapes, counts, strict=True))
        found = shapes_of(given, behind)
    return ((), ()) if found is None else (counts, found)


def _behind_lu(given: Given) -> tuple:
    """Return the static arguments of `LuSolve`, whose result has the shape of the right-hand sides of the equations."""
    x, factors, pivots = given.shapes
    if len(x) != len(factors) or len(pivots) != len(x) - 1:
        return (), ()
    return (2, 2, 1), (x[-2:],)


def _transformed(count: int | None) -> Facts:
    """Return a function that computes the static arguments of ``along_linear`` for a transform of ``count``
    dimensions."""

    def facts(given: Given) -> tuple:
        (shape,) = given.shapes
        sizes, dims = given.values.get("sizes"), dims_of(given.values.get("dims"))
        if dims is None and count is None and sizes is not None:
            dims = tuple(range(-len(sizes), 0))
        if dims is None:
            dims = tuple(range(len(shape))) if count is None else tuple(range(-count, 0))
        whole = {d % len(shape) for d in dims}
        found = shapes_of(given, (tuple(n if d in whole else 1 for d, n in enumerate(shape)),))
        if found is None:
            return (), (-1,)
        return dims, tuple(found[0][d] if d in whole else n for d, n in enumerate(shape))

    return facts


def _shifted(given: Given) -> tuple:
    """Return the shifted dimensions, by default all."""
    return dims_of(given.values.get("dims")), None


def _table() -> dict[str, NativeOp]:
    table = {_OF_ONE: as_called("batched", "x(m,n)", _behind)}
    for names, takes in _OF_SEVERAL.items():
        table[names] = as_called("batched", takes, _behind)
    for names, count in _TRANSFORMS.items():
        table[names] = as_called("along_linear", "x sizes dims", _transformed(count))
    return {
        **table,
        "LuSolve": as_called("batched", "x factors pivots", _behind_lu),
        "Cdist": as_called("pairs", "x y", lambda given: ()),
        "Diag": labelled("x", lambda given: f"{'.' * len(given.shapes[0])}->{'..' * len(given.shapes[0])}|0"),
        "Diagonal": row("diagonal", "", instead(ops.diagonal)),
        "MatrixDiagV3": as_called("batched", "x(n)", _behind),
        "MatrixDiagPartV3": as_called("batched", "x(m,n)", _behind),
        "FFTShift IFFTShift": as_called("along_linear", "x dims", _shifted),
        "MatrixBandPart": repeated("along_linear", "x dims:=(-2,-1)"),
    }


OPS: dict[str, NativeOp] = by_name(_table())
