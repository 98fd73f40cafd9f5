"""State space duality (SSD), the recurrence of Mamba2.

S_t = exp(-exp(a_log) r_t) S_(t-1) + r_t b_t x_t^T        y_t = S_t^T c_t + d x_t
r_t = clip(softplus(dt_t + dt_bias), least, most)

Tokens are computed in chunks, and only states pass from chunk to chunk.  Forward stores no states:
backward recomputes the states of all chunks.

Dao and Gu, Transformers are SSMs: Generalized Models and Efficient Algorithms Through Structured
State Space Duality, 2024.
"""

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from ...core.arrays import contiguous, empty, lanes
from ...core.dtypes import FLOAT32, Array
from ...core.kernel import load
from ...core.op import op
from ...core.source import Constants
from ...errors import ConfigError
from ..activations.swiglu import sigmoid
from ..common.columns import column_sums
from ..common.no_kernel import no_kernel
from ..common.strides import with_head_strides
from ._chunks import Layout
from ._decays import LEAST, decay_matrix, sums_across, transposed
from ._texts import check_texts, count_of, ends, offsets_of

CHUNK, THREADS, COLUMNS = 64, 256, 32  # as in common/delta.cuh; on tensor cores 128 threads
WIDEST = 256  # the most rows of a state: 32 columns of it are in shared memory
SCORES = 12832  # bytes of shared memory in ssd_mma.cu for scores and for factors of tokens
MORE = 15360  # bytes that ssd_backward_mma.cu needs besides: a part of scores, x, sums of tokens
HEADS = 16  # heads for which one block adds the gradients of b and c


