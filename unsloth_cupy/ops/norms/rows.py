"""What rms_norm and layer_norm share: the check of eps, and their launch.

kernels_cu/norm.cu explains the constants.
"""

from functools import cache
from typing import Any

import numpy as np

from ...core.arrays import empty, lanes
from ...core.dtypes import Array
from ...core.kernel import load
from ...core.source import Constants
from ...core.target import limits
from ...errors import ConfigError
from ..common.columns import column_sums
from ..common.rows import spread
from ..common.strides import row_layout

VALUES = 16  # of a row that a thread holds: 64 registers, so 1024 threads of an SM
MOST = 32  # ... where rows are longer: forward in 16 bits, without a residual; backward


@cache
def constants(
    dtypes: tuple[Any, Any, Any],
    hidden: int,
    lanes: int,
    residual: bool,
    centred: bool,
    clusters: bool,
    shared: int | None = None,
) -> Constants:
    """Return the constants for dtypes of x, weight and bias (None: there is none).

    ``centred`` says whether the mean of a row is subtracted, as by layer_norm.  ``shared`` is given
    backward: the bytes that a block may use for its sums of dw and dbias.

        hidden <= 8        a thread takes a row; backward, 48 registers where only dw is summed
        hidden <= 512      a power of two of threads a row, several rows a block: no barrier
                           backward, 8 values a thread: the compiler, which meets no barrier, moves
                           sums from shared memory to registers
        hidden <= 8192     the block takes a row, 16 values a thread; two blocks an SM or more
        beyond, sm_90      2, 4 or 8 such blocks in a cluster; then 8 of 1024 threads: 131,072
        ..., backward      8 of 512 threads that hold 32 values instead, and 512 threads of an SM
                           where there is a bias: 64 registers are too few for both
        beyond, before     1024 threads: 16,384
        beyond, forward    32 values a thread, in 16 bits without a residual
        else               rows are read twice; the cluster is there so that fewer of them are
                           under way at a time, and they lie in L2 yet
    """
    x, weight, bias = dtypes
    backward = shared is not None
    wanted = -(-hidden // (VALUES // 2 if backward and hidden <= 512 else VALUES))
    row_threads, cluster = spread(wanted, clusters)
    room = 1024  # threads of an SM
    if backward and hidden <= 8 and bias is None and not residual:
        room = 1280
    if backward and cluster > 1 and (wanted > 512 * 8 or bias is not None):
        room = 512
    row_threads = min(room, row_threads)
    threads = row_threads if row_threads > 32 else 256
    values = -(-hidden // (cluster * row_threads * lanes)) * lanes
    longer = room < 1024 if backward else x.itemsize == 2 and not residual
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
    )
    if shared is not None and sums(chosen) + STATIC > shared:
        chosen = Constants(**{**chosen, "KEEP": False})
    return chosen


STATIC = 4096  # bytes of shared memory at most that the sums of rows take


def sums(chosen: Constants) -> int:
    """Return the bytes of shared memory that hold a block's sums of dw and dbias."""
    if not chosen["KEEP"]:
        return 0
    step = chosen["CLUSTER"] * chosen["ROW_THREADS"] * chosen["LANES"]
    depth = -(-chosen["HIDDEN"] // step)
    return 4 * (1 + chosen["BIAS"]) * depth * chosen["LANES"] * chosen["THREADS"]


def check_eps(call: str, eps: float) -> None:
    """Raise where eps could make what the root is taken of negative."""
    if eps < 0:
        raise ConfigError(f"{call}(eps={eps}): eps must be 0 or more")


def forward(
    x: Array,
    weight: Array,
    residual: Array | None,
    bias: Array | None,
    *,
    eps: float,
    offset: float = 0.0,
    centred: bool = False,
) -> tuple[Array, Array, Any, Array]:
    """Return y, h and of each row the mean, None unless it is subtracted, and rstd."""
    hidden, rows = x.shape[-1], x.size // x.shape[-1]
    y = empty(x.shape, x.dtype, like=x)
    h = x if residual is None else empty(x.shape, x.dtype, like=x)
    mean = empty(x.shape[:-1], np.float32, like=x) if centred else None
    rstd = empty(x.shape[:-1], np.float32, like=x)
    (own_x, own_residual), layout = row_layout(x, residual)
    dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
    most = lanes(layout.alignment(hidden), own_x, own_residual, weight, bias)
    there = limits(x)
    chosen = constants(dtypes, hidden, most, residual is not None, centred, there.clusters)
    threads = chosen["THREADS"]
    blocks = -(-rows * chosen["ROW_THREADS"] // threads) * chosen["CLUSTER"]
    kernel = load("norm.cu", "norm_forward", x, chosen)
    own_h = None if h is x else h
    kernel[blocks, threads](
        *(own_x, weight, own_residual, bias, y, own_h, mean, rstd),
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
) -> tuple[Array, Array, Array | None]:
    """Return dx, dweight and dbias."""
    hidden, rows = h.shape[-1], h.size // h.shape[-1]
    dx, dweight = empty(h.shape, h.dtype, like=h), empty((hidden,), weight.dtype, like=h)
    dbias = None if bias is None else empty((hidden,), bias.dtype, like=h)
    (own_dy, own_dh, own_h), layout = row_layout(dy, dh, h)
    dtypes = h.dtype, weight.dtype, None if bias is None else bias.dtype
    most = lanes(layout.alignment(hidden), own_h, own_dy, own_dh, weight)
    there, centred = limits(h), mean is not None
    chosen = constants(dtypes, hidden, most, dh is not None, centred, there.clusters, there.shared)
    threads, cluster, held = chosen["THREADS"], chosen["CLUSTER"], sums(chosen)
    # as many blocks as the device holds at once, so that each sums many rows before it writes;
    # 16 SMs and sometimes 18 form a group that clusters do not leave
    resident = min(chosen["RESIDENT"], (there.shared + 1024) // (held + STATIC + 1024))
    room = there.processors
    room -= room % 16 if cluster > 1 and room > 16 else 0
    groups = -(-rows * chosen["ROW_THREADS"] // threads)
    groups = min(groups, max(1, room * resident // cluster))
    partial = empty((1 if bias is None else 2, groups, hidden), np.float32, like=h)
    kernel = load("norm.cu", "norm_backward", h, chosen)
    kernel[groups * cluster, threads, held](
        own_dy, own_dh, own_h, weight, mean, rstd, dx, partial, rows, layout.struct(), offset
    )
    column_sums(partial, dweight, dbias)
    return dx, dweight, dbias
