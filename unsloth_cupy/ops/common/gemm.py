"""Matrix products, accumulated in float32: by cuBLAS for arrays of CuPy, else by NumPy.

Inside ``core.replay.fixed_order`` the module ``fixed_order`` computes them instead.

    gemm(x, weight.T)                       a new array of their dtype, rounded once
    gemm(dy.T, x, out=dweight, add=True)    dweight += dy.T x, without a second array of its size

A transposed view becomes a flag of the product, not a copy.  cuBLAS is called directly, as CuPy's
own call cannot be captured into a graph.  The arguments of cuBLAS are cached by shapes, strides and
dtypes, so that a call only looks them up and passes addresses.
"""

import ctypes
import functools
import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from ...core import gpu
from ...core.arrays import empty
from ...core.dtypes import FLOAT32, FLOATS, Array, Stored
from ...core.replay import Recorded, is_fixed
from ...core.stand_in import is_planned, representative_steps
from ...errors import DTypeError, KernelError, ShapeError
from ...placement import PER_THREAD
from . import threads
from .fixed_order import fixed_product

# NumPy: bytes of the part of a 16-bit operand that is widened at a time, so that no whole wide copy
# exists; of the part of a product that is computed, then added to out; and the fewest rows or
# columns of either part.
BLOCK_BYTES = 8 * 2**20
SUM_BYTES = 2**20
BLOCK = 64
# NumPy: most rows times the transpose of a weight of at least so many numbers that are computed in
# another form.  OpenBLAS's AVX-512 kernels read small operands in place, which else are copied
# first: operands of at most so many multiplications, for at most so many results
# (sgemm_small_kernel_permit_skylakex.c).  Weights multiplied in such parts take 0.35 to 0.9 of the
# time of weight @ rows.T, which takes 0.6 to 0.9 of that of rows @ weight.T, for 2 to 24 rows, and
# longer if parts have fewer than LEAST columns (256 x 1024 to 14336 x 1024, float32, one thread of
# an EPYC, OpenBLAS 0.3.31).  For its AVX2 kernels all three are about equal.
FEW, LARGE = 32, 2**15
IN_PLACE = {"skylakex", "cooperlake", "sapphirerapids"}
MULTIPLICATIONS, RESULTS, LEAST = 10**6, 1200, 4
SHARE = 2**22  # multiplications for each thread: 0.1 to 0.3 ms, of which its start takes 0.05

# cuBLAS's numbers of dtypes, and of compute types (CUBLAS_COMPUTE_32F, _64F) with their scalars
DTYPES = {FLOATS[0]: 2, FLOATS[1]: 14, FLOATS[2]: 0, FLOATS[3]: 1}
COMPUTE = {True: (68, ctypes.c_float), False: (70, ctypes.c_double)}
KEEP, TRANSPOSE, ANY_ALGORITHM = 0, 1, -1
KEPT = 4096  # forms of products in the cache
FULL_PRECISION = 16  # CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION: partial sums in float32
# bytes of cuBLAS's workspace that NVIDIA recommends before sm_90 (False) and from sm_90 on (True)
WORKSPACE = {False: 4 * 2**20, True: 32 * 2**20}


