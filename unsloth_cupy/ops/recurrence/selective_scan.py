"""Selective scan, the recurrence of Mamba: each channel has states with decays of their own.

h_t = exp(-exp(a_log) r_t) h_(t-1) + r_t x_t b_t        y_t = c_t . h_t + d x_t
r_t = softplus(dt_t + dt_bias)

Forward stores no states: backward computes them again, from those before chunks of tokens.

Gu and Dao, Mamba: Linear-Time Sequence Modeling with Selective State Spaces, 2023.
"""

import functools
from typing import Any

import numpy as np

from ...core.arrays import empty
from ...core.dtypes import FLOAT32, Array
from ...core.kernel import load
from ...core.op import op
from ...core.source import Constants
from ...core.stand_in import representative_steps
from ..activations.swiglu import sigmoid
from ..common.columns import column_sums
from ..common.no_kernel import no_kernel
from ._chunks import Layout
from ._texts import check_texts, count_of, ends, offsets_of

CHUNK, THREADS, EACH = 16, 128, 4  # as in selective_scan.cu
WIDEST = 64  # the most states of a channel: 16 threads, whose products have room in shared memory


@op(
    "x(batch, tokens, inner), dt(batch, tokens, inner): param, a_log(inner, d_state): param,"
    " b(batch, tokens, d_state), c(batch, tokens, d_state), d?(inner): param,"
    " dt_bias?(inner): param, initial?(states, inner, d_state): stat, offsets?(texts+1): int"
    " -> y(batch, tokens, inner), final(ends, inner, d_state): stat",
    bound=ends,
)
def selective_scan(
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
) -> tuple[Array, Array]:
    """Run the recurrence of Mamba along the tokens of each text.

    For each channel, with states h of (d_state,) and a rate ``r = softplus(dt + dt_bias)``:
    ``h = exp(-exp(a_log) * r) * h + r * x * b``, then ``y = sum(c * h) + d * x``.

    Parameters
    ----------
    x : (batch, tokens, inner) float
    dt : (batch, tokens, inner) dtype of x or float32
        The step size of each token and channel, before the softplus.
    a_log : (inner, d_state) dtype of x or float32
        The logarithms of the rates of decay of the states.
    b, c : (batch, tokens, d_state) float
        The vectors with which a token writes to the states of all channels (b) and reads them (c).
    d : (inner,) dtype of x or float32, optional
        Factor of x that is added to y without the states (skip connection).
    dt_bias : (inner,) dtype of x or float32, optional
    initial : (batch or texts, inner, d_state) dtype of final, optional
        The states before each text: ``final`` of the call on its earlier tokens; 0 by default.
    offsets : (texts + 1,) int, optional
        For texts that are packed in one row (batch 1): the index of the first token of each text,
        then the number of tokens.  Results have the same bits as for each text alone.

    Returns
    -------
    y : (batch, tokens, inner) float
    final : (batch or texts, inner, d_state) float32, or float64 for float64 arrays
        The states after each text.

    Raises
    ------
    RangeError
        Offsets do not rise from 0 to the number of tokens.  On a GPU the host does not read them.
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import selective_scan, selective_scan_backward
    >>> x = np.arange(4, dtype=np.float32).reshape(1, 4, 1)
    >>> one = np.ones((1, 4, 1), np.float32)  # b and c: one state
    >>> dt = np.full((1, 4, 1), np.log(np.e - 1), np.float32)  # rates of 1
    >>> a_log = np.full((1, 1), -np.inf, np.float32)  # nothing is forgotten: a running sum
    >>> y, final = selective_scan(x, dt, a_log, one, one)
    >>> np.testing.assert_allclose(y[0, :, 0], [0, 1, 3, 6], rtol=1e-6)
    >>> _, state = selective_scan(x[:, :3], dt[:, :3], a_log, one[:, :3], one[:, :3])
    >>> step = x[:, 3:], dt[:, 3:], a_log, one[:, 3:], one[:, 3:]
    >>> last, final = selective_scan(*step, initial=state)
    >>> np.testing.assert_array_equal(last, y[:, 3:])
    >>> dx, ddt, da_log, db, dc, dd, ddt_bias, dinitial = selective_scan_backward(
    ...     y, None, x, dt, a_log, one, one, None, None, None, None
    ... )
    """
    scan = _Scan("selective_scan", x, dt, a_log, b, c, dt_bias, offsets)
    begin, state = scan.begin(initial), None
    final, y = begin.copy(), np.zeros_like(scan.arrays[0])
    for number in representative_steps(x, scan.numbers):
        states = scan.states(number, scan.layout.before(number, begin, state))[0]
        read = scan.take(number, scan.arrays[3])
        scan.take(number, y)[...] = (states @ read[..., None])[..., 0]
        state = states[:, -1].copy()
        del states  # before the next chunk has its own
        final[scan.layout.text[number]] = state
    y = scan.layout.back(y)
    if d is not None:
        y += d * x
    return y, final


