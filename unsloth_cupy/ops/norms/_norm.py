"""Kernel launches of rms_norm, gated_rms_norm and layer_norm.

kernels_cu/norm.cu explains the constants.
"""

from collections.abc import Set
from functools import cache
from typing import Any

import numpy as np

from ...core.arrays import empty, lanes
from ...core.dtypes import Array
from ...core.kernel import load
from ...core.source import Constants
from ...core.target import limits
from ..common.columns import column_sums
from ..common.rows import spread
from ..common.strides import row_layout

# Values of a row per thread.  64 registers are enough, so an SM runs 1024 threads, or as many whole
# blocks as have 1024 threads at most.
VALUES = 16
# Values of a longer row per thread: forward in 16 bits without a residual, where 64 registers are
# enough, too; backward in up to 128 registers, so an SM runs 512 threads.
MOST = 32


@cache
def constants(
    dtypes: tuple[Any, Any, Any],
    hidden: int,
    lanes: int,
    residual: bool,
    centred: bool,
    clusters: bool,
    shared: int | None = None,
    gated: bool = False,
    weights: bool = True,
) -> Constants:
    """Return the constants for dtypes of x, weight and bias (None without a bias).

    ``centred``: whether the mean of a row is subtracted, as in layer_norm.  ``shared``: None in the
    forward pass; in the backward pass, the bytes of shared memory that a block may request.
    ``weights``: whether the backward pass sums dw and dbias, in shared memory.

        hidden <= 8        one thread per row; backward, 48 registers where only dw is summed and
                           no mean is subtracted
        hidden <= 512      a power of two of threads per row, several rows per block, no barrier;
                           backward, 8 values per thread: without a barrier, the compiler moves sums
                           from shared memory to registers
        hidden <= 8192     one block per row, 16 values per thread; two or more blocks per SM,
                           backward if the sums of so many fit into its shared memory; up to 2048
                           then 6 of 128 threads, up to 1024 8 of 64: more write more partial sums
        above, sm_90       2, 4 or 8 such blocks in a cluster, then 8 of 1024 threads, up to 131,072
        ..., backward      8 of 512 threads with 32 values each instead; with a bias, or a gate in
                           float32, 512 threads per SM, as 64 registers are too few
        above, older       1024 threads, up to 16,384
        above, forward     32 values per thread, in 16 bits without a residual
        otherwise          rows are read twice, in backward also where a block's sums do not fit
                           into shared memory; with clusters fewer rows are processed at a time, so
                           that they are still in L2 when they are read again
    """
    x, weight, bias = dtypes
    backward = shared is not None
    count = -(-hidden // (VALUES // 2 if backward and hidden <= 512 else VALUES))
    row_threads, cluster = spread(count, clusters)
    room = 1024  # threads of an SM: 64 registers each
    if backward and hidden <= 8 and bias is None and not (residual or gated or centred):
        room = 1280  # 48 registers each, which spill where a mean is subtracted
    third = gated and x.itemsize == 4
    if backward and cluster > 1 and (count > 512 * 8 or bias is not None or third):
        room = 512  # 128 registers each: 64 spill, of long rows on sm_100 and sm_120
    if backward:
        # 8 blocks of 64 threads and 6 of 128, not 16 and 8, as each block writes partial sums: on
        # an H200 in bfloat16 52 us instead of 69 (16,384 x 1024), 48 instead of 57 (8192 x 2048)
        room = min(room, {64: 512, 128: 768}.get(row_threads, room))
    row_threads = min(room, row_threads)
    threads = row_threads if row_threads > 32 else 256  # 256: 8 rows or more in a block
    values = -(-hidden // (cluster * row_threads * lanes)) * lanes
    longer = room < 1024 if backward else x.itemsize == 2 and not (residual or gated)
    chosen = Constants(
        T=x,
        W=weight,
        B=bias or weight,
        HIDDEN=hidden,
        LANES=lanes,
        ROW_THREADS=row_threads,
        THREADS=threads,
        CLUSTER=cluster,
        RESIDENT=max(1, room // threads),
        KEEP=values <= (MOST if longer else VALUES),
        RESIDUAL=residual,
        BIAS=bias is not None,
        CENTRED=centred,
        GATED=gated,
        WEIGHTS=weights,
    )
    if shared is not None and sums(chosen) + STATIC > shared:
        chosen = Constants(**{**chosen, "KEEP": False})
    return chosen


STATIC = 4096  # bytes of static shared memory at most, in which threads exchange sums of rows


def sums(chosen: Constants) -> int:
    """Return the bytes of shared memory for a block's sums of dw and dbias, in float32."""
    if not (chosen["KEEP"] and chosen["WEIGHTS"]):
        return 0
    step = chosen["CLUSTER"] * chosen["ROW_THREADS"] * chosen["LANES"]
    depth = -(-chosen["HIDDEN"] // step)
    return 4 * (1 + chosen["BIAS"]) * depth * chosen["LANES"] * chosen["THREADS"]


def needs_sums(wanted: Set[str] | None) -> bool:
    """Return whether the gradient of weight or bias, a sum over all rows, is requested."""
    return wanted is None or not wanted.isdisjoint(("weight", "bias"))


def only(wanted: Set[str] | None, **gradients: Array | None) -> tuple[Any, ...]:
    """Return the gradients, with None for gradients that are not requested.

    x and residual have one gradient, so a request for residual returns x's, too.
    """
    if wanted is None:
        return tuple(gradients.values())
    requested = wanted | {"x"} if "residual" in wanted else wanted
    return tuple(each if name in requested else None for name, each in gradients.items())


def forward(
    x: Array,
    weight: Array,
    residual: Array | None,
    bias: Array | None,
    *,
    eps: float,
    offset: float = 0.0,
    centred: bool = False,
    gate: Array | None = None,
) -> tuple[Array, Array, Any, Array]:
    """Launch norm_forward; return y, h, and mean (None unless centred) and rstd of each row."""
    hidden, rows = x.shape[-1], x.size // x.shape[-1]
    y = empty(x.shape, x.dtype, like=x)
    h = x if residual is None else empty(x.shape, x.dtype, like=x)
    mean = empty(x.shape[:-1], np.float32, like=x) if centred else None
    rstd = empty(x.shape[:-1], np.float32, like=x)
    (own_x, own_third), layout = row_layout(x, residual if gate is None else gate)
    dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
    width = lanes(layout.alignment(hidden), own_x, own_third, weight, bias)
    device, gated = limits(x), gate is not None
    residuals = residual is not None
    chosen = constants(dtypes, hidden, width, residuals, centred, device.clusters, gated=gated)
    threads = chosen["THREADS"]
    blocks = -(-rows * chosen["ROW_THREADS"] // threads) * chosen["CLUSTER"]
    kernel = load("norm.cu", "norm_forward", x, chosen)
    own_h = None if h is x else h
    kernel[blocks, threads](
        *(own_x, weight, own_third, bias, y, own_h, mean, rstd),
        *(rows, layout.struct(), eps, offset),
    )
    return y, h, mean, rstd


def backward(
    dy: Array,
    dh: Array | None,
    h: Array,
    weight: Array,
    bias: Array | None,
    mean: Array | None,
    rstd: Array,
    *,
    offset: float = 0.0,
    gate: Array | None = None,
    wanted: Set[str] | None = None,
) -> tuple[Array, Array | None, Array | None, Array | None]:
    """Launch norm_backward; return dx, dweight, dbias and dgate.

    dweight and dbias are None if neither is requested.
    """
    hidden, rows = h.shape[-1], h.size // h.shape[-1]
    weights = needs_sums(wanted)
    bias = bias if weights else None
    dx = empty(h.shape, h.dtype, like=h)
    dweight = empty((hidden,), weight.dtype, like=h) if weights else None
    dbias = None if bias is None else empty((hidden,), bias.dtype, like=h)
    dgate = None if gate is None else empty(h.shape, h.dtype, like=h)
    (own_dy, own_third, own_h), layout = row_layout(dy, dh if gate is None else gate, h)
    dtypes = h.dtype, weight.dtype, None if bias is None else bias.dtype
    width = lanes(layout.alignment(hidden), own_h, own_dy, own_third, weight)
    device, centred, gated = limits(h), mean is not None, gate is not None
    chosen = constants(
        *(dtypes, hidden, width, dh is not None, centred, device.clusters, device.shared, gated),
        weights,
    )
    threads, cluster, shared = chosen["THREADS"], chosen["CLUSTER"], sums(chosen)
    # As many blocks as the device runs at once: each sums many rows before it writes partial sums.
    # An SM has 1 KiB of shared memory more than a block may request, and reserves 1 KiB per block.
    resident = min(chosen["RESIDENT"], (device.shared + 1024) // (shared + STATIC + 1024))
    processors = device.processors
    # a cluster stays within a group of 16 SMs (18 on some devices): SMs beyond may stay idle
    processors -= processors % 16 if cluster > 1 and processors > 16 else 0
    groups = -(-rows * chosen["ROW_THREADS"] // threads)
    groups = min(groups, max(1, processors * resident // cluster))
    partial = None
    if dweight is not None:
        # one row of each block, or cluster, which column_sums adds in a fixed order
        partial = empty((1 if bias is None else 2, groups, hidden), np.float32, like=h)
    kernel = load("norm.cu", "norm_backward", h, chosen)
    kernel[groups * cluster, threads, shared](
        *(own_dy, own_third, own_h, weight, mean, rstd, dx, dgate, partial),
        *(rows, layout.struct(), offset),
    )
    if dweight is not None and partial is not None:
        column_sums(partial, dweight, dbias)
    return dx, dweight, dbias, dgate