def gemm(
    a: Array,
    b: Array,
    *,
    out: Array | None = None,
    dtype: Any = None,
    add: bool = False,
    factor: float = 1.0,
) -> Array:
    """Return ``factor * (a @ b)``, or add it to out.

    Parameters
    ----------
    a, b : (m, k) and (k, n), or (batch, m, k) and (batch, k, n); one may lack batch
        Both have one dtype on a GPU; on the host, one may be float32 and the other a 16-bit float.
        b may be a quantized weight or its transpose, of any dtype.
    out : (m, n) or (batch, m, n), optional
        Receives the product; its dtype is that of the operands, or float32.
    dtype : optional
        The dtype of a new array; None for the dtype of the operands.
    add : bool
        Add the product to out, in float32, and round once.
    factor : float
        Multiplies the product; must be 1 for a quantized weight.
    """
    lead: Any = a
    m, n, k = a.shape[-2], b.shape[-1], a.shape[-1]
    batch = a.shape[:-2] or b.shape[:-2]
    if out is None:
        like: Any = b if is_planned(b) else a
        out = empty((*batch, m, n), a.dtype if dtype is None else dtype, like=like)
    if b.shape[-2] != k or out.shape != (*batch, m, n):
        expected = (*batch, m, n)
        problem = f"gemm: {a.shape} @ {b.shape} does not make {out.shape}"
        raise ShapeError(problem, expected=expected, actual=tuple(out.shape))
    if 0 in out.shape:
        return out
    if k == 0:  # a BLAS may refuse such a product: the sum of no terms is 0
        if not add:
            out[...] = 0
    elif isinstance(b, Stored):
        b.product(a, out, add)
    elif is_fixed() and not is_planned(lead):
        fixed_product(a, b, out, add, factor)
    elif not isinstance(lead, np.ndarray):
        _by_cublas(a, b, out, add, factor)
    elif factor != 1:  # NumPy's product has no factor: the smaller operand is multiplied first
        wide = np.promote_types(np.promote_types(a.dtype, b.dtype), FLOAT32)
        scaled = min(a, b, key=lambda each: each.size).astype(wide) * wide.type(factor)
        return gemm(*((scaled, b) if a.size <= b.size else (a, scaled)), out=out, add=add)
    elif batch:
        for i in representative_steps(out, range(len(out))):
            _by_numpy(a[i] if a.ndim == 3 else a, b[i] if b.ndim == 3 else b, out[i], add)
    else:
        _by_numpy(a, b, out, add)
    return out


# ---- NumPy --------------------------------------------------------------------------------------
def _by_numpy(a: Array, b: Array, out: Array, add: bool) -> None:
    """Write or add a product of two matrices to out; 16-bit operands are widened part by part."""
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
        product = _times(rows, b)
        if add:
            product += out[part]
        with np.errstate(over="ignore"):  # values beyond float16 become infinity, as on a GPU
            out[part] = product
        del rows, product  # frees them before the next part is allocated


