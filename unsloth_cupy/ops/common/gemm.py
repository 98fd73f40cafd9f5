"""Matrix products, accumulated in float32: by cuBLAS for arrays of CuPy, else by NumPy.

    gemm(x, weight.T)                       a new array of their dtype, rounded once
    gemm(dy.T, x, out=dweight, add=True)    dweight += dy.T x, without a second array of its size

A transposed view becomes a flag of the product, not a copy.  cuBLAS is called directly, with CuPy's
handle: CuPy's own call cannot be captured into a graph, cuBLAS can.
"""

import ctypes
import functools
import importlib
from typing import Any, NamedTuple

import numpy as np

from ...core import gpu
from ...core.arrays import empty
from ...core.dtypes import FLOAT32, FLOATS, Array, Stored
from ...core.stand_in import is_planned, representative_steps
from ...errors import DTypeError, KernelError, ShapeError

BLOCK_BYTES = 8 * 2**20  # NumPy: size of the part of a 16-bit operand that is widened at a time
SUM_BYTES = 2**20  # NumPy: size of the part of a product that is computed, then added to out
BLOCK = 64  # least rows or columns of either part

# cuBLAS's numbers of dtypes, and of compute types (CUBLAS_COMPUTE_32F, _64F) with their scalars
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
        Of one dtype on a GPU; on the host, one may be float32 and the other a 16-bit float.  b may
        be a quantized weight or its transpose, of any dtype.
    out : (m, n) or (batch, m, n), optional
        Receives the product; of the operands' dtype, or of float32.
    dtype : optional
        The dtype of a new array; None for the operands'.
    add : bool
        Add the product to what out holds, in float32, and round once.
    """
    lead: Any = a
    m, n, k = a.shape[-2], b.shape[-1], a.shape[-1]
    batch = a.shape[:-2] or b.shape[:-2]
    if out is None:
        out = empty((*batch, m, n), a.dtype if dtype is None else dtype, like=a)
    if b.shape[-2] != k or out.shape != (*batch, m, n):
        expected = (*batch, m, n)
        problem = f"gemm: {a.shape} @ {b.shape} does not make {out.shape}"
        raise ShapeError(problem, expected=expected, actual=tuple(out.shape))
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
    """Write or add a product of two matrices to out; 16-bit operands are widened in parts."""
    wide = np.promote_types(np.promote_types(a.dtype, b.dtype), FLOAT32)
    if a.dtype == b.dtype == out.dtype == wide:
        _wide(a, b, out, add)
        return
    rows, columns = steps(a.shape[0], b.shape[1], a.shape[1], wide.itemsize)
    for left in representative_steps(a, range(0, b.shape[1], columns)):
        part = np.s_[:, left : left + columns]
        _by_rows(a, b[part].astype(wide, copy=False), out[part], rows, add)


def _by_rows(a: Array, b: Array, out: Array, step: int, add: bool) -> None:
    """Write or add a product with a wide b to out; ``step`` rows of a are widened at a time."""
    for top in representative_steps(a, range(0, len(a), step)):
        part = slice(top, top + step)
        rows = a[part].astype(b.dtype, copy=False)
        if out.dtype == b.dtype:
            _wide(rows, b, out[part], add)
            continue
        product = rows @ b
        if add:
            product += out[part]
        with np.errstate(over="ignore"):  # values beyond float16 become inf, as on a GPU
            out[part] = product
        del rows, product  # frees them before the next part is allocated


def _wide(a: Array, b: Array, out: Array, add: bool) -> None:
    """Write or add a product to out, all three of one dtype, float32 or float64."""
    if not add:
        np.matmul(a, b, out=out)
        return
    step = max(BLOCK, SUM_BYTES // (out.shape[1] * out.itemsize))
    for top in representative_steps(a, range(0, len(a), step)):
        part = slice(top, top + step)
        out[part] += a[part] @ b  # NumPy's matmul cannot accumulate: few rows, a small temporary


def steps(m: int, n: int, k: int, itemsize: int = 4) -> tuple[int, int]:
    """Return how many rows of a, and columns of b, are widened at a time."""
    most = max(BLOCK, BLOCK_BYTES // (k * itemsize))
    return min(m, most), min(n, most)


# ---- cuBLAS -------------------------------------------------------------------------------------
class Layout(NamedTuple):
    """The arguments that describe a matrix to cuBLAS; strides count elements."""

    array: Any
    flag: int  # KEEP or TRANSPOSE
    stride: int  # the leading dimension: from a row or column to the next
    batch_stride: int


def _layout(x: Any) -> Layout:
    """Return x.T for cuBLAS, which is column-major; x is copied if neither axis is dense."""
    (rows, columns), size = x.shape[-2:], x.itemsize
    down, right = (stride // size for stride in x.strides[-2:])
    batch = x.strides[0] // size if x.ndim == 3 and x.shape[0] > 1 else 0
    if (right == 1 or columns == 1) and (rows == 1 or down >= columns):
        return Layout(x, KEEP, max(columns, down if rows > 1 else 1), batch)
    if (down == 1 or rows == 1) and (columns == 1 or right >= rows):
        return Layout(x, TRANSPOSE, max(rows, right if columns > 1 else 1), batch)
    return _layout(x.copy())


def _by_cublas(a: Any, b: Any, out: Any, add: bool) -> None:
    """Write or add a product, single or batched, to out by cuBLAS."""
    if a.dtype != b.dtype:
        raise DTypeError(f"gemm: a is {a.dtype} and b is {b.dtype}; cast one to the other")
    target = _layout(out)
    if target.array is not out or target.flag == TRANSPOSE:
        product = gemm(a, b, dtype=out.dtype)
        out[...] = out + product if add else product
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
    arguments += [ctypes.byref(scalar(add)), out.data.ptr, DTYPES[out.dtype], target.stride]
    arguments += [target.batch_stride, batch] if strided else []
    library = cublas()
    call = library.cublasGemmStridedBatchedEx if strided else library.cublasGemmEx
    with gpu.device_of(out):
        handle, mode = _handle(library)
        status = call(handle, *arguments, compute, ANY_ALGORITHM)
        library.cublasSetMathMode(handle, mode)  # CuPy's own products rely on the old mode
    if status:
        raise KernelError(f"gemm: cuBLAS gave status {status} for {a.shape} @ {b.shape}")


def _handle(library: Any) -> tuple[int, int]:
    """Set the stream and the math mode of CuPy's handle of this thread and device.

    The stream is the current one.  Return the handle and its old math mode.
    """
    cuda = gpu.cupy().cuda
    handle: int = cuda.device.get_cublas_handle()
    stream, mode = cuda.get_current_stream().ptr, ctypes.c_int()
    if (
        library.cublasSetStream_v2(handle, stream)
        or library.cublasGetMathMode(handle, ctypes.byref(mode))
        or library.cublasSetMathMode(handle, FULL_PRECISION)
    ):
        raise KernelError("gemm: cuBLAS rejects the stream or the math mode; is the GPU lost?")
    return handle, mode.value


@functools.cache
def cublas() -> Any:
    """Return the cuBLAS that CuPy loads."""
    libraries = importlib.import_module("cupy_backends.cuda.libs")
    loaded = libraries.cublas  # attribute access finds it in wheels too; an import would not
    library = ctypes.CDLL(loaded.__file__)  # symbols are looked up in its dependencies too
    declare(library)
    return library


def declare(library: Any) -> None:
    """Declare the argument types of the five functions: addresses and integers."""
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
