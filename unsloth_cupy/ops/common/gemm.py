"""Matrix products, accumulated in float32: by cuBLAS where CuPy's arrays live, else by NumPy.

    gemm(x, weight.T)                       a new array of their dtype, rounded once
    gemm(dy.T, x, out=dweight, add=True)    dweight += dy.T x, and no array of its size beside it

A transposed view is a flag of the product, not a copy.  cuBLAS is called directly, with CuPy's
handle: CuPy's own call refuses to be captured into a graph, which cuBLAS does not.
"""

import ctypes
import functools
import importlib
from typing import Any, NamedTuple

import numpy as np

from ...core import gpu
from ...core.arrays import empty
from ...core.dtypes import FLOAT32, FLOATS, Array, Stored
from ...core.stand_in import is_planned
from ...errors import DTypeError, KernelError, ShapeError
from .steps import representative_steps

BLOCK_BYTES = 8 * 2**20  # of a 16-bit operand that is widened at a time, where NumPy computes
SUM_BYTES = 2**20  # of a product that waits to be added
BLOCK = 64  # rows or columns of either, at least

# of cuBLAS: dtypes, and the dtype of the sums: CUBLAS_COMPUTE_32F and _64F, with its scalars
DTYPES = {FLOATS[0]: 2, FLOATS[1]: 14, FLOATS[2]: 0, FLOATS[3]: 1}
COMPUTE = {True: (68, ctypes.c_float), False: (70, ctypes.c_double)}
KEEP, TRANSPOSE, ANY_ALGORITHM = 0, 1, -1
FULL_PRECISION = 16  # CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION: partial sums in float32


def gemm(
    a: Array, b: Array, *, out: Array | None = None, dtype: Any = None, add: bool = False
) -> Array:
    """Return ``a @ b``, or add it to out.

    Parameters
    ----------
    a, b : (m, k) and (k, n), or (batch, m, k) and (batch, k, n); one may lack batch
        Of one dtype on a GPU; where NumPy computes, float32 may meet a 16-bit float.  b may be a
        quantized weight or its transpose, of any dtype.
    out : (m, n) or (batch, m, n), optional
        Where the product goes: of the operands' dtype, or of float32.
    dtype : optional
        Of a new array; the operands' where absent.
    add : bool
        Add the product to what out holds, in float32, and round once.
    """
    lead: Any = a
    m, n, k = a.shape[-2], b.shape[-1], a.shape[-1]
    batch = a.shape[:-2] or b.shape[:-2]
    if out is None:
        out = empty((*batch, m, n), a.dtype if dtype is None else dtype, like=a)
    if b.shape[-2] != k or out.shape != (*batch, m, n):
        wanted = (*batch, m, n)
        problem = f"gemm: {a.shape} @ {b.shape} does not make {out.shape}"
        raise ShapeError(problem, expected=wanted, actual=tuple(out.shape))
    if 0 in out.shape:
        return out
    if k == 0:
        if not add:
            out[...] = 0
    elif isinstance(b, Stored):
        b.product(a, out, add)
    elif not isinstance(lead, np.ndarray):
        _by_cublas(a, b, out, add)
    elif batch:
        for i, part in enumerate(out):
            _by_numpy(a[i] if a.ndim == 3 else a, b[i] if b.ndim == 3 else b, part, add)
    else:
        _by_numpy(a, b, out, add)
    return out


# ---- NumPy --------------------------------------------------------------------------------------
def _by_numpy(a: Array, b: Array, out: Array, add: bool) -> None:
    wide = np.promote_types(np.promote_types(a.dtype, b.dtype), FLOAT32)
    if a.dtype == b.dtype == out.dtype == wide:
        _wide(a, b, out, add)
        return
    rows, columns = steps(a.shape[0], b.shape[1], a.shape[1], wide.itemsize)
    for left in representative_steps(a, range(0, b.shape[1], columns)):
        beside = np.s_[:, left : left + columns]
        _by_rows(a, b[beside].astype(wide, copy=False), out[beside], rows, add)


def _by_rows(a: Array, b: Array, out: Array, step: int, add: bool) -> None:
    for top in representative_steps(a, range(0, len(a), step)):
        part = slice(top, top + step)
        rows = a[part].astype(b.dtype, copy=False)
        if out.dtype == b.dtype:
            _wide(rows, b, out[part], add)
            continue
        product = rows @ b
        if add:
            product += out[part]
        with np.errstate(over="ignore"):  # what float16 cannot hold is inf, as on a GPU
            out[part] = product
        del rows, product  # before the next ones are made