def _wide(a: Array, b: Array, out: Array, add: bool) -> None:
    """Write or add a product to out; all three arrays are float32, or all float64."""
    few = 1 < len(a) <= FEW and b.strides[0] == b.itemsize and b.size >= LARGE
    if few and not add:
        _few(a, b, out)
    elif not add:
        _times(a, b, out)
    elif few:
        product = np.empty_like(out)
        _few(a, b, product)
        out += product
    else:
        step = max(BLOCK, SUM_BYTES // (out.shape[1] * out.itemsize))
        for top in representative_steps(a, range(0, len(a), step)):
            part = slice(top, top + step)
            out[part] += _times(a[part], b)  # matmul cannot add: few rows keep its temporary small


def _few(a: Array, b: Array, out: Array) -> None:
    """Write the product of a few rows and the transpose of a large weight to out."""
    (m, k), n = a.shape, b.shape[1]
    step = min(MULTIPLICATIONS // (m * k), RESULTS // m)
    contiguous = a.strides[1] == a.itemsize and out.strides[1] == out.itemsize
    if step < LEAST or not contiguous or not reads_in_place():
        out[...] = _times(b.T, a.T).T
        return
    whole = n - n % step
    if whole == 0:
        _times(a, b, out)
        return
    weight = b.T[:whole].reshape(-1, step, k).swapaxes(1, 2)
    results = out[:, :whole].reshape(m, -1, step).swapaxes(0, 1)
    shares = min(threads.count(), m * b.size // SHARE)
    if shares < 2:
        _times(a, weight, results)
    else:
        share = -(-len(weight) // shares)

        def times(first: int) -> None:
            part = slice(first, first + share)
            _times(a, weight[part], results[part])

        threads.each(times, range(0, len(weight), share))
    if whole < n:
        _times(a, b[:, whole:], out[:, whole:])


@functools.cache
def reads_in_place() -> bool:
    """Return whether NumPy's BLAS has kernels that read small operands in place."""
    from threadpoolctl import threadpool_info

    return any(each.get("architecture", "").lower() in IN_PLACE for each in threadpool_info())


def _times(a: Array, b: Array, out: Array | None = None) -> Array:
    """Return ``a @ b``."""
    # a BLAS may set the flag of an invalid operation in lanes that hold no value
    with np.errstate(invalid="ignore"):
        product: Array = np.matmul(a, b, out=out)
        return product


def steps(m: int, n: int, k: int, itemsize: int = 4) -> tuple[int, int]:
    """Return the number of rows of a, and of columns of b, that are widened at a time."""
    most = max(BLOCK, BLOCK_BYTES // (k * itemsize))
    return min(m, most), min(n, most)


# ---- cuBLAS -------------------------------------------------------------------------------------
def _strides(
    shape: tuple[int, ...], strides: tuple[int, ...], size: int
) -> tuple[int, int, int] | None:
    """Return a flag and two strides in elements that describe x.T to cuBLAS; None if none does.

    cuBLAS is column-major.  The strides are between rows or columns, and between matrices.
    """
    (rows, columns), (down, right) = shape[-2:], (stride // size for stride in strides[-2:])
    batch = strides[0] // size if len(shape) == 3 and shape[0] > 1 else 0
    if (right == 1 or columns == 1) and (rows == 1 or down >= columns):
        return KEEP, max(columns, down if rows > 1 else 1), batch
    if (down == 1 or rows == 1) and (columns == 1 or right >= rows):
        return TRANSPOSE, max(rows, right if columns > 1 else 1), batch
    return None


Shaped = tuple[tuple[int, ...], tuple[int, ...], np.dtype[Any]]  # shape, strides and dtype


@functools.lru_cache(KEPT)
def _product(
    a: Shaped, b: Shaped, out: Shaped, add: bool, factor: float, library: Any
) -> Callable[..., None] | None:
    """Return a function that starts a product, called as a kernel is; None if a copy is needed."""
    if a[2] != b[2]:
        raise DTypeError(f"gemm: a is {a[2]} and b is {b[2]}; cast one to the other")
    left, right, target = (_strides(*x[:2], x[2].itemsize) for x in (b, a, out))  # out.T = b.T a.T
    if left is None or right is None or target is None or target[0] == TRANSPOSE:
        return None
    strided = len(out[0]) == 3
    compute, scalar = COMPUTE[a[2] != FLOATS[3]]
    sizes = out[0][-1], out[0][-2], a[0][-1]
    of_b, of_a, of_out = (
        (DTYPES[x[2]], strides[1], *[ctypes.c_longlong(strides[2])] * strided)
        for x, strides in ((b, left), (a, right), (out, target))
    )
    head = left[0], right[0], *sizes, ctypes.byref(scalar(factor))
    before = ctypes.byref(scalar(add))  # beta, the factor of out before the product is added
    tail = *of_out, *[out[0][0]] * strided, compute, ANY_ALGORITHM
    name = "cublasGemmStridedBatchedEx" if strided else "cublasGemmEx"
    function, handle_of, at = getattr(library, name, None), _handle, ctypes.c_void_p

    def start(_: Any, __: Any, arrays: Any, ___: int) -> None:
        """Start the product; cuBLAS's result is out.T = b.T a.T, so b comes first."""
        b, a, out = arrays
        of_operands = at(b.data.ptr), *of_b, at(a.data.ptr), *of_a
        status = function(  # type: ignore[misc]
            handle_of(library), *head, *of_operands, before, at(out.data.ptr), *tail
        )
        if status:
            raise KernelError(f"gemm: cuBLAS gave status {status} for {a.shape} @ {b.shape}")

    return start


def _by_cublas(a: Any, b: Any, out: Any, add: bool, factor: float) -> None:
    """Write or add a product, single or batched, to out by cuBLAS."""
    library = None if is_planned(out) else cublas()
    forms = ((x.shape, x.strides, x.dtype) for x in (a, b, out))
    start = _product(*forms, add, float(factor), library)
    if start is None:
        _by_copies(a, b, out, add, factor)
    elif type(out) is Recorded:
        out.recording.calling(start, b, a, out)
    elif library is not None:
        with gpu.device_of(out):
            start((), (), (b, a, out), 0)


def _by_copies(a: Any, b: Any, out: Any, add: bool, factor: float) -> None:
    """Write or add a product to out, with copies of arrays whose strides cuBLAS does not accept."""
    target = _strides(out.shape, out.strides, out.itemsize)
    if target is None or target[0] == TRANSPOSE:
        product = gemm(a, b, dtype=out.dtype, factor=factor)
        out[...] = out + product if add else product
        return
    a, b = (x if _strides(x.shape, x.strides, x.itemsize) else x.copy() for x in (a, b))
    _by_cublas(a, b, out, add, factor)


class Handle:
    """A handle of cuBLAS with partial sums in float32, and its current stream.

    The size of cuBLAS's own workspace depends on other streams and on capture into a graph, and the
    order of sums depends on that size.  So each stream has a workspace of this module, of one size.
    """

    def __init__(self, library: Any) -> None:
        self.library, self.value, self.stream = library, ctypes.c_void_p(), -1
        if library.cublasCreate_v2(ctypes.byref(self.value)) or library.cublasSetMathMode(
            self.value, FULL_PRECISION
        ):
            raise KernelError("gemm: cuBLAS creates no handle; is the GPU's memory full?")

    def set_stream(self, stream: int, workspace: Any, size: int) -> None:
        """Run later products on a stream, with a workspace of ``size`` bytes."""
        library, value = self.library, self.value
        if library.cublasSetStream_v2(value, stream) or library.cublasSetWorkspace_v2(
            value, workspace.ptr, size
        ):  # in this order: cublasSetStream resets the workspace
            raise KernelError("gemm: cuBLAS rejects the stream; is the GPU lost?")
        self.stream = stream

    def __del__(self, ending: Any = sys.is_finalizing) -> None:
        if not ending():  # at the exit of Python the driver may be gone
            self.library.cublasDestroy_v2(self.value)


class Handles(threading.local):
    """The handles of a thread by device; CuPy's own handle needs another math mode."""

    def __init__(self) -> None:
        self.by_device: dict[int, Handle] = {}


handles = Handles()
# by device, stream and thread; none is ever freed, as captured graphs use them, too
workspaces: dict[tuple[int, int, int], Any] = {}


def _workspace(cuda: Any, device: int, stream: int) -> tuple[Any, int]:
    """Return the workspace of a stream of the current device, and its bytes."""
    key = device, stream, threading.get_ident() if stream == PER_THREAD else 0
    size = WORKSPACE[int(cuda.Device().compute_capability) >= 90]
    if key not in workspaces:
        try:
            with cuda.using_allocator(None):  # from a pool it would keep a whole chunk in use
                memory = cuda.alloc(size)
        except RuntimeError:  # CUDA has no memory left, but the pool may have unused memory
            memory = cuda.alloc(size)
        workspaces.setdefault(key, memory)
    return workspaces[key], size


def _handle(library: Any) -> ctypes.c_void_p:
    """Return the handle of this thread and the current device, set to the current stream."""
    cuda = gpu.imported().cuda
    device = cuda.runtime.getDevice() if gpu.several_gpus() else 0
    handle = handles.by_device.get(device)
    if handle is None or handle.library is not library:
        handle = handles.by_device[device] = Handle(library)
    stream = cuda.get_current_stream().ptr
    if stream != handle.stream:
        handle.set_stream(stream, *_workspace(cuda, device, stream))
    return handle.value


@functools.cache
def cublas() -> Any:
    """Return the library cuBLAS that CuPy loads."""
    libraries = importlib.import_module("cupy_backends.cuda.libs")
    loaded = libraries.cublas  # as an attribute: in wheels an import does not find it
    library: Any = ctypes.CDLL(loaded.__file__)  # finds symbols in the module's dependencies, too
    declare(library)
    # start() passes C's types: to convert 19 arguments by argtypes takes twice the time
    library.cublasGemmEx.argtypes = library.cublasGemmStridedBatchedEx.argtypes = None
    return library


def declare(library: Any) -> None:
    """Declare the argument types of seven functions of cuBLAS: addresses and integers."""
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
    library.cublasSetWorkspace_v2.argtypes = [pointer, pointer, ctypes.c_size_t]
    library.cublasSetMathMode.argtypes = [pointer, number]
    library.cublasCreate_v2.argtypes = library.cublasDestroy_v2.argtypes = [pointer]
