"""Llama's feed-forward layer, computed in chunks of rows to save memory.

y = (silu(x gate_weight^T) * (x up_weight^T)) down_weight^T

Rows are independent, so each chunk of rows passes through all three products, and the inner
activations of all rows are never in memory together.  Backward recomputes the inner activations of
a chunk.

Shazeer, GLU Variants Improve Transformer, 2020.
"""

from collections.abc import Callable, Iterator, Set
from typing import Any

import numpy as np

from ...core.arrays import empty, rounded
from ...core.dtypes import FLOAT32, Array
from ...core.op import op
from ...core.stand_in import representative_steps
from ...errors import ConfigError
from ..common.checks import requested_gradients
from ..common.elementwise import launch_rows
from ..common.gemm import gemm
from ..linear.linear import flat
from .swiglu import swiglu, swiglu_backward

CHUNK_BYTES = 32 * 2**20  # most bytes of one inner activation of a chunk
CHUNKS = 8  # fewest chunks: backward's inner activations are then small beside one of all rows
CHUNK_ROWS = 32  # fewest rows of a chunk: with fewer, the time of a product is reading the weight


@op(
    "x(*rows, hidden), gate_weight(inner, hidden): weight, up_weight(inner, hidden): weight,"
    " down_weight(outputs, inner): weight -> y(*rows, outputs)",
    widen=False,
    torch=lambda nn, t, o: nn.linear(
        nn.silu(nn.linear(t["x"], t["gate_weight"])) * nn.linear(t["x"], t["up_weight"]),
        t["down_weight"],
    ),  # products take 16-bit operands as they are
    operations=lambda a: (
        2
        * a["x"].size
        // a["x"].shape[-1]
        * sum(a[n].size for n in ("gate_weight", "up_weight", "down_weight"))
    ),
)
def swiglu_mlp(
    x: Array,
    gate_weight: Array,
    up_weight: Array,
    down_weight: Array,
    *,
    chunk: int | None = None,
) -> Array:
    """Return ``(silu(x @ gate_weight.T) * (x @ up_weight.T)) @ down_weight.T``, chunk by chunk.

    Parameters
    ----------
    x : (*rows, hidden) float
    gate_weight, up_weight : (inner, hidden) float, or quantized weights
    down_weight : (outputs, inner) float, or a quantized weight
    chunk : int, optional
        Rows per chunk.  By default an eighth of all rows, at least 32, and at most as many as have
        32 MiB of one inner activation.

    Returns
    -------
    y : (*rows, outputs) float
        The output of the layer for each row.

    Raises
    ------
    ConfigError
        chunk is not positive.
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import linear, swiglu, swiglu_mlp, swiglu_mlp_backward
    >>> rng = np.random.default_rng(0)
    >>> x = rng.standard_normal((8, 32), np.float32)
    >>> gate, up = rng.standard_normal((2, 64, 32), np.float32) * 0.1
    >>> down = rng.standard_normal((32, 64), np.float32) * 0.1
    >>> y = swiglu_mlp(x, gate, up, down, chunk=4)  # four rows at a time
    >>> whole = linear(swiglu(linear(x, gate), linear(x, up)), down)
    >>> np.testing.assert_allclose(y, whole, atol=1e-5)
    >>> dx, dgate, dup, ddown = swiglu_mlp_backward(y, x, gate, up, down)
    """
    wide = np.promote_types(x.dtype, FLOAT32)
    return _forward(x, gate_weight, up_weight, down_weight, chunk, wide, swiglu.definition)


@swiglu_mlp.kernel
def _launch(
    x: Array, gate_weight: Array, up_weight: Array, down_weight: Array, chunk: int | None
) -> Array:
    """Compute by cuBLAS and the kernel of swiglu; inner activations have the dtype of x."""
    return _forward(x, gate_weight, up_weight, down_weight, chunk, x.dtype, _activated)


@swiglu_mlp.gradient(widen=False)
def swiglu_mlp_backward(
    dy: Array,
    x: Array,
    gate_weight: Array,
    up_weight: Array,
    down_weight: Array,
    *,
    chunk: int | None = None,
    wanted: Set[str] | None = None,
) -> tuple[Array | None, ...]:
    """Return the gradients of x and of the weights, summed in float32; None if not ``wanted``."""
    arrays, wide = (x, gate_weight, up_weight, down_weight), np.promote_types(x.dtype, FLOAT32)
    return _backward(
        dy, *arrays, chunk, wanted, wide, swiglu.definition, swiglu_backward.definition
    )


@swiglu_mlp_backward.kernel
def _launch_backward(
    dy: Array,
    x: Array,
    gate_weight: Array,
    up_weight: Array,
    down_weight: Array,
    chunk: int | None,
    wanted: Set[str] | None,
) -> tuple[Array | None, ...]:
    """Compute by cuBLAS and the kernels of swiglu; inner activations have the dtype of x."""
    arrays = x, gate_weight, up_weight, down_weight
    return _backward(dy, *arrays, chunk, wanted, x.dtype, _activated, _activated_backward_)


