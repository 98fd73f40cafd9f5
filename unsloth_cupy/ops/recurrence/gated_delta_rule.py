"""The gated delta rule: linear attention with a state that decays and corrects its errors.

S_t = (I - beta_t k_t k_t^T) exp(decay_t) S_(t-1) + beta_t k_t v_t^T        out_t = scale S_t^T q_t

decay_t is one number for a head, or a diagonal: a number for each row of S (Kimi Delta Attention).

Tokens are computed in chunks (UT transform), and only states pass from chunk to chunk.  Forward
stores no states: backward recomputes the states of all chunks.

Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2025; Yang et al., Parallelizing Linear
Transformers with the Delta Rule over Sequence Length, 2024; Kimi Team, Kimi Linear, 2025.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ...core.arrays import empty, lanes
from ...core.dtypes import FLOAT32, Array
from ...core.kernel import load
from ...core.op import op
from ...core.source import Constants
from ...errors import ConfigError, ShapeError
from ..common.checks import check_choice
from ..common.no_kernel import no_kernel
from ._chunks import Chunks
from ._texts import check_texts, count_of, ends, offsets_of

CHUNK, THREADS, COLUMNS, SLAB = 64, 256, 32, 32  # as in common/delta.cuh
PARTS = {"highest": 3, "high": 2}  # by precision: bfloat16 numbers whose sum stands for a float32
PLANE = 5120  # bytes of one part of a triangle of a chunk
KEPT = 2**25  # bytes of chunks that backward in NumPy stores at a time: 32 MiB
WIDEST = 128  # the most columns of q and k: a chunk of them, and a state, are in shared memory


@op(
    "q(batch, tokens, heads, dim), k(batch, tokens, heads, dim),"
    " v(batch, tokens, value_heads, value_dim), decay(batch, tokens, value_heads, decays?): param,"
    " beta(batch, tokens, value_heads): param,"
    " initial?(states, value_heads, dim, value_dim): stat, offsets?(texts+1): int"
    " -> out(batch, tokens, value_heads, value_dim),"
    " final(ends, value_heads, dim, value_dim): stat where value_heads % heads",
    bound=ends,
)
def gated_delta_rule(
    q: Array,
    k: Array,
    v: Array,
    decay: Array,
    beta: Array,
    *,
    initial: Array | None = None,
    offsets: Array | None = None,
    chunk: int = 64,
    scale: float | None = None,
    precision: str = "highest",
) -> tuple[Array, Array]:
    """Run the gated delta rule along the tokens of each text.

    For each value head, with a state S of (dim, value_dim), each token computes ``S = exp(decay) *
    S``, then ``S = S + beta * k (v - S^T k)^T``, then ``out = scale * S^T q``.  q and k are used as
    they are: models normalise them before.  Value head h reads key head ``h // (value_heads //
    heads)``.  With a decay for each column of k (Kimi Delta Attention), each row of S has its own.

    Parameters
    ----------
    q, k : (batch, tokens, heads, dim) float
    v : (batch, tokens, value_heads, value_dim) float
    decay : (batch, tokens, value_heads) or (batch, tokens, value_heads, dim) dtype of q or float32
        The logarithm of the factor by which the state, or each of its rows, shrinks before a token;
        -inf empties it.
    beta : (batch, tokens, value_heads) dtype of q or float32
        The share of its error that a token corrects: 0 to 1 or, in some models, to 2.
    initial : (batch or texts, value_heads, dim, value_dim) dtype of final, optional
        The state before each text: ``final`` of the call on its earlier tokens; 0 by default.
    offsets : (texts + 1,) int, optional
        For texts that are packed in one row (batch 1): the index of the first token of each text,
        then the number of tokens.  Results have the same bits as for each text alone.
    chunk : int
        Tokens that are computed together; 1 is the recurrence.  Results for other chunks differ by
        rounding.  The kernels support only 64.
    scale : float, optional
        ``1 / sqrt(dim)`` by default.
    precision : {"highest", "high"}
        How exact products with states are on tensor cores, for inputs of 16 bits: "highest" as in
        float32, with three bfloat16 numbers in place of each float32; "high" with two, which leaves
        out up to 2^-16 of each term of a product, 1/128 of a rounding of bfloat16.  Others are as
        exact as with "highest".

    Returns
    -------
    out : (batch, tokens, value_heads, value_dim) float
    final : (batch or texts, value_heads, dim, value_dim) float32, or float64 for float64 arrays
        The state after each text.

    Raises
    ------
    RangeError
        Offsets do not rise from 0 to the number of tokens.  On a GPU the host does not read them.
    ConfigError
        chunk is below 1, or there is no such precision.
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import gated_delta_rule, gated_delta_rule_backward
    >>> k = np.eye(4, dtype=np.float32)[None, :, None]  # four tokens, whose keys do not overlap
    >>> v = np.arange(8, dtype=np.float32).reshape(1, 4, 1, 2)
    >>> decay, beta = np.zeros((1, 4, 1), np.float32), np.ones((1, 4, 1), np.float32)
    >>> out, final = gated_delta_rule(k, k, v, decay, beta, scale=1.0)
    >>> np.testing.assert_array_equal(final[0, 0], v[0, :, 0])  # the value of each key
    >>> first, state = gated_delta_rule(*(a[:, :3] for a in (k, k, v, decay, beta)), scale=1.0)
    >>> step = (a[:, 3:] for a in (k, k, v, decay, beta))
    >>> last, final = gated_delta_rule(*step, initial=state, scale=1.0)
    >>> np.testing.assert_array_equal(last, out[:, 3:])
    >>> dq, dk, dv, ddecay, dbeta, dinitial = gated_delta_rule_backward(
    ...     out, None, k, k, v, decay, beta, None, None, scale=1.0
    ... )
    """
    chunks = _chunks("gated_delta_rule", q, k, v, decay, beta, offsets, chunk, scale)
    begin, layout, state = _begin(q, k, v, initial, offsets), chunks.layout, None
    final, every = begin.copy(), slice(None)
    out = np.empty_like(chunks.arrays[2])
    to = chunks.by_head(out)
    for number in range(len(layout.spans)):
        state = layout.before(number, begin, state)  # (batch or 1, heads, groups, dim, value_dim)
        own = chunks.at(number, every)
        u = own.beta * own.errors(state)
        chunks.take(number, to, every)[...] = own.out(state, u)
        state = own.end(state, u)
        final[layout.text[number]] = state
    return layout.back(out), final.reshape(len(begin), v.shape[2], q.shape[3], v.shape[3])


@gated_delta_rule.kernel
def _launch(
    q: Array,
    k: Array,
    v: Array,
    decay: Array,
    beta: Array,
    initial: Array | None,
    offsets: Array | None,
    chunk: int,
    scale: float | None,
    precision: str,
) -> Any:
    if (reason := _without_kernel(q, chunk)) is not None:
        return no_kernel(reason)
    (value_heads, value_dim), dim = v.shape[2:], q.shape[3]
    texts = count_of(q.shape[0], offsets)
    out = empty(v.shape, q.dtype, like=q)
    final = empty((texts, value_heads, dim, value_dim), FLOAT32, like=q)
    chosen, sizes = _constants_of(decay, beta, offsets, q, k, v), _sizes(q, v, offsets, scale)
    chosen = chosen(INITIAL=initial is not None, BACKWARD=False)
    blocks = texts * value_heads * sizes["tiles"]
    if q.shape[1] == 1 and offsets is None:  # decoding: one token is no chunk
        kernel = load("gated_delta_rule.cu", "delta_step", q, chosen)
        kernel[blocks, THREADS](q, k, v, decay, beta, initial, out, final, sizes)
        return out, final
    if _has_products(q, k, v, decay):
        inputs, results = (q, k, v, decay, beta, initial, offsets), (out, final, None, None)
        _states_of_products(*inputs, _of_products(chosen, precision), sizes, results)
        return out, final
    scores, solve, _, *factors = _of_chunks(q, k, decay, beta, offsets, chosen, sizes)
    kernel = load("gated_delta_rule.cu", "delta_states", q, chosen)
    kernel[blocks, THREADS, _shared(dim, 1)](
        *(q, k, v, decay, beta, initial, offsets, scores, solve, *factors, out, final),
        *(None, None, None, sizes),
    )
    return out, final


@gated_delta_rule.gradient
def gated_delta_rule_backward(
    dout: Array,
    dfinal: Array | None,
    q: Array,
    k: Array,
    v: Array,
    decay: Array,
    beta: Array,
    initial: Array | None,
    offsets: Array | None,
    *,
    chunk: int = 64,
    scale: float | None = None,
    precision: str = "highest",
) -> tuple[Array, Array, Array, Array, Array, Array | None]:
    """Return the gradients of q, k, v, decay, beta and initial; a dfinal of None counts as 0."""
    call = "gated_delta_rule_backward"
    chunks = _chunks(call, q, k, v, decay, beta, offsets, chunk, scale)
    begin, layout = _begin(q, k, v, initial, offsets), chunks.layout
    ends_of = np.zeros_like(begin) if dfinal is None else dfinal.reshape(begin.shape)
    dinitial = ends_of.copy()
    douts = chunks.by_head(layout.lay(dout))
    results = [np.empty_like(array) for array in chunks.arrays]
    views = [chunks.by_head(array) for array in results]
    count = len(layout.spans)
    for heads in _some_heads(q, v, chunk):
        kept: list[Any] = []
        state = None
        for number in range(count):
            state, own = layout.before(number, begin[:, heads], state), chunks.at(number, heads)
            kept.append((own, state, w := own.errors(state)))
            state = own.end(state, own.beta * w)
        dstate = np.zeros_like(begin[:1, heads])
        for number in reversed(range(count)):
            dstate = layout.after(number, ends_of[:, heads], dstate)
            (own, *before), do = kept.pop(), chunks.take(number, douts, heads)
            *gradients, dstate = own.gradients(*before, do, dstate)
            gradients[0] *= chunks.scale
            for view, part in zip(views, gradients, strict=True):
                chunks.take(number, view, heads)[...] = part
            dinitial[layout.text[number], heads] = dstate
    dq, dk, dv, ddecay, dbeta = (layout.back(array) for array in results)
    shape = len(begin), v.shape[2], q.shape[3], v.shape[3]
    return dq, dk, dv, ddecay, dbeta, None if initial is None else dinitial.reshape(shape)


@gated_delta_rule_backward.kernel
def _launch_backward(
    dout: Array,
    dfinal: Array | None,
    q: Array,
    k: Array,
    v: Array,
    decay: Array,
    beta: Array,
    initial: Array | None,
    offsets: Array | None,
    chunk: int,
    scale: float | None,
    precision: str,
) -> Any:
    if (reason := _without_kernel(q, chunk)) is not None:
        return no_kernel(reason)
    (value_heads, value_dim), dim = v.shape[2:], q.shape[3]
    texts, inputs = count_of(q.shape[0], offsets), (q, k, v, decay, beta)
    constants = _constants_of(decay, beta, offsets, q, k, v, dout)
    sizes = _sizes(q, v, offsets, scale)
    forward = constants(INITIAL=initial is not None, BACKWARD=True)
    backward = constants(FINAL=dfinal is not None)
    slots = _slots(q, offsets)
    dinitial = None if initial is None else empty(initial.shape, FLOAT32, like=q)
    gradients = dq, dk, dv, ddecay, dbeta = [empty(a.shape, a.dtype, like=q) for a in inputs]
    if _has_products(q, k, v, decay, dout):
        columns = CHUNK, CHUNK, dim, dim  # of U, dB, S and dS', each number as two parts of 16 bits
        u, db, states, dstates = (
            empty((slots, value_heads, n, value_dim), np.dtype("uint32"), like=q) for n in columns
        )
        results = None, None, u, states
        forward, own = (_of_products(each, precision) for each in (forward, backward))
        pieces = _states_of_products(*inputs, initial, offsets, forward, sizes, results)
        file = "gated_delta_rule_backward_mma.cu"
        kernel = load(file, "delta_state_gradients_mma", q, own)
        shared = _shared_of_products(dim, own["EXACT"], "gradients")
        kernel[texts * value_heads * sizes["tiles"], 128, shared](
            dout, dfinal, q, k, offsets, pieces, db, dstates, dv, dinitial, sizes
        )
        kernel = load(file, "delta_chunk_gradients_mma", q, own)
        kernel[slots * q.shape[2], THREADS, _shared_of_products(dim, own["EXACT"], "chunks")](
            *(dout, *inputs, offsets, u, db, states, dstates, dq, dk, ddecay, dbeta, sizes)
        )
        return *gradients, dinitial
    blocks = texts * value_heads * sizes["tiles"]
    scores, solve, alike, *factors = _of_chunks(q, k, decay, beta, offsets, forward, sizes)
    shape = slots, value_heads, CHUNK, value_dim
    u, db = (empty(shape, FLOAT32, like=q) for _ in range(2))
    rest = empty(shape, FLOAT32, like=q) if forward["CHANNELS"] else None
    shape = slots, value_heads, dim, value_dim
    states, dstates = (empty(shape, FLOAT32, like=q) for _ in range(2))
    kernel = load("gated_delta_rule.cu", "delta_states", q, forward)
    kernel[blocks, THREADS, _shared(dim, 1)](
        *(*inputs, initial, offsets, scores, solve, *factors, None, None, u, states, rest, sizes)
    )
    file = "gated_delta_rule_backward.cu"
    kernel = load(file, "delta_state_gradients", q, backward)
    kernel[blocks, THREADS, _shared(dim, 2)](
        *(dout, dfinal, q, k, decay, beta, offsets, scores, solve, *factors, db, dstates),
        *(dinitial, sizes),
    )
    if rest is None:
        kernel = load(file, "delta_chunk_gradients", q, backward)
        kernel[slots * q.shape[2], THREADS, _shared_of_chunks(dim)](
            *(dout, *inputs, offsets, scores, alike, u, db, states, dstates, *gradients, sizes)
        )
        return *gradients, dinitial
    # gradients of pairs are written over scores and solve, which are not read any more
    pairs, file = (scores, solve), "gated_delta_rule_channels.cu"
    kernel = load(file, "delta_pair_gradients", q, own := _of_channels(forward))
    kernel[slots * value_heads, THREADS](
        *(dout, beta, offsets, alike, u, db, rest, *pairs, dv, dbeta, sizes)
    )
    kernel = load(file, "delta_channel_gradients", q, own)
    kernel[slots * q.shape[2] * max(1, -(-dim // SLAB)), THREADS, _shared_of_channels()](
        *(dout, q, k, decay, beta, offsets, *pairs, u, db, states, dstates, dq, dk, ddecay, sizes)
    )
    return *gradients, dinitial


# ---- checks and what both directions need --------------------------------------------------------
def _check(
    call: str, q: Any, decay: Any, initial: Any, offsets: Any, chunk: Any, precision: Any
) -> None:
    """Raise unless each text has a state, a chunk has tokens, and decays fit keys."""
    channels, dim = decay.shape[3:], q.shape[3:]
    if channels and channels != dim:
        cure = "pass one decay for each column of k, or leave out that axis for one decay of a head"
        problem = f"{call}: decay has {channels[0]} channels and k {dim[0]}; {cure}"
        raise ShapeError(problem, expected=dim[0], actual=channels[0])
    if type(chunk) is not int or chunk < 1:
        raise ConfigError(f"{call}: chunk={chunk!r}; pass an integer of 1 or more, such as 64")
    check_choice(call, "precision", precision, PARTS)
    check_texts(call, q, initial, offsets)


gated_delta_rule.require(_check)
gated_delta_rule_backward.require(_check)


def _chunks(
    call: str,
    q: Array,
    k: Array,
    v: Array,
    decay: Array,
    beta: Array,
    offsets: Array | None,
    chunk: int,
    scale: float | None,
) -> Chunks:
    """Return the chunks of a call."""
    packed = None if offsets is None else offsets_of(call, q, offsets)
    return Chunks(q, k, v, decay, beta, packed, chunk, scale_of(q, scale))


def scale_of(q: Array, scale: float | None) -> float:
    """Return the factor of q: 1 / sqrt(dim) by default."""
    return max(q.shape[3], 1) ** -0.5 if scale is None else scale


def _begin(q: Array, k: Array, v: Array, initial: Array | None, offsets: Array | None) -> Array:
    """Return the states before all texts: (texts, heads, groups, dim, value_dim)."""
    heads, (value_heads, value_dim) = q.shape[2], v.shape[2:]
    shape = count_of(len(q), offsets), heads, value_heads // max(heads, 1), q.shape[3], value_dim
    if initial is not None:
        return initial.reshape(shape)  # (texts, heads, groups, dim, value_dim)
    return np.zeros(shape, np.promote_types(q.dtype, FLOAT32), like=q)


def _some_heads(q: Array, v: Array, chunk: int) -> Iterator[slice]:
    """Yield the key heads that backward computes together, so that it stores about KEPT bytes."""
    (batch, tokens, heads, dim), (value_heads, value_dim) = q.shape, v.shape[2:]
    # numbers for each token and value head: errors, its part of states, rows of square matrices
    of_value = value_dim * (1 + dim // chunk) + 4 * chunk
    kept = q.itemsize * batch * tokens * (2 * dim + value_heads // max(heads, 1) * of_value)
    step = max(1, KEPT // max(1, kept))
    for first in range(0, heads, step):
        yield slice(first, first + step)


# ---- launches ------------------------------------------------------------------------------------
def _without_kernel(q: Array, chunk: int) -> str | None:
    """Return why the kernels do not support a call; None if they do."""
    if chunk != CHUNK:
        return f"chunk={chunk}: the kernels support only {CHUNK}"
    return f"dim={q.shape[3]}: the kernels support up to {WIDEST}" if q.shape[3] > WIDEST else None


@functools.cache
def _constants(dtypes: tuple[Any, ...], dim: int, vector: int, **flags: bool) -> Constants:
    """Return the constants of common/delta.cuh, from the dtypes of q, decay, beta and offsets."""
    own, decay, beta, offsets = dtypes
    names = {"T": own, "D": decay, "E": beta, "I": offsets or np.dtype("int32")}
    return Constants(**names, DIM=dim, LANES=vector, PACKED=offsets is not None, **flags)


@functools.cache
def _without(chosen: Constants, *names: str) -> Constants:
    """Return the constants except ``names``, which a file does not have."""
    return Constants(**{n: x for n, x in chosen.items() if n not in names})


@functools.cache
def _of_products(chosen: Constants, precision: str) -> Constants:
    """Return the constants of the kernels on tensor cores."""
    return Constants(**_without(chosen, "LANES"), EXACT=PARTS[precision])


def _of_channels(chosen: Constants) -> Constants:
    """Return the constants of gated_delta_rule_channels.cu."""
    return _without(chosen, "LANES", "INITIAL")


def _has_products(q: Array, k: Array, v: Array, decay: Array, *dout: Array) -> bool:
    """Return whether tensor cores compute a call.

    They need rows of 16 bits, aligned and in whole tiles, and one decay for each head.
    """
    whole = q.shape[3] in (64, 128) and v.shape[3] % 64 == 0 < v.shape[3]
    return whole and q.dtype.itemsize == 2 and decay.ndim == 3 and lanes(64, q, k, v, *dout) == 8


def _constants_of(decay: Array, beta: Array, offsets: Array | None, *rows: Array) -> Any:
    """Return the common constants of a call, to be completed; ``rows`` are q, k, v and dout."""
    q, _, v, *_ = rows
    dtypes = q.dtype, decay.dtype, beta.dtype, getattr(offsets, "dtype", None)
    vector = min(4, lanes(math.gcd(q.shape[3], v.shape[3]), *rows))
    channels = decay.ndim == 4
    return functools.partial(_constants, dtypes, q.shape[3], vector, CHANNELS=channels)


def _sizes(q: Array, v: Array, offsets: Array | None, scale: float | None) -> dict[str, Any]:
    """Return the struct Sizes of common/delta.cuh."""
    batch, tokens, heads, _ = q.shape
    return {
        "tokens": batch * tokens,
        "each": tokens,
        "texts": count_of(batch, offsets),
        "heads": heads,
        "groups": v.shape[2] // heads,
        "values": v.shape[3],
        "tiles": -(-v.shape[3] // COLUMNS),
        "scale": scale_of(q, scale),
    }


def _slots(q: Array, offsets: Array | None) -> int:
    """Return the number of slots for chunks; at most one slot for each text stays empty."""
    batch, tokens = q.shape[:2]
    return batch * tokens // CHUNK + count_of(batch, offsets)


def _states_of_products(
    q: Array,
    k: Array,
    v: Array,
    decay: Array,
    beta: Array,
    initial: Array | None,
    offsets: Array | None,
    chosen: Constants,
    sizes: dict[str, Any],
    results: tuple[Array | None, ...],
) -> Array:
    """Launch the forward kernels on tensor cores; return the Pieces, which do not depend on states.

    ``results`` are (out, final, None, None) or, for backward, (None, None, U, states of chunks).
    """
    (value_heads, value_dim), dim, slots = v.shape[2:], q.shape[3], _slots(q, offsets)
    file, parts, backward = "gated_delta_rule_mma.cu", chosen["EXACT"], chosen["BACKWARD"]
    sizes["tiles"] = value_dim * dim // 4096  # 64 columns of values, or 32 where dim is 128
    pieces = empty((slots, value_heads, _piece_bytes(parts, backward) // 4), FLOAT32, like=q)
    kernel = load(file, "delta_chunks_mma", q, chosen)
    kernel[slots * q.shape[2], 128](q, k, decay, beta, offsets, pieces, sizes)
    kernel = load(file, "delta_states_mma", q, chosen)
    blocks = sizes["texts"] * value_heads * sizes["tiles"]
    kernel[blocks, 128, _shared_of_products(dim, parts, "backward" if backward else "states")](
        *(q, k, v, decay, beta, initial, offsets, pieces, *results, sizes)
    )
    return pieces


def _of_chunks(
    q: Array,
    k: Array,
    decay: Array,
    beta: Array,
    offsets: Array | None,
    chosen: Constants,
    sizes: dict[str, Any],
) -> list[Array | None]:
    """Return the matrices of all chunks that do not depend on states: see delta_chunks.

    They are scores, solve, alike (for backward), into and onward (for decays of channels).
    """
    slots, heads = _slots(q, offsets), sizes["heads"] * sizes["groups"]
    square, rows = (slots, heads, CHUNK, CHUNK), (slots, heads, CHUNK, q.shape[3])
    backward, channels = chosen["BACKWARD"], chosen["CHANNELS"]
    shapes = [
        (square, True),
        (square, True),
        (square, backward),
        (rows, channels),
        (rows, channels),
    ]
    results = [empty(shape, FLOAT32, like=q) if there else None for shape, there in shapes]
    if channels:
        own = _of_channels(chosen)
        kernel = load("gated_delta_rule_channels.cu", "delta_channel_chunks", q, own)
        kernel[slots * heads, THREADS](q, k, decay, beta, offsets, *results, sizes)
    else:
        kernel = load("gated_delta_rule.cu", "delta_chunks", q, chosen)
        kernel[slots * sizes["heads"], THREADS](q, k, decay, beta, offsets, *results[:3], sizes)
    return results


def _depth(dim: int) -> int:
    """Return the columns of q and k in shared memory: a power of two, padded with zeros."""
    return max(16, 1 << (dim - 1).bit_length())


def _shared(dim: int, values: int) -> int:
    """Return the bytes of shared memory of a block along a text, with ``values`` tiles of v."""
    depth = _depth(dim)
    keys, square = CHUNK * (depth + 4), CHUNK * (CHUNK + 4)  # 4: no bank conflicts between rows
    return 4 * (keys + square + depth * COLUMNS + values * CHUNK * COLUMNS)


def _piece_bytes(parts: int, backward: bool) -> int:
    """Return the bytes of struct Pieces of common/delta_mma.cuh: triangles and three factors."""
    triangles = 3 * parts if backward else parts + 2
    return triangles * PLANE + 3 * CHUNK * 4


def _shared_of_products(dim: int, parts: int, kernel: str) -> int:
    """Return the bytes of shared memory of a kernel on tensor cores: the size of its struct."""
    of_values, exchanged = (5120, 16384) if dim == 128 else (8192, 16)
    rows, solve, factors, stage = 2 * CHUNK * dim, parts * PLANE, 768, 14336 + 128 * dim
    return {
        "states": 3 * rows + of_values + exchanged + _piece_bytes(parts, backward=False),
        "backward": 2 * rows + 16 + of_values + exchanged + solve + factors,
        "gradients": 3 * rows + of_values + _piece_bytes(parts, backward=True) - solve,
        "chunks": 2 * rows + max(2 * stage, 51200),  # the ring, and later pairs of tokens
    }[kernel]


def _shared_of_chunks(dim: int) -> int:
    """Return the bytes of shared memory of delta_chunk_gradients."""
    depth, slab = max(_depth(dim), CHUNK), 32
    return 4 * ((CHUNK + depth) * (slab + 4) + 3 * CHUNK * (CHUNK + 4))


def _shared_of_channels() -> int:
    """Return the bytes of shared memory of delta_channel_gradients."""
    return 4 * (2 * CHUNK * (SLAB + 4) + 2 * CHUNK * (CHUNK + 4))