@selective_scan.kernel
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
) -> Any:
    if (reason := _without_kernel(b)) is not None:
        return no_kernel(reason)
    texts, inner, state = count_of(x.shape[0], offsets), x.shape[2], b.shape[2]
    y, final = empty(x.shape, x.dtype, like=x), empty((texts, inner, state), FLOAT32, like=x)
    arrays = x, dt, a_log, b, c, d, dt_bias, initial, offsets
    _run("selective_scan", arrays, y, final, None)
    return y, final


@selective_scan.gradient
def selective_scan_backward(
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
) -> tuple[Array, Array, Array, Array, Array, Array | None, Array | None, Array | None]:
    """Return the gradients of x, dt, a_log, b, c, d, dt_bias, initial; dfinal None counts as 0."""
    scan = _Scan("selective_scan_backward", x, dt, a_log, b, c, dt_bias, offsets)
    begin, layout, state = scan.begin(initial), scan.layout, None
    starts = np.zeros_like(begin, shape=(len(scan.numbers), len(x), *begin.shape[1:]))
    for number in representative_steps(x, scan.numbers):
        starts[number] = layout.before(number, begin, state)
        state = scan.states(number, starts[number])[0][:, -1].copy()
    ends_of = np.zeros_like(begin) if dfinal is None else dfinal
    dinitial, dstate = ends_of.copy(), np.zeros_like(begin[:1])
    results, dys = [np.zeros_like(array) for array in scan.arrays], layout.lay(dy)
    dslope = np.zeros_like(scan.slope)
    for number in representative_steps(x, scan.numbers[::-1]):
        dstate = layout.after(number, ends_of, dstate)
        *gradients, more, dstate = scan.gradients(
            number, starts[number], scan.take(number, dys), dstate
        )
        dslope += more
        for array, part in zip(results, gradients, strict=True):
            scan.take(number, array)[...] = part
        del gradients, more, part
        dinitial[layout.text[number]] = dstate
    dx, drate, db, dc = (layout.back(array) for array in results)
    ddt, dd = scan.sigmoid * drate, None
    if d is not None:
        dx += d * dy
        dd = (dy * x).sum(axis=(0, 1))
    return (
        *(dx, ddt, dslope * scan.slope, db, dc, dd),
        None if dt_bias is None else ddt.sum(axis=(0, 1)),
        None if initial is None else dinitial,
    )


