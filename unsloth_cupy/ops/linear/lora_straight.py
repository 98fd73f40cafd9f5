"""An adapter whose layer computes with a rounded weight, and learns as if it were not rounded.

y = x Q^T    Q = rounded(W + scale b a)
dx = dy Q    da = scale (dy b)^T x    db = scale dy^T (x a^T)        straight through the rounding

Neither gradient needs that of the whole weight.  ``lora_add_`` adds in one order whatever computes
it, so that a file written later, elsewhere, is rounded from equal bits.

Bengio, Léonard and Courville, Estimating or Propagating Gradients Through Stochastic Neurons, 2013.
"""

from functools import cache
from typing import Any

import numpy as np

from ...core.arrays import contiguous, empty, lanes
from ...core.dtypes import FLOAT32, Array
from ...core.kernel import load
from ...core.op import op
from ...core.source import Constants
from ...core.stand_in import representative_steps
from ..common.gemm import gemm
from ..common.no_kernel import no_kernel
from ..elements.cast import in_dtype
from ._lora_gradients import rank_gradients
from .linear import flat

AT_ONCE = 2**15  # values that NumPy adds to at a time, which stay in cache
ROWS, THREADS = 4, 256  # of a thread of the kernel; of a block


def lora_sum(weight: Any, a: Array, b: Array, scale: float) -> Array:
    """Return ``weight + scale b a``, (outputs, inputs), in float32 or wider, by ``lora_add_``."""
    wide = np.promote_types(weight.dtype, FLOAT32)
    factors = (each.astype(wide, copy=False) for each in (a, b))
    return lora_add_(weight.astype(wide), *factors, scale=float(scale))


@op(
    "w(outputs, inputs), a(rank, inputs): param, b(outputs, rank): param -> sum(outputs, inputs)",
    widen=False,
    no_gradient="it changes an array, which is rounded next: see straight_gradients",
    traffic=lambda a: 2 * a["w"].nbytes + a["a"].nbytes + a["b"].nbytes,
    operations=lambda a: 2 * a["w"].size * a["a"].shape[0],
)
def lora_add_(w: Array, a: Array, b: Array, *, scale: float = 1.0) -> Array:
    """Add ``scale b a`` to w, and return it; the bits depend on no device, BLAS or threads.

    Each value is ``((b[0] a[0] + b[1] a[1]) + ...) + w``, every product and sum rounded, with the
    scale in b.
    """
    wide = np.promote_types(w.dtype, FLOAT32)
    columns = b.astype(wide, copy=False) * wide.type(scale)
    rows = a.astype(wide, copy=False)
    step = max(1, AT_ONCE // max(1, w.shape[1]))
    for top in representative_steps(w, range(0, len(w), step)):
        part = slice(top, min(top + step, len(w)))
        total, term = (empty(w[part].shape, wide, like=w) for _ in range(2))
        total[...] = 0
        for rank in representative_steps(w, range(len(rows))):
            np.multiply(columns[part, rank, None], rows[rank], out=term)
            np.add(total, term, out=total)
        w[part] = total + w[part].astype(wide, copy=False)
    return w


@lora_add_.kernel
def _launch(w: Array, a: Array, b: Array, scale: float) -> Any:
    """Add the change to w by the kernel, and return w."""
    if not w.flags.c_contiguous:
        return no_kernel("w is not contiguous")
    a, b, (outputs, inputs) = contiguous(a), contiguous(b), w.shape
    width = min(lanes(inputs, w), lanes(inputs, a))
    tiles = -(-inputs // (THREADS * width))
    chosen = _constants(w.dtype, a.dtype, b.dtype, width)
    kernel = load("lora_add.cu", "lora_add_", w, chosen)
    blocks = tiles * -(-outputs // ROWS)
    kernel[blocks, THREADS](w, a, b, outputs, inputs, a.shape[0], tiles, scale)
    return w


@cache
def _constants(w: Any, a: Any, b: Any, lanes: int) -> Constants:
    """Return the constants of lora_add.cu."""
    return Constants(T=w, A=a, B=b, LANES=lanes, ROWS=ROWS, THREADS=THREADS)


def straight_gradients(
    dy: Array, rows: Array, a: Array, b: Array, scale: float
) -> tuple[Array, Array | None, Array]:
    """Return da, db and ``scale dy b``; ``rows`` is what the adapter read, as a matrix."""
    low = gemm(rows, in_dtype(a, rows.dtype).T)
    up, db = rank_gradients(flat(dy), b, low, b.dtype, scale)
    return gemm(up.T, rows, dtype=a.dtype), db, up