def _wide(a: Array, b: Array, out: Array, add: bool) -> None:
    if not add:
        np.matmul(a, b, out=out)
        return
    step = max(BLOCK, SUM_BYTES // (out.shape[1] * out.itemsize))
    for top in representative_steps(a, range(0, len(a), step)):
        part = slice(top, top + step)
        out[part] += a[part] @ b  # NumPy's products cannot add: one of few rows waits


def steps(m: int, n: int, k: int, itemsize: int = 4) -> tuple[int, int]:
    """Return how many rows of a, and columns of b, are widened at a time."""
    most = max(BLOCK, BLOCK_BYTES // (k * itemsize))
    return min(m, most), min(n, most)


# ---- cuBLAS -------------------------------------------------------------------------------------
class Layout(NamedTuple):
    """How a matrix lies: its array, its flag, and elements from a row or column to the next."""

    array: Any
    flag: int
    stride: int
    batch_stride: int


def _layout(x: Any) -> Layout:
    """Return how cuBLAS reads x.T, as it goes by columns; x is copied if neither axis is dense."""
    (rows, columns), size = x.shape[-2:], x.itemsize
    down, right = (stride // size for stride in x.strides[-2:])
    batch = x.strides[0] // size if x.ndim == 3 and x.shape[0] > 1 else 0
    if (right == 1 or columns == 1) and (rows == 1 or down >= columns):
        return Layout(x, KEEP, max(columns, down if rows > 1 else 1), batch)
    if (down == 1 or rows == 1) and (columns == 1 or right >= rows):
        return Layout(x, TRANSPOSE, max(rows, right if columns > 1 else 1), batch)
    return _layout(x.copy())


def _by_cublas(a: Any, b: Any, out: Any, add: bool) -> None:
    if a.dtype != b.dtype:
        raise DTypeError(f"gemm: a is {a.dtype} and b is {b.dtype}; cast one to the other")
    home = _layout(out)
    if home.array is not out or home.flag == TRANSPOSE:
        made = gemm(a, b, dtype=out.dtype)
        out[...] = out + made if add else made
        return
    left, right = _layout(b), _layout(a)  # out.T = b.T a.T
    if is_planned(out):
        return
    compute, scalar = COMPUTE[a.dtype != FLOATS[3]]
    sizes = out.shape[-1], out.shape[-2], a.shape[-1]
    strided, batch = out.ndim == 3, out.shape[0]
    arguments: list[Any] = [left.flag, right.flag, *sizes, ctypes.byref(scalar(1))]
    for each in (left, right):
        arguments += [each.array.data.ptr, DTYPES[a.dtype], each.stride]
        arguments += [each.batch_stride] * strided
    arguments += [ctypes.byref(scalar(add)), out.data.ptr, DTYPES[out.dtype], home.stride]
    arguments += [home.batch_stride, batch] if strided else []
    library = cublas()
    call = library.cublasGemmStridedBatchedEx if strided else library.cublasGemmEx
    with gpu.at(out):
        handle, mode = _handle(library)
        status = call(handle, *arguments, compute, ANY_ALGORITHM)
        library.cublasSetMathMode(handle, mode)  # CuPy's own products count on it
    if status:
        raise KernelError(f"gemm: cuBLAS gave status {status} for {a.shape} @ {b.shape}")


def _handle(library: Any) -> tuple[int, int]:
    """Return CuPy's handle of this thread and device, on the current stream, and its old mode."""
    cuda = gpu.cupy().cuda
    handle: int = cuda.device.get_cublas_handle()
    stream, mode = cuda.get_current_stream().ptr, ctypes.c_int()
    if (
        library.cublasSetStream_v2(handle, stream)
        or library.cublasGetMathMode(handle, ctypes.byref(mode))
        or library.cublasSetMathMode(handle, FULL_PRECISION)
    ):
        raise KernelError("gemm: cuBLAS takes neither the stream nor the mode; is the GPU lost?")
    return handle, mode.value


@functools.cache
def cublas() -> Any:
    """Return the cuBLAS that CuPy loads."""
    libraries = importlib.import_module("cupy_backends.cuda.libs")
    loaded = libraries.cublas  # to ask for it finds it in wheels too; an import of it would not
    library = ctypes.CDLL(loaded.__file__)  # its dependencies are searched too
    declare(library)
    return library


def declare(library: Any) -> None:
    """Say what the five functions take: addresses and integers."""
    pointer, number, distance = ctypes.c_void_p, ctypes.c_int, ctypes.c_longlong
    matrix = [pointer, number, number]  # address, dtype, elements between columns
    head, tail = [pointer, *[number] * 5, pointer], [number, number]
    library.cublasGemmEx.argtypes = [*head, *matrix, *matrix, pointer, *matrix, *tail]
    matrix = [*matrix, distance]
    library.cublasGemmStridedBatchedEx.argtypes = [
        *(*head, *matrix, *matrix, pointer, *matrix, number),
        *tail,
    ]
    library.cublasSetStream_v2.argtypes = [pointer, pointer]
    library.cublasSetMathMode.argtypes = [pointer, number]
    library.cublasGetMathMode.argtypes = [pointer, pointer]