@selective_scan_backward.kernel
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
) -> Any:
    if (reason := _without_kernel(b)) is not None:
        return no_kernel(reason)
    (batch, tokens, inner), state = x.shape, b.shape[2]
    texts = count_of(batch, offsets)
    # at most one slot for each text stays empty
    states = empty((batch * tokens // CHUNK + texts, inner, state), FLOAT32, like=x)
    arrays = x, dt, a_log, b, c, d, dt_bias, initial, offsets
    tiles = _run("selective_scan", arrays, None, None, states)
    dx, ddt = empty(x.shape, x.dtype, like=x), empty(dt.shape, dt.dtype, like=x)
    dinitial = None if initial is None else empty(initial.shape, FLOAT32, like=x)
    vectors = empty((2, tiles, batch * tokens * state), FLOAT32, like=x)
    of_slopes = empty((1, texts, inner * state), FLOAT32, like=x)
    of_channels = empty((2, texts, inner), FLOAT32, like=x)
    results = dx, ddt, dinitial, vectors, of_slopes, of_channels
    _run("selective_scan_backward", arrays, dy, dfinal, states, *results)
    da_log, db, dc = (empty(each.shape, each.dtype, like=x) for each in (a_log, b, c))
    column_sums(vectors, db, dc)
    column_sums(of_slopes, da_log, None)
    dd, ddt_bias = (
        None if each is None else empty(each.shape, each.dtype, like=x) for each in (d, dt_bias)
    )
    for row, result in enumerate((dd, ddt_bias)):
        if result is not None:
            column_sums(of_channels[row : row + 1], result, None)
    return dx, ddt, da_log, db, dc, dd, ddt_bias, dinitial


# ---- the definition ------------------------------------------------------------------------------
class _Scan:
    """The arrays of a call, laid out in chunks."""

    def __init__(
        self,
        call: str,
        x: Array,
        dt: Array,
        a_log: Array,
        b: Array,
        c: Array,
        dt_bias: Array | None,
        offsets: Array | None,
    ) -> None:
        dt, a_log = (each.astype(np.promote_types(each.dtype, x.dtype)) for each in (dt, a_log))
        raw = dt if dt_bias is None else dt + dt_bias
        rate, self.sigmoid = np.logaddexp(raw, raw.dtype.type(0)), sigmoid(raw)
        self.slope = -np.exp(a_log)
        packed = None if offsets is None else offsets_of(call, x, offsets)
        self.layout = Layout(x.shape[0], x.shape[1], packed, CHUNK)
        self.numbers = range(len(self.layout.spans))
        self.texts = count_of(len(x), offsets)
        self.arrays = [self.layout.lay(array) for array in (x, rate, b, c)]

    def begin(self, initial: Array | None) -> Array:
        """Return the states before all texts: (texts, inner, d_state)."""
        if initial is not None:
            return initial
        wide = np.promote_types(self.arrays[0].dtype, FLOAT32)
        return np.zeros((self.texts, *self.slope.shape), wide, like=self.slope)

    def take(self, number: int, array: Array) -> Array:
        """Return one chunk of an array, as a view (batch, chunk, ...)."""
        return array[:, slice(*self.layout.spans[number])]

    def states(self, number: int, state: Array) -> tuple[Array, Array]:
        """Return the states after each token of a chunk, and decays.

        Both are (batch, chunk, inner, d_state); ``state`` are the states before the chunk.
        """
        x, rate, b, _ = (self.take(number, array) for array in self.arrays)
        decays = np.exp(rate[..., None] * self.slope)
        states = (rate * x)[..., None] * b[:, :, None]
        for token in representative_steps(x, range(x.shape[1])):
            states[:, token] += decays[:, token] * state
            state = states[:, token]
        return states, decays

    def gradients(self, number: int, start: Array, dy: Array, dend: Array) -> tuple[Array, ...]:
        """Return the gradients of x (without d), rate, b, c, the slopes and the states before."""
        x, rate, b, c = (self.take(number, array) for array in self.arrays)
        states, decays = self.states(number, start)
        dstates = dy[..., None] * c[:, :, None]
        for token in representative_steps(x, range(x.shape[1])[::-1]):
            dstates[:, token] += dend
            dend = decays[:, token] * dstates[:, token]
        du = (dstates @ b[..., None])[..., 0]
        db = ((rate * x)[:, :, None] @ dstates)[:, :, 0]
        dc = (dy[:, :, None] @ states)[:, :, 0]
        states[:, 1:] = states[:, :-1].copy()
        states[:, 0] = start
        states *= decays
        states *= dstates  # the gradients of rate * slope
        drate = x * du + (states * self.slope).sum(axis=-1)
        return rate * du, drate, db, dc, (rate[..., None] * states).sum(axis=(0, 1)), dend


# ---- checks and launches -------------------------------------------------------------------------
def _check(call: str, x: Any, initial: Any, offsets: Any) -> None:
    """Raise unless each text has states."""
    check_texts(call, x, initial, offsets)


selective_scan.require(_check)
selective_scan_backward.require(_check)


def _without_kernel(b: Array) -> str | None:
    """Return why the kernels do not support a call; None if they do."""
    state = b.shape[2]
    return f"d_state={state}: the kernels support up to {WIDEST}" if state > WIDEST else None


@functools.cache
def _constants(state: int, packed: bool, backward: bool, *dtypes: Any) -> Constants:
    """Return the constants of selective_scan.cu."""
    named = dict(zip("TRAOQI", dtypes, strict=True))
    return Constants(**named, DIM=state, PACKED=packed, BACKWARD=backward)


def _run(name: str, arrays: tuple[Any, ...], *more: Array | None) -> int:
    """Launch a kernel on the arrays of a call; return its number of blocks along the channels."""
    (x, dt, a_log, b), (d, dt_bias), offsets = arrays[:4], arrays[5:7], arrays[8]
    (batch, tokens, inner), state = x.shape, b.shape[2]
    absent = x.dtype, x.dtype, np.dtype("int32")  # of absent arrays
    dtypes = [
        o if a is None else a.dtype for a, o in zip((d, dt_bias, offsets), absent, strict=True)
    ]
    backward, texts = more[-1] is not None, count_of(batch, offsets)
    chosen = _constants(
        *(state, offsets is not None, backward, x.dtype, dt.dtype, a_log.dtype, *dtypes)
    )
    share = max(4, 1 << (-(-state // EACH) - 1).bit_length())  # threads of a channel
    tiles = -(-inner // (THREADS // share))
    sizes = {"tokens": batch * tokens, "each": tokens, "texts": texts}
    sizes |= {"channels": inner, "tiles": tiles}
    if name == "selective_scan":
        arguments: tuple[Any, ...] = (*arrays, *more)
    else:
        (dy, dfinal), rest = more[:2], more[2:]
        arguments = dy, dfinal, *arrays[:7], offsets, *rest
    kernel = load("selective_scan.cu", name, x, chosen)
    kernel[texts * tiles, THREADS](*arguments, sizes)
    return tiles