@op(
    "x(batch, tokens, heads, dim), dt(batch, tokens, heads): param, a_log(heads): param,"
    " b(batch, tokens, groups, state), c(batch, tokens, groups, state), d?(heads): param,"
    " dt_bias?(heads): param, initial?(states, heads, state, dim): stat, offsets?(texts+1): int"
    " -> y(batch, tokens, heads, dim), final(ends, heads, state, dim): stat where heads % groups",
    bound=ends,
)
def ssd(
    x: Array,
    dt: Array,
    a_log: Array,
    b: Array,
    c: Array,
    d: Array | None = None,
    dt_bias: Array | None = None,
    *,
    initial: Array | None = None,
    offsets: Array | None = None,
    dt_min: float = 0.0,
    dt_max: float | None = None,
    chunk: int = 64,
) -> tuple[Array, Array]:
    """Run the recurrence of Mamba2 along the tokens of each text.

    For each head, with a state S of (state, dim) and a rate ``r = clip(softplus(dt + dt_bias),
    dt_min, dt_max)``: ``S = exp(-exp(a_log) * r) * S + r * b x^T``, then ``y = S^T c + d * x``.
    Head h reads group ``h // (heads // groups)`` of b and c.

    Parameters
    ----------
    x : (batch, tokens, heads, dim) float
    dt : (batch, tokens, heads) dtype of x or float32
        The step size of each token, before the softplus.
    a_log : (heads,) dtype of x or float32
        The logarithm of the rate of decay of the state.
    b, c : (batch, tokens, groups, state) float
        The vectors with which a token writes to the state (b) and reads it (c).
    d : (heads,) dtype of x or float32, optional
        Factor of x that is added to y without the state (skip connection).
    dt_bias : (heads,) dtype of x or float32, optional
    initial : (batch or texts, heads, state, dim) dtype of final, optional
        The state before each text: ``final`` of the call on its earlier tokens; 0 by default.
    offsets : (texts + 1,) int, optional
        For texts that are packed in one row (batch 1): the index of the first token of each text,
        then the number of tokens.  Results have the same bits as for each text alone.
    dt_min, dt_max : float
        Bounds of the rate (``time_step_limit``); dt_max None is no upper bound.
    chunk : int
        Tokens that are computed together; 1 is the recurrence.  Results for other chunks differ by
        rounding.  The kernels support only 64.

    Returns
    -------
    y : (batch, tokens, heads, dim) float
    final : (batch or texts, heads, state, dim) float32, or float64 for float64 arrays
        The state after each text.

    Raises
    ------
    RangeError
        Offsets do not rise from 0 to the number of tokens.  On a GPU the host does not read them.
    ConfigError
        chunk is below 1, dt_min is negative or above dt_max.
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import ssd, ssd_backward
    >>> x = np.arange(4, dtype=np.float32).reshape(1, 4, 1, 1)
    >>> one = np.ones((1, 4, 1, 1), np.float32)  # b and c: a state of one number
    >>> dt = np.full((1, 4, 1), 50, np.float32)  # rates of 1, where they may not be larger
    >>> a_log = np.full(1, -np.inf, np.float32)  # nothing is forgotten: a running sum
    >>> y, final = ssd(x, dt, a_log, one, one, dt_max=1.0)
    >>> np.testing.assert_array_equal(y[0, :, 0, 0], [0, 1, 3, 6])
    >>> _, state = ssd(*(a[:, :3] for a in (x, dt)), a_log, one[:, :3], one[:, :3], dt_max=1.0)
    >>> step = x[:, 3:], dt[:, 3:], a_log, one[:, 3:], one[:, 3:]
    >>> last, final = ssd(*step, initial=state, dt_max=1.0)
    >>> np.testing.assert_array_equal(last, y[:, 3:])
    >>> dx, ddt, da_log, db, dc, dd, ddt_bias, dinitial = ssd_backward(
    ...     y, None, x, dt, a_log, one, one, None, None, None, None, dt_max=1.0
    ... )
    """
    rate, decay, _ = _rates(x.dtype, dt, a_log, dt_bias, dt_min, dt_max)
    chunks = _Chunks("ssd", x, rate, decay, b, c, offsets, chunk)
    begin, layout, state = chunks.begin(initial), chunks.layout, None
    final, y = begin.copy(), np.zeros_like(chunks.arrays[0])
    for number in range(len(layout.spans)):
        own, state = chunks.at(number), layout.before(number, begin, state)
        part = own.fade * (own.c @ transposed(own.b)) @ own.u
        part += own.into * (own.c @ state)
        chunks.give(number, y, part)
        state = own.end(state)
        final[layout.text[number]] = state
    y = layout.back(y)
    if d is not None:
        y += d[:, None] * x
    return y, final.reshape(len(begin), x.shape[2], b.shape[3], x.shape[3])


@ssd.kernel(strided=("x", "b", "c"))
def _launch(
    x: Array,
    dt: Array,
    a_log: Array,
    b: Array,
    c: Array,
    d: Array | None,
    dt_bias: Array | None,
    initial: Array | None,
    offsets: Array | None,
    dt_min: float,
    dt_max: float | None,
    chunk: int,
) -> Any:
    if (reason := _without_kernel(b, chunk)) is not None:
        return no_kernel(reason)
    call = _Launches(x, dt, a_log, b, c, d, dt_bias, initial, offsets, dt_min, dt_max)
    y = empty(x.shape, x.dtype, like=x)
    final = empty((call.sizes["texts"], x.shape[2], b.shape[3], x.shape[3]), FLOAT32, like=x)
    if x.shape[1] == 1 and offsets is None:  # decoding: one token is no chunk
        rows = call.x, dt, a_log, call.b, call.c, d, dt_bias, initial, y, final
        call.run("ssd_step", call.walks, *rows, call.sizes, call.strides, *call.bounds)
    elif call.has_products:
        more = call.b, call.c, d, dt_bias, initial, offsets
        flags = {"INITIAL": initial is not None, "BACKWARD": False}
        call.products("ssd_states_mma", call.x, dt, a_log, *more, y, final, None, **flags)
    else:
        call.states(call.rates(dt, a_log, dt_bias), d, initial, call.scores(), y, final, None)
    return y, final


