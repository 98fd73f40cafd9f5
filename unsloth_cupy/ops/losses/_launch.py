"""Launches of the cross entropy kernels: threads, accesses, and the values that stay on chip."""

from functools import cache
from typing import Any, NamedTuple

from ...core.arrays import contiguous, lanes
from ...core.dtypes import Array
from ...core.kernel import load
from ...core.replay import is_fixed
from ...core.source import Constants
from ...core.target import limits
from ..common import faults
from ..common.no_kernel import no_kernel
from ._rows import Options

REPORTER = faults.reporter(
    "cross_entropy", "labels", "vocab", ", or equal to ignore, for a row without a label"
)
STATIC = 2048  # the most bytes of static shared memory of a block, besides the dynamic part
# Accesses of 16 bytes that a thread holds in registers.  Four fill 16 registers: with 64 registers
# in all an SM runs 1,024 threads; with 128, which a soft cap or smoothing need, it runs 512.
HELD = 4
ALONE = 16  # the same with up to 128 registers, if an SM runs only one block


class Access(NamedTuple):
    """How rows are read."""

    lanes: int  # values of one access
    ragged: bool  # whether rows may begin at addresses that are not aligned for an access


def access_of(vocab: int, *arrays: Any) -> Access:
    """Return accesses of 16 bytes of the first array; smaller ones if an array is not aligned.

    In a fixed order, accesses are only as wide as every row allows.  With ragged rows, the thread
    that adds a value would depend on where its row begins.
    """
    wide = 16 // arrays[0].dtype.itemsize
    if not is_fixed() and all(lanes(wide, array) == wide for array in arrays):
        return Access(wide, vocab % wide != 0)
    return Access(lanes(vocab, *arrays), False)


def row_threads(vectors: int) -> int:
    """Return the threads of a row: about four accesses each, at most 512 threads.

    Up to 32 threads it is a power of two, a part of a warp; more are whole warps.
    """
    if vectors <= 128:
        return 1 << (-(-vectors // 4) - 1).bit_length()
    return min(512, -(-vectors // 128) * 32)


@cache
def constants(
    logits: Any,
    dlogits: Any,
    labels: Any,
    vocab: int,
    access: Access,
    cap: bool,
    smoothing: bool,
    use: str,
    shared: int = 0,
    weights: Any = None,
) -> Constants:
    """Return the constants of cross_entropy.cu for one of its uses: losses, gradients or both.

    losses      short rows share a warp; 512 threads loop over a long row
    gradients   one access per thread, and many blocks per row
    both        as many threads as for losses; two blocks or more on an SM, if each can hold its row
                in registers and shared memory and, with a soft cap or smoothing, has 256 threads or
                fewer; else one block with all registers and shared memory
    """
    vectors = -(-(vocab + access.ragged * (access.lanes - 1)) // access.lanes)
    of_row, blocks, held, stored = row_threads(vectors), 1, 1, 0
    if use == "gradients":
        of_row = max(64, min(256, -(-vectors // 32) * 32))
    threads = of_row if of_row > 32 or use == "gradients" else 128  # short rows share a block
    if use == "both":
        depth, slot = -(-vectors // of_row), threads * access.lanes * logits.itemsize
        slots = (shared // 2 - STATIC) // slot
        resident = 512 if cap or smoothing else 1024  # tanh and sums need registers too
        blocks = max(1, resident // threads) if depth <= HELD + slots else 1
        alone = ALONE - (cap and smoothing)  # one access less: 128 registers are too few for both
        held = min(depth, HELD if blocks > 1 else alone)
        stored = min(depth - held, slots if blocks > 1 else (shared - STATIC) // slot)
    return Constants(
        T=logits,
        G=dlogits,
        I=labels,
        COLUMNS=vocab,
        LANES=access.lanes,
        RAGGED=access.ragged,
        ROW_THREADS=of_row,
        THREADS=threads,
        BLOCKS=blocks,
        HELD=held,
        STORED=stored,
        SOFTCAP=cap,
        SMOOTHING=smoothing,
        WEIGHTED=weights is not None,
        W=weights or logits,
    )


def refused(options: Options) -> Any:
    """Return the result of a launch for options that no kernel supports; None for all others."""
    both = options.smoothing > 0 and options.class_weights is not None
    return no_kernel("label smoothing with class weights") if both else None


def _dense(weights: Array | None) -> tuple[Array | None, Any]:
    """Return contiguous class weights, and their dtype."""
    return (None, None) if weights is None else (contiguous(weights), weights.dtype)


def launch_losses(logits: Array, labels: Array, options: Options, loss: Array, lse: Array) -> None:
    """Write the loss and lse of each row."""
    ignore, smoothing, z_loss, softcap, weights = options
    vocab, (weights, kind) = logits.shape[-1], _dense(weights)
    access, cap = access_of(vocab, logits), softcap is not None
    types = logits.dtype, logits.dtype, labels.dtype
    chosen = constants(*types, vocab, access, cap, smoothing > 0, "losses", 0, kind)
    blocks = -(-labels.size * chosen["ROW_THREADS"] // chosen["THREADS"])
    kernel = load("cross_entropy.cu", "cross_entropy_forward", logits, chosen)
    kernel[blocks, chosen["THREADS"]](
        *(logits, labels, weights, loss, lse, faults.record(logits), REPORTER, labels.size),
        *(ignore, smoothing, z_loss, softcap or 0),
    )


def launch_gradients(
    logits: Array,
    labels: Array,
    lse: Array,
    dloss: Array,
    dlse: Array | None,
    options: Options,
    out: Array,
) -> None:
    """Write the gradient of the logits to out, which may be the logits."""
    ignore, smoothing, z_loss, softcap, weights = options
    vocab, (weights, kind) = logits.shape[-1], _dense(weights)
    access, cap = access_of(vocab, logits, out), softcap is not None
    types = logits.dtype, out.dtype, labels.dtype
    chosen = constants(*types, vocab, access, cap, smoothing > 0, "gradients", 0, kind)
    threads, slack = chosen["THREADS"], access.ragged * (access.lanes - 1)
    blocks = labels.size * -(-(vocab + slack) // (threads * access.lanes))
    kernel = load("cross_entropy.cu", "cross_entropy_backward", logits, chosen)
    kernel[blocks, threads](
        *(dloss, dlse, logits, labels, weights, lse, out),
        *(ignore, smoothing, z_loss, softcap or 0),
    )


def launch_both(
    logits: Array,
    labels: Array,
    dloss: Array | None,
    scale: float,
    options: Options,
    loss: Array,
    out: Array,
) -> None:
    """Write the loss to loss and the gradient of the logits to out, which may be the logits."""
    ignore, smoothing, z_loss, softcap, weights = options
    vocab, (weights, kind) = logits.shape[-1], _dense(weights)
    access, cap = access_of(vocab, logits, out), softcap is not None
    types, shared = (logits.dtype, out.dtype, labels.dtype), limits(logits).shared
    chosen = constants(*types, vocab, access, cap, smoothing > 0, "both", shared, kind)
    threads = chosen["THREADS"]
    blocks = -(-labels.size * chosen["ROW_THREADS"] // threads)
    stored_bytes = chosen["STORED"] * threads * access.lanes * logits.dtype.itemsize
    kernel = load("cross_entropy.cu", "cross_entropy_over_", logits, chosen)
    kernel[blocks, threads, stored_bytes](
        *(logits, labels, weights, dloss, out, loss, faults.record(logits), REPORTER, labels.size),
        *(scale, ignore, smoothing, z_loss, softcap or 0),
    )
