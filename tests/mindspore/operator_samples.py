"""Arguments for the public functions of MindSpore, by signature: a function of `Draw` for each, shared by many.

A name stands for the functions of that name in `mint`, `mint.nn.functional` and `ops`. A name that means something else
in one of them is written with its module, as in "mint.split".
"""

from __future__ import annotations

from collections.abc import Callable

import mindspore as ms
import numpy as np
from mindspore import Tensor

__all__ = ["SAMPLES", "Draw"]

#: Shapes of the first operand, sample after sample: uneven on four ranks with an empty shard, even, one for some.
_SHAPES = ((5, 6), (4, 3), (2, 3, 4), (6, 5), (1, 4), (8, 2))


class Draw:
    """Draws the tensors of sample ``number``; equal on all ranks."""

    def __init__(self, name: str, number: int) -> None:
        self.rng = np.random.default_rng([number, *name.encode()])
        self.number = number
        self.s = _SHAPES[number % len(_SHAPES)]

    def f(self, *shape: int) -> Tensor:
        """Draw numbers of both signs; in sixty-fourths, of which sums are exact. Without -0.0, which no sum of parts
        gives."""
        return Tensor((np.round(self.rng.standard_normal(shape) * 64) / 64 + 0.0).astype(np.float32))

    def pos(self, *shape: int) -> Tensor:
        return Tensor((np.round(self.rng.uniform(0.5, 3, shape) * 64) / 64).astype(np.float32))

    def unit(self, *shape: int) -> Tensor:
        """Numbers between 0 and 1."""
        return Tensor((np.round(self.rng.uniform(0.1, 0.9, shape) * 64) / 64).astype(np.float32))

    def i(self, high: int, *shape: int) -> Tensor:
        return Tensor(self.rng.integers(0, high, shape).astype(np.int64))

    def places(self, high: int, count: int, columns: int) -> Tensor:
        """Different places in each column: where two elements are written to one place, either may win."""
        rows = [self.rng.permutation(high)[:count] for _ in range(columns)]
        return Tensor(np.stack(rows, 1).astype(np.int64))

    def i32(self, high: int, *shape: int) -> Tensor:
        return Tensor(self.rng.integers(0, high, shape).astype(np.int32))

    def b(self, *shape: int) -> Tensor:
        return Tensor(self.rng.random(shape) < 0.5)

    def c(self, *shape: int) -> Tensor:
        return Tensor((self.rng.standard_normal(shape) + 1j * self.rng.standard_normal(shape)).astype(np.complex64))

    def spd(self, n: int) -> Tensor:
        """Symmetric and positive definite."""
        a = self.rng.standard_normal((n, n))
        return Tensor((a @ a.T + n * np.eye(n)).astype(np.float32))

    def sorted(self, *shape: int) -> Tensor:
        return Tensor(np.sort(self.rng.standard_normal(shape), -1).astype(np.float32))

    @property
    def second(self) -> tuple[int, ...]:
        """Shape of a second operand, which may have to broadcast."""
        return self.s if self.number % 2 == 0 else (self.s[-1],)