@ssd.gradient
def ssd_backward(
    dy: Array,
    dfinal: Array | None,
    x: Array,
    dt: Array,
    a_log: Array,
    b: Array,
    c: Array,
    d: Array | None,
    dt_bias: Array | None,
    initial: Array | None,
    offsets: Array | None,
    *,
    dt_min: float = 0.0,
    dt_max: float | None = None,
    chunk: int = 64,
) -> tuple[Array, Array, Array, Array, Array, Array | None, Array | None, Array | None]:
    """Return the gradients of x, dt, a_log, b, c, d, dt_bias, initial; dfinal None counts as 0."""
    rate, decay, slope = _rates(x.dtype, dt, a_log, dt_bias, dt_min, dt_max)
    chunks = _Chunks("ssd_backward", x, rate, decay, b, c, offsets, chunk)
    begin, layout = chunks.begin(initial), chunks.layout
    count, state, states = len(layout.spans), None, list[Array]()
    for number in range(count):
        state = layout.before(number, begin, state)
        states.append(state)
        state = chunks.at(number).end(state) if number + 1 < count else None
    ends_of = np.zeros_like(begin) if dfinal is None else dfinal.reshape(begin.shape)
    dinitial, dstate = ends_of.copy(), np.zeros_like(begin[:1])
    results, dys = [np.zeros_like(array) for array in chunks.arrays], layout.lay(dy)
    for number in reversed(range(count)):
        dstate = layout.after(number, ends_of, dstate)
        own = chunks.at(number)
        *gradients, dstate = own.gradients(states.pop(), chunks.take(number, dys), dstate)
        for array, part in zip(results, gradients, strict=True):
            chunks.give(number, array, part)
        dinitial[layout.text[number]] = dstate
    dx, drate, ddecay, db, dc = (layout.back(array) for array in results)
    ddt = slope * (drate - np.exp(a_log) * ddecay)
    da_log, dd = (ddecay * decay).sum(axis=(0, 1)), None
    if d is not None:
        dx += d[:, None] * dy
        dd = (dy * x).sum(axis=(0, 1, 3))
    shape = len(begin), x.shape[2], b.shape[3], x.shape[3]
    return (
        *(dx, ddt, da_log, db, dc, dd, None if dt_bias is None else ddt.sum(axis=(0, 1))),
        None if initial is None else dinitial.reshape(shape),
    )


