"""Llama's feed-forward layer, whose inner activations never exist as a whole.

y = (silu(x gate_weight^T) * (x up_weight^T)) down_weight^T

Row by row independent, so chunks of rows go through all three products; backward makes the inner
activations of a chunk anew.

Shazeer, GLU Variants Improve Transformer, 2020.
"""

from collections.abc import Iterator

import numpy as np

from .._op import op
from .._typing import Array
from ..errors import ConfigError
from .linear import accumulate, flat
from .swiglu import swiglu, swiglu_backward

CHUNK_BYTES = 32 * 2**20  # of one inner activation
CHUNKS = 8  # at least: then the inner activations of backward are small beside one whole one
CHUNK_ROWS = 32  # of fewer rows a matrix product is no faster than its weights can be read


@op(
    "x(*rows, hidden), gate_weight(inner, hidden), up_weight(inner, hidden),"
    " down_weight(outputs, inner) -> y(*rows, outputs)"
)
def swiglu_mlp(
    x: Array,
    gate_weight: Array,
    up_weight: Array,
    down_weight: Array,
    *,
    chunk: int | None = None,
) -> Array:
    """Return ``(silu(x @ gate_weight.T) * (x @ up_weight.T)) @ down_weight.T`` in little memory.

    Parameters
    ----------
    x : (*rows, hidden) float
    gate_weight, up_weight : (inner, hidden) float
    down_weight : (outputs, inner) float
    chunk : int, optional
        Rows at a time.  Where absent an eighth of them, at least 32, and at most as many as make
        32 MiB of one inner activation.

    Returns
    -------
    y : (*rows, outputs) float

    Raises
    ------
    ConfigError
        chunk is not positive.
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.
    """
    rows = flat(x)
    y = np.empty_like(rows, shape=(len(rows), len(down_weight)), order="C")
    for part in _parts(rows, gate_weight, chunk):
        inner = swiglu(rows[part] @ gate_weight.T, rows[part] @ up_weight.T)
        np.matmul(inner, down_weight.T, out=y[part])
    return y.reshape(*x.shape[:-1], len(down_weight))


@swiglu_mlp.gradient(
    "dy(*rows, outputs), x(*rows, hidden), gate_weight(inner, hidden), up_weight(inner, hidden),"
    " down_weight(outputs, inner) -> dx(*rows, hidden), dgate_weight(inner, hidden),"
    " dup_weight(inner, hidden), ddown_weight(outputs, inner)"
)
def swiglu_mlp_backward(
    dy: Array,
    x: Array,
    gate_weight: Array,
    up_weight: Array,
    down_weight: Array,
    *,
    chunk: int | None = None,
) -> tuple[Array, Array, Array, Array]:
    """Return the gradients of x and of the weights, accumulated in float32."""
    rows, seeds, dx = flat(x), flat(dy), np.empty_like(flat(x), order="C")
    dgate_weight, dup_weight = np.zeros_like(gate_weight), np.zeros_like(up_weight)
    ddown_weight = np.zeros_like(down_weight)
    for part in _parts(rows, gate_weight, chunk):
        gate, up = rows[part] @ gate_weight.T, rows[part] @ up_weight.T
        accumulate(ddown_weight, seeds[part], swiglu(gate, up))
        dgate, dup = swiglu_backward(seeds[part] @ down_weight, gate, up)
        accumulate(dgate_weight, dgate, rows[part])
        accumulate(dup_weight, dup, rows[part])
        np.matmul(dgate, gate_weight, out=dx[part])
        dx[part] += dup @ up_weight
    return dx.reshape(x.shape), dgate_weight, dup_weight, ddown_weight


def _parts(rows: Array, weight: Array, chunk: int | None) -> Iterator[slice]:
    """Yield slices that cover the rows, each of chunk rows but the last."""
    if chunk is None:
        most = max(1, CHUNK_BYTES // max(1, len(weight) * rows.itemsize))
        chunk = min(most, max(CHUNK_ROWS, -(-len(rows) // CHUNKS)))
    if chunk <= 0:
        raise ConfigError(f"swiglu_mlp(chunk={chunk}): chunk must be a positive number of rows")
    for start in range(0, len(rows), chunk):
        yield slice(start, start + chunk)