def _activated(gate: Array, up: Array) -> Array:
    """Return swiglu of gate and up, which are contiguous, by the kernel."""
    inner = empty(gate.shape, gate.dtype, like=gate)
    launch_rows("swiglu.cu", "swiglu", (gate, up), (inner,))
    return inner


def _activated_backward_(dinner: Array, gate: Array, up: Array) -> tuple[Array, Array]:
    """Overwrite gate and up with their gradients, and return them."""
    launch_rows("swiglu.cu", "swiglu_backward", (dinner, gate, up), (gate, up))
    return gate, up


def _forward(
    x: Array,
    gate_weight: Array,
    up_weight: Array,
    down_weight: Array,
    chunk: int | None,
    dtype: Any,
    activate: Callable[[Array, Array], Array],
) -> Array:
    """Return y; inner activations have this dtype."""
    rows = flat(x)
    y = empty((len(rows), len(down_weight)), x.dtype, like=x)
    for part in _parts(rows, gate_weight, chunk):
        gate = gemm(rows[part], gate_weight.T, dtype=dtype)
        up = gemm(rows[part], up_weight.T, dtype=dtype)
        gemm(activate(gate, up), down_weight.T, out=y[part])
        del gate, up  # free them before the next chunk
    return y.reshape(*x.shape[:-1], len(down_weight))  # (*rows, outputs)


def _backward(
    dy: Array,
    x: Array,
    gate_weight: Array,
    up_weight: Array,
    down_weight: Array,
    chunk: int | None,
    wanted: Set[str] | None,
    dtype: Any,
    activate: Callable[[Array, Array], Array],
    activate_backward: Callable[[Array, Array, Array], tuple[Array, Array]],
) -> tuple[Array | None, ...]:
    """Return the gradients; recomputed inner activations have this dtype."""
    rows, drows, wide = flat(x), flat(dy), np.promote_types(x.dtype, FLOAT32)
    weights = {"gate_weight": gate_weight, "up_weight": up_weight, "down_weight": down_weight}
    requested = requested_gradients("swiglu_mlp_backward", wanted, x=x, **weights)
    sums = {
        name: _zeros(weight.shape, wide, like=x)
        for name, weight in weights.items()
        if name in requested
    }
    dx = empty(rows.shape, x.dtype, like=x) if "x" in requested else None
    for part in _parts(rows, gate_weight, chunk):
        gate = gemm(rows[part], gate_weight.T, dtype=dtype)
        up = gemm(rows[part], up_weight.T, dtype=dtype)
        if "down_weight" in sums:
            gemm(drows[part].T, activate(gate, up), out=sums["down_weight"], add=True)
        dgate, dup = activate_backward(gemm(drows[part], down_weight, dtype=dtype), gate, up)
        del gate, up  # on a GPU dgate and dup overwrite them
        if "gate_weight" in sums:
            gemm(dgate.T, rows[part], out=sums["gate_weight"], add=True)
        if "up_weight" in sums:
            gemm(dup.T, rows[part], out=sums["up_weight"], add=True)
        if dx is not None:
            both = gemm(dgate, gate_weight, dtype=wide)
            dx[part] = rounded(gemm(dup, up_weight, out=both, add=True), x.dtype)
            del both
        del dgate, dup  # free them before the next chunk
    dweights = (rounded(sums.get(name), weight.dtype) for name, weight in weights.items())
    return None if dx is None else dx.reshape(x.shape), *dweights


def _zeros(shape: Any, dtype: Any, like: Array) -> Array:
    """Return zeros in the library and on the device of an array."""
    zeros = empty(shape, dtype, like=like)
    zeros[...] = 0
    return zeros


def _parts(rows: Array, weight: Array, chunk: int | None) -> Iterator[slice]:
    """Yield slices of ``chunk`` rows each; the last one may have fewer."""
    if chunk is None:
        most = max(1, CHUNK_BYTES // max(1, len(weight) * rows.itemsize))
        chunk = min(most, max(CHUNK_ROWS, -(-len(rows) // CHUNKS)))
    for start in representative_steps(rows, range(0, len(rows), chunk)):
        yield slice(start, start + chunk)


def _check(call: str, chunk: int | None) -> None:
    """Raise ConfigError unless chunk is None or positive."""
    if chunk is not None and chunk <= 0:
        raise ConfigError(f"{call}(chunk={chunk}): chunk must be a positive number of rows")


swiglu_mlp.require(_check)
swiglu_mlp_backward.require(_check)


# products of gate and up, which are recomputed, then of each gradient that is requested
swiglu_mlp_backward.facts["operations"] = lambda a: (
    2
    * (a["x"].size // a["x"].shape[-1])
    * (
        (2 + 2 * (a.get("dx") is not None)) * a["gate_weight"].size
        + a["down_weight"].size
        + sum(d.size for n in ("gate", "up", "down") if (d := a.get(f"d{n}_weight")) is not None)
    )
)