@ssd_backward.kernel(strided=("dy", "x", "b", "c"))
def _launch_backward(
    dy: Array,
    dfinal: Array | None,
    x: Array,
    dt: Array,
    a_log: Array,
    b: Array,
    c: Array,
    d: Array | None,
    dt_bias: Array | None,
    initial: Array | None,
    offsets: Array | None,
    dt_min: float,
    dt_max: float | None,
    chunk: int,
) -> Any:
    if (reason := _without_kernel(b, chunk)) is not None:
        return no_kernel(reason)
    call = _Launches(x, dt, a_log, b, c, d, dt_bias, initial, offsets, dt_min, dt_max, dy)
    (batch, tokens, heads, dim), (groups, state) = x.shape, b.shape[2:]
    rates, scores, slots = call.rates(dt, a_log, dt_bias), call.scores(), call.slots
    states, dstates = (empty((slots, heads, state, dim), FLOAT32, like=x) for _ in range(2))
    dx = empty(x.shape, x.dtype, like=x)
    dinitial = None if initial is None else empty(initial.shape, FLOAT32, like=x)
    tiles = call.sizes["tiles"] // (2 if call.has_products else 1)  # of 64 columns, not 32
    drates, skips = (empty((tiles, batch * tokens, heads), FLOAT32, like=x) for _ in range(2))
    parts, teams = call.parts, -(-(heads // groups) // HEADS)
    ddecays = empty((parts, batch * tokens, heads), FLOAT32, like=x)
    db, dc = (empty(b.shape, x.dtype, like=x) for _ in range(2))
    sums = [db, dc]
    if teams > 1:  # blocks with HEADS heads each: column_sums adds their gradients
        both = empty((2, teams, *b.shape), FLOAT32, like=x)
        sums = [both[0], both[1]]
    more = {"FINAL": dfinal is not None, "HEADS": HEADS, "G": sums[0].dtype}
    results = dx, drates, skips, dstates, dinitial
    if call.has_products:
        arrays = call.x, dt, a_log, call.b, call.c, d, dt_bias
        flags = {"INITIAL": initial is not None, "BACKWARD": True}
        call.products("ssd_states_mma", *arrays, initial, offsets, None, None, states, **flags)
        call.products(
            *("ssd_state_gradients_mma", call.dy, dfinal, *arrays, offsets, *results),
            FINAL=dfinal is not None,
        )
    else:
        call.states(rates, d, initial, scores, None, None, states)
        call.run(
            *("ssd_state_gradients", call.walks, call.dy, dfinal, call.x, *rates, call.b, call.c),
            *(d, offsets, scores, *results, call.sizes, call.strides),
            shared=call.shared,
            **more,
        )
    call.run(
        *("ssd_chunk_gradients", (slots * groups, parts, teams), call.dy, call.x, *rates, call.b),
        *(call.c, offsets, scores, states, dstates, *sums, ddecays, call.sizes, call.strides),
        shared=call.shared_of_chunks,
        **more,
    )
    if teams > 1:
        column_sums(both.reshape(2, teams, -1), db, dc)
    ddt = empty(dt.shape, dt.dtype, like=x)
    sums_of = empty((2, batch * tokens, heads), FLOAT32, like=x)
    call.run(
        *("ssd_rate_gradients", -(-dt.size // 256), dt, a_log, dt_bias, rates[1], drates, ddecays),
        *(ddt, sums_of, dt.size, heads, tiles, *call.bounds),
        **more,
    )
    da_log = empty(a_log.shape, a_log.dtype, like=x)
    ddt_bias = None if dt_bias is None else empty(dt_bias.shape, dt_bias.dtype, like=x)
    column_sums(sums_of[: 1 if dt_bias is None else 2], da_log, ddt_bias)
    dd = None if d is None else empty(d.shape, d.dtype, like=x)
    if dd is not None:
        column_sums(skips.reshape(1, -1, heads), dd, None)
    return dx, ddt, da_log, db, dc, dd, ddt_bias, dinitial


# ---- the definition ------------------------------------------------------------------------------
def _rates(
    dtype: np.dtype[Any],
    dt: Array,
    a_log: Array,
    dt_bias: Array | None,
    least: float,
    most: float | None,
) -> tuple[Array, Array, Array]:
    """Return the rates of tokens, the decays of states, and the derivatives of rates by dt."""
    dt, a_log = (each.astype(np.promote_types(each.dtype, dtype)) for each in (dt, a_log))
    raw = dt if dt_bias is None else dt + dt_bias
    free = np.logaddexp(raw, raw.dtype.type(0))
    rate = free.clip(least, most)
    return rate, -np.exp(a_log) * rate, np.where(rate == free, sigmoid(raw), 0)


class _Chunk(NamedTuple):
    """The tokens of a chunk; arrays are (batch, groups, heads of a group, chunk, ...)."""

    x: Array
    rate: Array  # (..., chunk, 1)
    b: Array  # (batch, groups, 1, chunk, state)
    c: Array
    into: Array  # exp(g), g the sums of decays
    onward: Array  # exp(g[-1] - g)
    whole: Array  # exp(g[-1])
    fade: Array  # exp(g[i] - g[j]) for j <= i, else 0: (..., chunk, chunk)

    @property
    def u(self) -> Array:
        """What each token writes to the state, along its b."""
        return self.rate * self.x

    def end(self, state: Array) -> Array:
        """Return the state after the chunk."""
        return self.whole * state + transposed(self.onward * self.b) @ self.u

    def gradients(self, state: Array, dy: Array, dend: Array) -> tuple[Array, ...]:
        """Return the gradients of x (without d), rate, decay, b, c and the state before."""
        p = self.fade * (self.c @ transposed(self.b))
        du = transposed(p) @ dy + (self.onward * self.b) @ dend
        dp = dy @ transposed(self.u)
        from_c = self.into * (dy @ transposed(state))
        from_end = self.onward * (self.u @ transposed(dend))
        dstate = self.whole * dend
        # exp(decay[t]) is a factor of all that tokens before t pass to t or later: nothing cancels
        ddecay = np.cumsum((self.c * from_c).sum(axis=-1)[..., ::-1], axis=-1)[..., ::-1]
        ddecay = ddecay + (state * dstate).sum(axis=(-1, -2))[..., None]
        before = np.cumsum((self.b * from_end).sum(axis=-1), axis=-1)
        ddecay[..., 1:] += before[..., :-1]
        ddecay += sums_across(dp * p)[..., 0]
        dstate += transposed(self.into * self.c) @ dy
        pairs = dp * self.fade
        dc, db = from_c + pairs @ self.b, from_end + transposed(pairs) @ self.c
        return (
            *(self.rate * du, (du * self.x).sum(axis=-1), ddecay),
            *(db.sum(axis=2, keepdims=True), dc.sum(axis=2, keepdims=True), dstate),
        )


class _Chunks:
    """The arrays of a call, laid out in chunks."""

    def __init__(
        self,
        call: str,
        x: Array,
        rate: Array,
        decay: Array,
        b: Array,
        c: Array,
        offsets: Array | None,
        chunk: int,
    ) -> None:
        packed = None if offsets is None else offsets_of(call, x, offsets)
        batch, tokens = x.shape[:2]
        self.layout, self.groups = Layout(batch, tokens, packed, chunk), b.shape[2]
        self.texts, self.sizes = count_of(len(x), offsets), (b.shape[3], x.shape[3])
        self.arrays = [self.layout.lay(array) for array in (x, rate, decay, b, c)]

    def begin(self, initial: Array | None) -> Array:
        """Return the states before all texts: (texts, groups, heads of a group, state, dim)."""
        x = self.arrays[0]
        shape = self.texts, self.groups, x.shape[2] // max(self.groups, 1), *self.sizes
        if initial is not None:
            return initial.reshape(shape)  # (texts, groups, heads of a group, state, dim)
        return np.zeros(shape, np.promote_types(x.dtype, FLOAT32), like=x)

    def take(self, number: int, array: Array) -> Array:
        """Return one chunk of an array: (batch, groups, heads of a group, chunk, ...)."""
        part = array[:, slice(*self.layout.spans[number])]
        each = part.shape[2] // max(self.groups, 1)
        # (batch, chunk, groups, each, ...)
        part = part.reshape(*part.shape[:2], self.groups, each, *part.shape[3:])
        return np.moveaxis(part, 1, 3).copy()  # (batch, groups, each, chunk, ...)

    def give(self, number: int, array: Array, part: Array) -> None:
        """Write a chunk as ``take`` returns it to an array."""
        to = array[:, slice(*self.layout.spans[number])]
        to[...] = np.moveaxis(part, 3, 1).reshape(to.shape)  # (batch, chunk, heads, ...)

    def at(self, number: int) -> _Chunk:
        """Return the tokens of one chunk, with their decays."""
        x, rate, decay, b, c = (self.take(number, array) for array in self.arrays)
        # in float64: differences of the sums cancel digits
        g = np.cumsum(np.maximum(decay, LEAST), axis=-1, dtype=np.float64)
        fade = decay_matrix(g[..., None], x.dtype)
        onward = np.exp((g[..., -1:] - g).astype(x.dtype))[..., None]
        into = np.exp(g.astype(x.dtype))[..., None]
        return _Chunk(x, rate[..., None], b, c, into, onward, into[..., -1:, :], fade)


# ---- checks and launches -------------------------------------------------------------------------
def _check(
    call: str, x: Any, initial: Any, offsets: Any, dt_min: float, dt_max: float | None, chunk: Any
) -> None:
    """Raise unless each text has a state, a chunk has tokens, and the bounds are in order."""
    if type(chunk) is not int or chunk < 1:
        raise ConfigError(f"{call}: chunk={chunk!r}; pass an integer of 1 or more, such as 64")
    if not 0 <= dt_min <= (math.inf if dt_max is None else dt_max):
        problem = f"{call}: dt_min={dt_min!r}, dt_max={dt_max!r}"
        raise ConfigError(f"{problem}; pass 0 <= dt_min <= dt_max, or None for no upper bound")
    check_texts(call, x, initial, offsets)


ssd.require(_check)
ssd_backward.require(_check)


def _without_kernel(b: Array, chunk: int) -> str | None:
    """Return why the kernels do not support a call; None if they do."""
    if chunk != CHUNK:
        return f"chunk={chunk}: the kernels support only {CHUNK}"
    return (
        f"state={b.shape[3]}: the kernels support up to {WIDEST}" if b.shape[3] > WIDEST else None
    )


@functools.cache
def _constants(names: tuple[str, ...], dtypes: tuple[Any, ...], **more: Any) -> Constants:
    """Return the constants of common/ssd.cuh."""
    return Constants(**dict(zip(names, dtypes, strict=True)), **more)


class _Launches:
    """The launches of a call, and the numbers that its kernels share."""

    def __init__(
        self,
        x: Array,
        dt: Array,
        a_log: Array,
        b: Array,
        c: Array,
        d: Array | None,
        dt_bias: Array | None,
        initial: Array | None,
        offsets: Array | None,
        least: float,
        most: float | None,
        dy: Array | None = None,
    ) -> None:
        (batch, tokens, heads, dim), (groups, state) = x.shape, b.shape[2:]
        self.state = state
        (self.x, of_x), (self.b, of_b), (self.c, of_c) = map(_by_token, (x, b, c))
        self.dy: Array | None = None
        of_dy = 0
        if dy is not None:
            self.dy, of_dy = _by_token(dy)
        self.strides = {"x": of_x, "b": of_b, "c": of_c, "dy": of_dy}
        self.offsets, texts = offsets, count_of(batch, offsets)
        self.slots = batch * tokens // CHUNK + texts  # at most one slot for each text stays empty
        self.bounds = float(least), math.inf if most is None else float(most)
        self.sizes = {
            **{"tokens": batch * tokens, "each": tokens, "texts": texts, "heads": groups},
            **{"groups": heads // groups, "values": dim, "tiles": -(-dim // COLUMNS), "scale": 1.0},
        }
        self.walks = texts * heads * self.sizes["tiles"]  # blocks, each of which walks along a text
        depth = max(16, min(128, 1 << (state - 1).bit_length()))
        self.parts = -(-state // depth)
        # a row of 4 more floats has no bank conflicts with the next
        self.shared = 4 * (
            CHUNK * (depth + 4) + CHUNK * (CHUNK + 4) + (self.parts * depth + CHUNK) * COLUMNS
        )
        self.shared_of_chunks = 4 * ((CHUNK + max(depth, CHUNK)) * 36 + CHUNK * (CHUNK + 4))
        rows = [each for each in (self.x, self.b, self.c, self.dy) if each is not None]
        vector = math.gcd(dim, state, *(each for each in self.strides.values() if each))
        self.vector = lanes(vector, *rows)
        arrays = {"R": dt, "A": a_log, "O": d, "Q": dt_bias, "I": offsets}
        absent = {"I": np.dtype("int32")}  # of absent arrays; others stand for the dtype of x
        dtypes = [absent.get(n, x.dtype) if a is None else a.dtype for n, a in arrays.items()]
        self.constants = functools.partial(
            _constants,
            ("T", "D", "E", *arrays),
            (x.dtype, FLOAT32, FLOAT32, *dtypes),
            DIM=state,
            PACKED=offsets is not None,
            LOW=least > 0,
            HIGH=most is not None,
        )
        self.initial = initial is not None

    @property
    def has_products(self) -> bool:
        """Return whether tensor cores compute the states: 16 bits, whole tiles, aligned rows.

        float16 with states of 128 rows would spill registers: 8 to 56 bytes.
        """
        rows = 64 if self.x.dtype == np.float16 else 128
        whole = self.state in (64, rows) and self.sizes["values"] % 64 == 0
        return whole and self.x.dtype.itemsize == 2 and self.vector == 8

    def products(self, name: str, *arguments: Any, **flags: bool) -> None:
        """Launch a kernel on tensor cores, whose blocks have tiles of 64 columns."""
        backward = name == "ssd_state_gradients_mma"
        file, more = ("ssd_backward_mma.cu", MORE) if backward else ("ssd_mma.cu", 0)
        kernel = load(file, name, self.x, self.constants(**flags))
        kernel[self.walks // 2, 128, 2 * CHUNK * (3 * self.state + 128) + SCORES + more](
            *arguments, self.sizes | {"tiles": self.sizes["tiles"] // 2}, self.strides, *self.bounds
        )

    def run(self, name: str, blocks: Any, *arguments: Any, shared: int = 0, **more: Any) -> None:
        """Launch a kernel, with ``more`` constants."""
        file = "ssd_backward.cu" if name.endswith("_gradients") else "ssd.cu"
        if file == "ssd.cu":
            more = {"INITIAL": self.initial, "BACKWARD": False} | more
        kernel = load(file, name, self.x, self.constants(LANES=min(4, self.vector), **more))
        kernel[blocks, THREADS, shared](*arguments)

    def rates(self, dt: Array, a_log: Array, dt_bias: Array | None) -> tuple[Array, Array]:
        """Return the decays and rates of all tokens."""
        decay, rate = (empty(dt.shape, FLOAT32, like=dt) for _ in range(2))
        arrays = dt, a_log, dt_bias, decay, rate
        blocks, heads = -(-dt.size // 256), dt.shape[2]
        self.run("ssd_rates", blocks, *arrays, dt.size, heads, *self.bounds)
        return decay, rate

    def scores(self) -> Array:
        """Return c b^T of all chunks: (slots, groups, CHUNK, CHUNK)."""
        groups = self.sizes["heads"]
        scores = empty((self.slots, groups, CHUNK, CHUNK), FLOAT32, like=self.x)
        arrays = self.b, self.c, self.offsets, scores
        self.run("ssd_chunks", self.slots * groups, *arrays, self.sizes, self.strides)
        return scores

    def states(
        self,
        rates: tuple[Array, Array],
        d: Array | None,
        initial: Array | None,
        scores: Array,
        *results: Array | None,
    ) -> None:
        """Write y and the last states or, for backward, the states before all chunks."""
        arrays = self.x, *rates, self.b, self.c, d, initial, self.offsets, scores, *results
        self.run(
            *("ssd_states", self.walks, *arrays, self.sizes, self.strides),
            shared=self.shared,
            BACKWARD=results[-1] is not None,
        )


def _by_token(array: Array) -> tuple[Array, int]:
    """Return an array whose heads are contiguous, and the stride of its tokens in elements.

    An array that is some columns of a wider array, split into heads, is not copied.
    """
    heads, dim = array.shape[2:]
    values, (of_token, of_head) = with_head_strides(array)
    if of_head == dim and of_token < 2**31:  # strides are 32-bit integers in the kernels
        return values, of_token
    return contiguous(array), heads * dim