Maker = Callable[[Draw], tuple]
_BY_SIGNATURE: list[tuple[str, Maker]] = [
    (
        """abs arcsinh arctan asinh atan ceil celu cos cosh deg2rad elu erf erfc exp exp2 expm1
        fast_gelu floor frac gelu hardshrink hardsigmoid hardswish hardtanh i0 isfinite isinf isnan isneginf isposinf
        isreal isnan_ext leaky_relu logsigmoid mish nan_to_num neg negative positive rad2deg relu relu6 round selu
        sgn sigmoid sign signbit silu sin sinc sinh softplus soft_shrink softshrink softsign square tan tanh
        tanhshrink trunc clone ones_like zeros_like mint.nn.functional.softmax tensor_exp tensor_expm1 bessel_i0
        bessel_i0e bessel_i1 bessel_i1e bessel_j0 bessel_j1 stop_gradient deepcopy ravel numel is_complex
        is_floating_point is_tensor rank shape size atleast_1d atleast_2d atleast_3d relu_ elu_ hardtanh_ sigmoid_
        tanh_ inplace_sigmoid stop_gradient_ empty_like isnan count_nonzero mean sum std var all any max min argmax
        argmin median nansum nanmean nanmedian norm prod nonzero argwhere flatten sort msort unique rand_like
        randn_like std_mean var_mean aminmax diag_embed tril triu dyn_shape rrelu
        unique_consecutive zero_ dropout""",
        lambda d: (d.f(*d.s),),
    ),
    (
        """log log10 log1p log2 reciprocal rsqrt sqrt digamma lgamma inv bessel_k0 bessel_k0e bessel_k1 bessel_k1e
        bessel_y0 bessel_y1""",
        lambda d: (d.pos(*d.s),),
    ),
    (
        """acos arccos asin arcsin atanh arctanh erfinv logit bernoulli poisson""",
        lambda d: (d.unit(*d.s),),
    ),
    ("acosh arccosh", lambda d: (d.f(*d.s).abs() + 1.5,)),
    (
        """add sub subtract mul multiply maximum minimum eq ne not_equal ge gt le lt greater
        greater_equal less less_equal logaddexp logaddexp2 fmax fmin copysign nextafter hypot heaviside isclose
        tensor_add tensor_sub tensor_mul tensor_ge tensor_gt tensor_le tensor_lt atan2 arctan2 logical_and logical_or
        logical_xor""",
        lambda d: (d.f(*d.s), d.f(*d.second)),
    ),
    (
        """div divide true_divide floor_divide floor_div floordiv floor_mod floormod fmod remainder truncate_div
        truncate_mod xdivy tensor_div tensor_floordiv tensor_mod""",
        lambda d: (d.f(*d.s), d.pos(*d.second)),
    ),
    ("pow tensor_pow float_power xlogy", lambda d: (d.pos(*d.s), d.pos(*d.second))),
    ("igamma igammac zeta polar", lambda d: (d.pos(*d.s) + 1.0, d.pos(*d.second))),
    ("gcd lcm bitwise_and bitwise_or bitwise_xor", lambda d: (d.i32(20, *d.s), d.i32(20, *d.second))),
    ("bitwise_left_shift bitwise_right_shift", lambda d: (d.i32(20, *d.s), d.i32(3, *d.second))),
    ("bitwise_not invert population_count", lambda d: (d.i32(20, *d.s).astype(ms.int16),)),
    ("logical_not", lambda d: (d.b(*d.s),)),
    ("ldexp", lambda d: (d.f(*d.s), d.i32(4, *d.second))),
    ("equal allclose approximate_equal dist", lambda d: (d.f(*d.s), d.f(*d.s))),
    ("addcdiv addcmul", lambda d: (d.f(*d.s), d.f(*d.s), d.pos(*d.second))),
    ("lerp", lambda d: (d.f(*d.s), d.f(*d.s), d.unit(*d.s))),
    ("where", lambda d: (d.b(*d.s), d.f(*d.s), d.f(*d.second))),
    ("ops.select", lambda d: (d.b(*d.s), d.f(*d.s), d.f(*d.s))),
    ("mint.select", lambda d: (d.f(*d.s), d.number % 2, 0)),
    ("masked_fill", lambda d: (d.f(*d.s), d.b(*d.s), -1.0)),
    ("masked_select", lambda d: (d.f(*d.s), d.b(*d.s))),
    ("clamp clip clip_by_value", lambda d: (d.f(*d.s), -0.5, 0.5)),
    ("threshold threshold_", lambda d: (d.f(*d.s), 0.1, 20.0)),
    ("prelu", lambda d: (d.f(*d.s), d.unit(d.s[1]))),
    ("polygamma", lambda d: (Tensor(1, ms.int32), d.pos(*d.s))),
    ("mvlgamma", lambda d: (d.pos(*d.s) + 3.0, 3)),
    ("celu", lambda d: (d.f(*d.s), 1.5)),
    ("pows", lambda d: (d.pos(*d.s), 2)),
    ("fills full_like", lambda d: (d.f(*d.s), 2.0)),
    ("type_as", lambda d: (d.f(*d.s), d.i(3, 2))),
    ("expand_as view_as", lambda d: (d.f(*d.s), d.f(*d.s))),
    # along a dimension
    (
        """cumsum cumprod softmax log_softmax softmin logsumexp cummax cummin cumsum logcumsumexp amax amin
        mint.cumsum mint.max mint.min argsort""",
        lambda d: (d.f(*d.s), d.number % 2),
    ),
    ("ops.cumsum ops.cumprod", lambda d: (d.f(*d.s), d.number % 2)),
    ("mint.sum mint.mean mint.std mint.var mint.prod mint.all", lambda d: (d.f(*d.s), d.number % 2)),
    # Of floats, MindSpore's own result along dimension 0 is that of their bytes.
    ("mint.any", lambda d: (d.b(*d.s), d.number % 2)),
    ("vector_norm", lambda d: (d.f(*d.s),)),
    ("unbind unstack", lambda d: (d.f(*d.s), d.number % 2)),
    ("ops.unstack ops.unbind", lambda d: (d.f(*d.s), d.number % 2)),
    ("flip", lambda d: (d.f(*d.s), (0,) if d.number % 2 else (0, 1))),
    ("ops.reverse", lambda d: (d.f(*d.s), [0])),
    ("fliplr flipud trapz t adjoint", lambda d: (d.f(*d.s[-2:]),)),
    ("roll", lambda d: (d.f(*d.s), 1, 0)),
    ("ops.roll", lambda d: (d.f(*d.s), 1, 0)),
    ("rot90", lambda d: (d.f(*d.s), 1, [0, 1])),
    ("topk top_k", lambda d: (d.f(*d.s), 2)),
    ("kthvalue", lambda d: (d.f(*d.s), 1)),
    ("diff", lambda d: (d.f(*d.s),)),
    ("glu swiglu", lambda d: (d.f(*d.s[:-1], 6),)),
    ("renorm", lambda d: (d.f(*d.s), 2.0, 0, 1.0)),
    ("ops.renorm", lambda d: (d.f(*d.s), 2, 0, 1.0)),
    ("ops.norm matrix_norm", lambda d: (d.f(*d.s),)),
    ("normalize", lambda d: (d.f(*d.s),)),
    ("quantile nanquantile", lambda d: (d.f(*d.s), 0.5)),
    ("histc", lambda d: (d.f(*d.s), 4)),
    ("bincount", lambda d: (d.i(6, 9),)),
    ("std_mean var_mean", lambda d: (d.f(*d.s), d.number % 2)),
    # shapes
    ("reshape", lambda d: (d.f(*d.s), (-1,))),
    ("reshape_", lambda d: (d.f(*d.s), (-1,))),
    ("broadcast_to expand", lambda d: (d.f(1, 6), (5, 6))),
    ("expand_dims unsqueeze", lambda d: (d.f(*d.s), d.number % 2)),
    ("squeeze", lambda d: (d.f(5, 1, 6),)),
    ("permute ops.transpose", lambda d: (d.f(2, 3, 4), (2, 0, 1))),
    ("mint.transpose swapaxes swapdims", lambda d: (d.f(*d.s), 0, 1)),
    ("movedim moveaxis", lambda d: (d.f(2, 3, 4), 0, 2)),
    ("tile", lambda d: (d.f(*d.s), (2,) * len(d.s))),
    ("repeat_interleave repeat_elements", lambda d: (d.f(*d.s), 2, 0)),
    ("cat concat stack hstack vstack dstack row_stack column_stack block_diag", lambda d: ((d.f(*d.s), d.f(*d.s)),)),
    ("accumulate_n addn", lambda d: ((d.f(*d.s), d.f(*d.s)),)),
    ("meshgrid cartesian_prod", lambda d: (d.f(5), d.f(4))),
    ("ops.meshgrid", lambda d: (d.f(5), d.f(4))),
    ("combinations", lambda d: (d.f(5),)),
    ("split chunk tensor_split", lambda d: (d.f(6, 4), 2)),
    ("hsplit vsplit", lambda d: (d.f(6, 4), 2)),
    ("dsplit", lambda d: (d.f(3, 2, 4), 2)),
    ("narrow", lambda d: (d.f(*d.s), 0, 0, 1)),
    ("strided_slice", lambda d: (d.f(5, 6), (0, 1), (4, 5), (1, 2))),
    ("slice", lambda d: (d.f(5, 6), (1, 0), (3, 4))),
    ("select_scatter", lambda d: (d.f(5, 6), d.f(6), 0, 1)),
    ("slice_scatter", lambda d: (d.f(5, 6), d.f(2, 6), 0, 1, 3, 1)),
    ("diagonal_scatter", lambda d: (d.f(5, 6), d.f(5))),
    ("diag", lambda d: (d.f(5, 5) if d.number % 2 else d.f(5),)),
    ("diagonal trace", lambda d: (d.f(5, 6),)),
    ("matrix_diag", lambda d: (d.f(5),)),
    ("matrix_diag_part", lambda d: (d.f(5, 6), 0, Tensor(0.0, ms.float32))),
    ("matrix_set_diag", lambda d: (d.f(5, 6), d.f(5))),
    ("matrix_band_part", lambda d: (d.f(5, 6), 1, 1)),
    ("vander", lambda d: (d.f(5),)),
    ("ops.pad mint.nn.functional.pad", lambda d: (d.f(*d.s), (1, 2))),
    ("ops.padding", lambda d: (d.f(5, 1), 4)),
    ("mirror_pad", lambda d: (d.f(5, 6), Tensor([[1, 1], [2, 1]]), "REFLECT")),
    ("unfold", lambda d: (d.f(2, 3, 6, 5), (2, 2))),
    ("mint.nn.functional.fold", lambda d: (d.f(2, 12, 20), (6, 5), (2, 2))),
    ("ops.fold", lambda d: (d.f(2, 12, 20), Tensor([6, 5], ms.int32), (2, 2))),
    ("pixel_shuffle", lambda d: (d.f(5, 4, 3, 2), 2)),
    ("pixel_unshuffle", lambda d: (d.f(5, 3, 4, 2), 2)),
    ("channel_shuffle", lambda d: (d.f(5, 4, 3, 2), 2)),
    ("space_to_batch_nd", lambda d: (d.f(2, 3, 4, 4), [2, 2], [[0, 0], [0, 0]])),
    ("batch_to_space_nd", lambda d: (d.f(4, 3, 2, 2), [2, 2], [[0, 0], [0, 0]])),
    # indexing
    ("gather_elements mint.gather", lambda d: _indexed(d, d.f(5, 6), d.number % 2)),
    ("gather_d", lambda d: (d.f(5, 6), 0, d.i(5, 3, 6))),
    ("ops.gather", lambda d: (d.f(5, 6), d.i32(5, 4), 0)),
    ("gather_nd", lambda d: (d.f(5, 6), d.i32(5, 3, 2))),
    ("index_select", lambda d: (d.f(5, 6), 0, d.i(5, 4))),
    ("take", lambda d: (d.f(5, 6), d.i(30, 4))),
    ("mint.scatter", lambda d: (d.f(5, 6), 0, d.places(5, 3, 6), d.f(3, 6))),
    ("ops.scatter", lambda d: (d.f(5, 6), 0, d.places(5, 3, 6), d.f(3, 6))),
    ("mint.scatter_add", lambda d: (d.f(5, 6), 0, d.places(5, 3, 6), d.f(3, 6))),
    ("index_add", lambda d: (d.f(5, 6), 0, Tensor([0, 2, 4], ms.int64), d.f(3, 6))),
    ("ops.index_add", lambda d: (d.f(5, 6), Tensor([0, 2, 4], ms.int32), d.f(3, 6), 0)),
    ("index_fill", lambda d: (d.f(5, 6), 0, Tensor([0, 2], ms.int32), Tensor(2.0, ms.float32))),
    ("inplace_add inplace_sub inplace_update", lambda d: (d.f(5, 6), d.f(2, 6), (0, 2))),
    ("inplace_index_add", lambda d: (d.f(5, 6), Tensor([0, 2], ms.int32), d.f(2, 6), 0)),
    (
        """tensor_scatter_add tensor_scatter_sub tensor_scatter_mul tensor_scatter_div tensor_scatter_max
        tensor_scatter_min tensor_scatter_update""",
        lambda d: (d.f(5, 6), Tensor([[0, 1], [2, 3], [4, 4]], ms.int32), d.pos(3)),
    ),
    ("tensor_scatter_elements", lambda d: (d.f(5, 6), d.places(5, 3, 6), d.f(3, 6), 0)),
    ("scatter_nd", lambda d: (Tensor([[0], [2]], ms.int32), d.f(2, 6), (5, 6))),
    (
        "unsorted_segment_sum unsorted_segment_max unsorted_segment_min unsorted_segment_prod",
        lambda d: (d.f(5, 6), Tensor([0, 1, 1, 2, 0], ms.int32), 3),
    ),
    ("ops.sparse_segment_mean", lambda d: (d.f(5, 6), Tensor([0, 2, 3], ms.int32), Tensor([0, 0, 1], ms.int32))),
    ("searchsorted", lambda d: (d.sorted(5, 6), d.f(5, 3))),
    ("bucketize", lambda d: (d.f(5, 6), [-0.5, 0.0, 0.5])),
    ("one_hot", lambda d: (d.i(6, 5), 6)),
    ("ops.one_hot", lambda d: (d.i(6, 5), 6, Tensor(1.0, ms.float32), Tensor(0.0, ms.float32))),
    ("embedding", lambda d: (d.i(7, 3, 4), d.f(7, 5))),
    ("sequence_mask", lambda d: (d.i32(5, 5), 6)),
    ("reverse_sequence", lambda d: (d.f(5, 6), Tensor([1, 2, 3, 4, 5], ms.int64), 1, 0)),
    ("intopk", lambda d: (d.f(5, 6), d.i32(6, 5), 2)),
    ("unique_with_pad", lambda d: (d.i32(4, 8), 0)),
    # products
    ("linear dense", lambda d: (d.f(*d.s), d.f(7, d.s[-1]), d.f(7))),
    ("matmul", lambda d: (d.f(*d.s), d.f(d.s[-1], 5))),
    ("mm", lambda d: (d.f(5, 6), d.f(6, 3))),
    ("mv", lambda d: (d.f(5, 6), d.f(6))),
    ("dot inner", lambda d: (d.f(6), d.f(6))),
    ("ops.inner", lambda d: (d.f(5, 6), d.f(3, 6))),
    ("vdot vecdot", lambda d: (d.f(6), d.f(6))),
    ("ops.vecdot", lambda d: (d.f(5, 6), d.f(5, 6))),
    ("outer ger", lambda d: (d.f(5), d.f(6))),
    ("bmm batch_dot", lambda d: (d.f(5, 2, 3), d.f(5, 3, 4))),
    ("addmm", lambda d: (d.f(5, 4), d.f(5, 6), d.f(6, 4))),
    ("addmv", lambda d: (d.f(5), d.f(5, 6), d.f(6))),
    ("addr", lambda d: (d.f(5, 6), d.f(5), d.f(6))),
    ("addbmm", lambda d: (d.f(3, 4), d.f(5, 3, 2), d.f(5, 2, 4))),
    ("baddbmm", lambda d: (d.f(5, 3, 4), d.f(5, 3, 2), d.f(5, 2, 4))),
    ("kron", lambda d: (d.f(5, 2), d.f(2, 3))),
    ("cross", lambda d: (d.f(5, 3), d.f(5, 3))),
    ("tensor_dot", lambda d: (d.f(5, 6), d.f(6, 3), 1)),
    ("einsum", lambda d: ("ij,jk->ik", d.f(5, 6), d.f(6, 3))),
    ("bidense", lambda d: (d.f(5, 3), d.f(5, 4), d.f(2, 3, 4), d.f(2))),
    ("bias_add", lambda d: (d.f(5, 6), d.f(6))),
    ("cdist", lambda d: (d.f(5, 3), d.f(4, 3))),
    ("pdist", lambda d: (d.f(5, 3),)),
    ("cov", lambda d: (d.f(5, 6),)),
    ("cosine_similarity", lambda d: (d.f(5, 6), d.f(5, 6))),
    # matrices
    ("inverse det slogdet logdet matrix_determinant log_matrix_determinant cholesky", lambda d: (d.spd(5),)),
    ("mint.linalg.inv cholesky_inverse matrix_exp pinv eigvals eig geqrf", lambda d: (d.spd(5),)),
    ("matrix_power", lambda d: (d.spd(4), 2)),
    ("qr svd cond", lambda d: (d.spd(5),)),
    ("ops.orgqr", lambda d: (d.f(5, 3), d.f(3))),
    ("ormqr", lambda d: (d.f(5, 3), d.f(3), d.f(5, 2))),
    ("matrix_solve lstsq", lambda d: (d.spd(5), d.f(5, 2))),
    ("cholesky_solve", lambda d: (d.f(5, 2), d.spd(5))),
    ("triangular_solve", lambda d: (d.f(5, 2), d.spd(5))),
    ("lu_solve", lambda d: (d.f(5, 2), d.spd(5), Tensor([1, 2, 3, 4, 5], ms.int32))),
    ("fft ifft rfft ihfft fftn ifftn rfftn fft2 ifft2 rfft2 ihfft2 ihfftn fftshift ifftshift", lambda d: (d.f(5, 6),)),
    ("irfft hfft irfft2 irfftn hfft2 hfftn", lambda d: (d.c(5, 6),)),
    ("imag view_as_real real conj angle ops.absolute", lambda d: (d.c(5, 6),)),
    # layers
    ("layer_norm", lambda d: (d.f(*d.s), (d.s[-1],), d.f(d.s[-1]), d.f(d.s[-1]))),
    ("rms_norm", lambda d: (d.f(*d.s), d.f(d.s[-1]))),
    ("group_norm", lambda d: (d.f(5, 6, 3), 2, d.f(6), d.f(6))),
    ("batch_norm", lambda d: (d.f(5, 6, 2, 2), d.f(6), d.pos(6), d.f(6), d.f(6))),
    ("lrn", lambda d: (d.f(2, 6, 3, 3),)),
    ("conv1d", lambda d: (d.f(5, 4, 8), d.f(6, 4, 3))),
    ("conv2d", lambda d: (d.f(5, 4, 6, 6), d.f(6, 4, 3, 3))),
    ("conv3d", lambda d: (d.f(2, 4, 4, 4, 4), d.f(6, 4, 3, 3, 3))),
    ("conv_transpose2d", lambda d: (d.f(5, 4, 4, 4), d.f(4, 6, 3, 3))),
    ("avg_pool1d", lambda d: (d.f(5, 4, 8), 2, 2)),
    ("avg_pool2d", lambda d: (d.f(5, 4, 6, 6), 2, 2)),
    ("avg_pool3d", lambda d: (d.f(2, 4, 4, 4, 4), 2, 2)),
    ("max_pool2d", lambda d: (d.f(5, 4, 6, 6), 2, 2)),
    ("max_pool3d", lambda d: (d.f(2, 4, 4, 4, 4), 2, 2)),
    ("lp_pool1d", lambda d: (d.pos(5, 4, 8), 2.0, 2)),
    ("lp_pool2d", lambda d: (d.pos(5, 4, 6, 6), 2.0, 2)),
    ("adaptive_avg_pool1d adaptive_max_pool1d", lambda d: (d.f(5, 4, 8), 2)),
    ("adaptive_avg_pool2d adaptive_max_pool2d", lambda d: (d.f(5, 4, 6, 6), (2, 2))),
    ("adaptive_avg_pool3d adaptive_max_pool3d", lambda d: (d.f(2, 4, 4, 4, 4), (2, 2, 2))),
    ("max_unpool1d", lambda d: (d.pos(5, 4, 3), Tensor(np.tile([0, 2, 4], (5, 4, 1))), 2, 2)),
    ("max_unpool2d", lambda d: (d.pos(1, 1, 2, 2), Tensor([[[[0, 2], [8, 10]]]], ms.int64), 2, 2)),
    ("interpolate upsample", lambda d: (d.f(2, 4, 3, 3), (6, 6))),
    ("grid_sample", lambda d: (d.f(2, 3, 4, 4), d.unit(2, 3, 3, 2))),
    ("affine_grid", lambda d: (d.f(2, 2, 3), (2, 3, 4, 4))),
    ("crop_and_resize", lambda d: (d.f(2, 6, 6, 3), d.unit(2, 4), d.i32(2, 2), (3, 3))),
    ("rotary_position_embedding", lambda d: (d.f(2, 4, 3, 8), d.f(1, 1, 3, 8), d.f(1, 1, 3, 8))),
    ("iou", lambda d: (d.pos(5, 4), d.pos(3, 4))),
    ("bounding_box_encode bounding_box_decode", lambda d: (d.pos(5, 4), d.pos(5, 4))),
    ("dropout1d", lambda d: (d.f(5, 4, 3),)),
    ("dropout2d", lambda d: (d.f(5, 4, 3, 3),)),
    ("dropout3d", lambda d: (d.f(5, 4, 2, 2, 2),)),
    ("gumbel_softmax", lambda d: (d.f(5, 6),)),
    # losses
    ("mse_loss l1_loss smooth_l1_loss huber_loss", lambda d: (d.f(*d.s), d.f(*d.s))),
    ("binary_cross_entropy", lambda d: (d.unit(*d.s), d.unit(*d.s))),
    ("mint.nn.functional.binary_cross_entropy_with_logits", lambda d: (d.f(*d.s), d.unit(*d.s))),
    (
        "ops.binary_cross_entropy_with_logits",
        lambda d: (d.f(*d.s), d.unit(*d.s), d.pos(*d.s), d.pos(*d.s)),
    ),
    ("cross_entropy", lambda d: (d.f(5, 6), d.i32(6, 5))),
    ("mint.nn.functional.cross_entropy mint.nn.functional.nll_loss", lambda d: (d.f(5, 6), d.i(6, 5))),
    ("nll_loss", lambda d: (d.f(5, 6), d.i32(6, 5))),
    ("kl_div", lambda d: (d.f(*d.s), d.unit(*d.s))),
    ("soft_margin_loss hinge_embedding_loss", lambda d: (d.f(*d.s), d.b(*d.s).astype(ms.float32) * 2 - 1)),
    ("margin_ranking_loss", lambda d: (d.f(5), d.f(5), d.b(5).astype(ms.float32) * 2 - 1)),
    ("cosine_embedding_loss", lambda d: (d.f(5, 6), d.f(5, 6), d.b(5).astype(ms.float32) * 2 - 1)),
    ("multi_margin_loss", lambda d: (d.f(5, 6), d.i(6, 5))),
    ("multilabel_margin_loss", lambda d: (d.f(5, 6), d.i32(6, 5, 6))),
    ("multilabel_soft_margin_loss", lambda d: (d.f(5, 6), d.b(5, 6).astype(ms.float32))),
    ("triplet_margin_loss", lambda d: (d.f(5, 6), d.f(5, 6), d.f(5, 6))),
    ("gaussian_nll_loss", lambda d: (d.f(*d.s), d.f(*d.s), d.pos(*d.s))),
    (
        "ctc_loss",
        lambda d: (d.f(6, 2, 4), d.i32(3, 2, 3) + 1, Tensor([6, 6], ms.int32), Tensor([3, 2], ms.int32)),
    ),
    # random
    ("randint_like", lambda d: (d.f(*d.s), 0, 9)),
    ("multinomial multinomial_with_replacement", lambda d: (d.pos(5, 6), 2)),
    ("mint.normal", lambda d: (d.f(*d.s), d.pos(*d.s))),
    ("ops.gamma", lambda d: ((2,), d.pos(5), d.pos(5))),
    ("random_categorical", lambda d: (d.f(5, 6), 3)),
    ("random_gamma", lambda d: (Tensor([2], ms.int32), d.pos(5))),
    ("random_poisson", lambda d: (Tensor([2], ms.int32), d.pos(5))),
    ("shuffle", lambda d: (d.f(5, 6),)),
    ("ops.laplace", lambda d: ((5, 6), d.f(1), d.pos(1))),
    ("ops.uniform", lambda d: ((5, 6), Tensor(0.0, ms.float32), Tensor(1.0, ms.float32))),
    ("absolute", lambda d: (d.f(*d.s),)),
    ("clip_by_norm", lambda d: (d.f(*d.s), 1.0)),
    ("clip_by_global_norm", lambda d: ([d.f(*d.s), d.f(3)], 1.0)),
    ("depend", lambda d: (d.f(*d.s), d.f(3))),
    ("is_nonzero", lambda d: (d.f(1),)),
    ("scalar_cast", lambda d: (2, ms.int64)),
    ("assign assign_add assign_sub", lambda d: (d.f(*d.s), d.f(*d.s))),
    ("geqrf", lambda d: (d.f(5, 4),)),
    ("check_valid", lambda d: (d.pos(5, 4), Tensor([6.0, 6.0, 1.0], ms.float32))),
    ("col2im", lambda d: (d.f(2, 3, 4, 20), Tensor([6, 5], ms.int32), (2, 2), (1, 1), (0, 0), (1, 1))),
    ("ctc_greedy_decoder", lambda d: (d.f(4, 2, 3), Tensor([4, 3], ms.int32))),
    ("fractional_max_pool2d", lambda d: (d.f(2, 3, 6, 6), 2, (3, 3), None, False, d.unit(2, 3, 2))),
    ("add_layer_norm", lambda d: (d.f(5, 6), d.f(5, 6), d.f(6), d.f(6), 1e-5, True)),
    ("add_rms_norm", lambda d: (d.f(5, 6), d.f(5, 6), d.f(6))),
    ("argmin argmax", lambda d: (d.f(*d.s), d.number % 2)),
]


def _indexed(d: Draw, x: Tensor, dim: int) -> tuple:
    return x, dim, d.i(x.shape[dim], *x.shape)


def _samples() -> dict[str, list[Maker]]:
    found: dict[str, list[Maker]] = {}
    for words, maker in _BY_SIGNATURE:
        for word in words.split():
            found.setdefault(word, []).append(maker)
    return found


#: Name, or name with its module, -> makers of arguments, tried in turn.
SAMPLES = _samples()
