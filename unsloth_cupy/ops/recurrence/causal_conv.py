"""Causal convolution of each channel along the tokens of each text.

y[t, c] = act(bias[c] + sum over i of weight[c, i] x[t - width + 1 + i, c])

The inputs before the first token of a text are ``initial``, or 0.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np

from ...core.arrays import contiguous, empty, lanes
from ...core.dtypes import FLOAT32, Array
from ...core.kernel import load
from ...core.op import op
from ...core.source import Constants
from ...core.stand_in import is_planned, representative_steps
from ...errors import ConfigError
from ..activations.swiglu import sigmoid
from ..common.columns import column_sums
from ..common.no_kernel import no_kernel
from ..common.strides import pitch_of, spanned
from ..linear.linear import flat
from ._texts import check_texts, count_of, ends, offsets_of, tile_of

WIDEST = 8  # the most taps of the kernels: a thread keeps as many inputs in registers
PART = 2**18  # bytes of inputs that NumPy processes at a time: 256 KiB, which caches hold
THREADS = 128  # of a block


@op(
    "x(batch, tokens, channels), weight(channels, previous+1): param, bias?(channels): param,"
    " initial?(states, channels, previous), offsets?(texts+1): int"
    " -> y(batch, tokens, channels), final(ends, channels, previous)",
    bound=ends,
)
def causal_conv(
    x: Array,
    weight: Array,
    bias: Array | None = None,
    *,
    initial: Array | None = None,
    offsets: Array | None = None,
    activation: str | None = "silu",
) -> tuple[Array, Array]:
    """Convolve each channel with its own taps, over each token and the tokens before it.

    ``y[t, c] = act(bias[c] + sum_i weight[c, i] * x[t - width + 1 + i, c])``; the last tap belongs
    to the token itself.  The inputs before the first token of a text are ``initial``, or 0.

    Parameters
    ----------
    x : (batch, tokens, channels) float
    weight : (channels, width) dtype of x or float32
        The taps; in a checkpoint (channels, 1, width).
    bias : (channels,) dtype of x or float32, optional
    initial : (batch or texts, channels, width - 1) float, optional
        The inputs before each text: ``final`` of the call on its earlier tokens.
    offsets : (texts + 1,) int, optional
        For texts that are packed in one row (batch 1): the index of the first token of each text,
        then the number of tokens.  Results have the same bits as for each text alone.
    activation : str, optional
        "silu" or None.

    Returns
    -------
    y : (batch, tokens, channels) float
    final : (batch or texts, channels, width - 1) float
        The last inputs of each text; if it is short, they include inputs of ``initial``.

    Raises
    ------
    RangeError
        Offsets do not rise from 0 to the number of tokens.  On a GPU the host does not read them.
    ConfigError
        activation is unknown.
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import causal_conv, causal_conv_backward
    >>> x = np.arange(1, 6, dtype=np.float32).reshape(1, 5, 1)
    >>> weight = np.array([[1, 0, 10]], np.float32)  # the token, and the one two before it
    >>> y, final = causal_conv(x, weight, activation=None)
    >>> np.testing.assert_array_equal(y[0, :, 0], [10, 20, 31, 42, 53])
    >>> first, state = causal_conv(x[:, :3], weight, activation=None)
    >>> rest, final = causal_conv(x[:, 3:], weight, initial=state, activation=None)
    >>> np.testing.assert_array_equal(rest, y[:, 3:])
    >>> packed, _ = causal_conv(x, weight, offsets=np.array([0, 2, 5]), activation=None)
    >>> np.testing.assert_array_equal(packed[0, :, 0], [10, 20, 30, 40, 53])
    >>> dx, dweight, *_ = causal_conv_backward(y, None, x, weight, None, None, None)
    """
    texts = Texts("causal_conv", x, weight, initial, offsets)
    y = np.empty_like(texts.x)
    for part in texts.parts:
        own = texts.convolved(part, bias)
        y[part] = own if activation is None else own * sigmoid(own)
    return y.reshape(x.shape), texts.final()


@causal_conv.kernel(strided=("x",))
def _launch(
    x: Array,
    weight: Array,
    bias: Array | None,
    initial: Array | None,
    offsets: Array | None,
    activation: str | None,
) -> Any:
    width, channels = weight.shape[1], x.shape[2]
    if width > WIDEST:
        return no_kernel(f"{width} taps: the kernel supports up to {WIDEST}")
    texts = count_of(x.shape[0], offsets)
    y = empty(x.shape, x.dtype, like=x)
    final = empty((texts, channels, width - 1), x.dtype, like=x)
    # a thread keeps the last inputs of its channels in registers: fewer channels, if there are many
    view, pitch = _tokens(x)
    most = 8 if width <= 4 else 4 if width * x.itemsize < 28 else 2  # 2: or registers spill
    vector = min(most, lanes(channels | pitch, view, y))
    flags = initial is not None, activation is not None
    chosen = _constants(x.dtype, *_dtypes(weight, bias, offsets), width, vector, *flags)
    sizes, blocks = _sizes(x, texts, vector, pitch)
    kernel = load("causal_conv.cu", "causal_conv", x, chosen)
    kernel[blocks, THREADS](view, weight, bias, initial, offsets, y, final, sizes)
    return y, final


@causal_conv.gradient
def causal_conv_backward(
    dy: Array,
    dfinal: Array | None,
    x: Array,
    weight: Array,
    bias: Array | None,
    initial: Array | None,
    offsets: Array | None,
    *,
    activation: str | None = "silu",
) -> tuple[Array, Array, Array | None, Array | None]:
    """Return the gradients of x, weight, bias and initial; a dfinal of None counts as 0."""
    texts = Texts("causal_conv_backward", x, weight, initial, offsets)
    d, dweight = flat(dy), np.zeros_like(weight)
    d = d if activation is None else np.empty_like(d)
    for part in texts.parts:
        if activation is not None:
            y = texts.convolved(part, bias)
            slope = sigmoid(y)
            y *= 1 - slope
            y += 1
            y *= slope
            np.multiply(y, flat(dy)[part], out=d[part])
        for lag in range(texts.previous + 1):
            dweight[:, texts.previous - lag] += (d[part] * texts.inputs(lag, part)).sum(axis=0)
    dx, dinitial = texts.moved_back(d, dfinal)
    dbias = None if bias is None else d.sum(axis=0)
    return dx.reshape(x.shape), dweight, dbias, None if initial is None else dinitial


@causal_conv_backward.kernel(strided=("x",))
def _launch_backward(
    dy: Array,
    dfinal: Array | None,
    x: Array,
    weight: Array,
    bias: Array | None,
    initial: Array | None,
    offsets: Array | None,
    activation: str | None,
) -> Any:
    (channels, width), texts = weight.shape, count_of(x.shape[0], offsets)
    if width > WIDEST:
        return no_kernel(f"{width} taps: the kernel supports up to {WIDEST}")
    dx = empty(x.shape, x.dtype, like=x)
    dinitial = None if initial is None else empty(initial.shape, x.dtype, like=x)
    # half as many channels as in forward: sums of dweight take registers, too
    view, pitch = _tokens(x)
    vector = min(4 if width <= 4 else 2, lanes(channels | pitch, view, dy, dx))
    flags = initial is not None, activation is not None
    chosen = _constants(x.dtype, *_dtypes(weight, bias, offsets), width, vector, *flags)
    sizes, blocks = _sizes(x, texts, vector, pitch)
    taps = empty((1, sizes["tiles"], channels * width), FLOAT32, like=x)
    sums: Any = None if bias is None else empty((1, sizes["tiles"], channels), FLOAT32, like=x)
    kernel = load("causal_conv.cu", "causal_conv_backward", x, chosen)
    arrays = dy, dfinal, view, weight, bias, initial, offsets
    kernel[blocks, THREADS](*arrays, dx, dinitial, taps, sums, sizes)
    dweight = empty(weight.shape, weight.dtype, like=x)
    column_sums(taps, dweight, None)
    dbias = None if bias is None else empty(bias.shape, bias.dtype, like=x)
    if dbias is not None:
        column_sums(sums, dbias, None)
    return dx, dweight, dbias, dinitial


# ---- checks and constants -----------------------------------------------------------------------
def _check(call: str, x: Any, initial: Any, offsets: Any, activation: Any) -> None:
    """Raise unless each text has a state, and the activation is known."""
    if activation is not None and not (isinstance(activation, str) and activation == "silu"):
        raise ConfigError(f"{call}: activation={activation!r}; choose from 'silu', None")
    check_texts(call, x, initial, offsets)


causal_conv.require(_check)
causal_conv_backward.require(_check)


def _dtypes(weight: Array, bias: Array | None, offsets: Array | None) -> tuple[Any, Any, Any]:
    """Return the dtypes of weight, bias and offsets; None for an absent array."""
    return weight.dtype, getattr(bias, "dtype", None), getattr(offsets, "dtype", None)


@cache
def _constants(
    x: Any, weight: Any, bias: Any, offsets: Any, width: int, vector: int, initial: bool, silu: bool
) -> Constants:
    """Return the constants of causal_conv.cu; ``vector`` is the channels of a thread."""
    return Constants(
        T=x,
        W=weight,
        B=bias or weight,
        I=offsets or np.dtype("int32"),
        WIDTH=width,
        LANES=vector,
        THREADS=THREADS,
        BIAS=bias is not None,
        PACKED=offsets is not None,
        INITIAL=initial,
        SILU=silu,
    )


def _tokens(x: Array) -> tuple[Array, int]:
    """Return x for a kernel, and the values from a token to the next; x may be columns."""
    pitch = 0 if x.flags.c_contiguous else pitch_of(x)
    return (spanned(x), pitch) if pitch > 0 else (contiguous(x), x.shape[-1])


def _sizes(x: Array, texts: int, vector: int, pitch: int) -> tuple[dict[str, int], int]:
    """Return the struct Sizes of causal_conv.cu, and the number of blocks."""
    (batch, tokens, channels) = x.shape
    blocks = -(-channels // (vector * THREADS))
    tile = tile_of(batch * tokens, blocks, x)
    tiles = -(-batch * tokens // tile)
    sizes = {"tokens": batch * tokens, "each": tokens, "texts": texts, "channels": channels}
    sizes |= {"blocks": blocks, "tile": tile, "tiles": tiles, "pitch": pitch}
    return sizes, blocks * (tiles + texts)


class Texts:
    """The tokens of all texts end to end, for the NumPy definition: (all tokens, channels)."""

    def __init__(
        self, call: str, x: Array, weight: Array, initial: Array | None, offsets: Array | None
    ) -> None:
        # taps: (width, channels), each one contiguous
        self.x, self.taps, self.initial = flat(x), weight.T.copy(), initial
        self.previous = weight.shape[1] - 1
        offsets = offsets_of(call, x, offsets)
        self.start, self.length = offsets[:-1], offsets[1:] - offsets[:-1]
        token = np.arange(len(self.x), like=offsets)
        self.text = np.searchsorted(offsets[1:], token, side="right")
        self.place = token - offsets[self.text] if len(self.x) else token  # index in the text

    @property
    def parts(self) -> Iterator[slice]:
        """Yield the tokens that are processed together: on a CPU, as many as caches hold."""
        tokens, channels = self.x.shape
        host = type(self.x) is np.ndarray or is_planned(self.x)
        step = max(1, PART // max(1, channels * self.x.itemsize)) if host else max(1, tokens)
        for at in representative_steps(self.x, range(0, tokens, step)):
            yield slice(at, min(at + step, tokens))

    def inputs(self, lag: int, part: slice) -> Array:
        """Return the inputs of all channels, ``lag`` tokens before the tokens of a part."""
        first = part.start - lag
        if not lag or (first >= 0 and not self.has_early(lag, part)):
            return self.x[first : part.stop - lag]
        earlier = np.zeros_like(self.x[part])
        earlier[max(-first, 0) :] = self.x[max(first, 0) : max(part.stop - lag, 0)]
        initial, slot = self.initial, np.minimum(self.place - lag, -1) + self.previous
        text, slot = self.text[part], slot[part]
        return self.with_early(
            earlier, lag, part, lambda at: 0 if initial is None else initial[text[at], :, slot[at]]
        )

    def has_early(self, lag: int, part: slice) -> bool:
        """Return whether some token of a part has no token of its text ``lag`` tokens earlier."""
        return type(self.x) is not np.ndarray or bool((self.place[part] < lag).any())

    def with_early(
        self, array: Array, lag: int, part: slice, values: Callable[[Any], Any]
    ) -> Array:
        """Return an array with other ``values`` for the first ``lag`` tokens of each text."""
        early = self.place[part] < lag
        if type(array) is not np.ndarray:  # the host does not wait for the number of such tokens
            return np.where(early[:, None], values(slice(None)), array)
        at = np.flatnonzero(early)
        array[at] = values(at)
        return array

    def convolved(self, part: slice, bias: Array | None) -> Array:
        """Return the weighted sums for the tokens of a part, plus bias."""
        total = self.x[part] * self.taps[self.previous]
        for lag in range(1, self.previous + 1):
            total += self.inputs(lag, part) * self.taps[self.previous - lag]
        if bias is not None:
            total += bias
        return total

    def final(self) -> Array:
        """Return the last ``previous`` inputs of each text."""
        slot = np.arange(self.previous, like=self.start)
        # (texts, previous): index in the text of each of its last inputs; negative: before the text
        place = self.length[:, None] - self.previous + slot
        shape = (len(self.length), self.x.shape[1], self.previous)
        before = np.zeros(shape, self.x.dtype, like=self.x)
        if self.initial is not None:
            # an input before the text is in slot length + slot of initial, which is below previous
            kept = np.minimum(self.length[:, None] + slot, self.previous - 1)
            before = np.take_along_axis(self.initial, kept[:, None], axis=2)
        if not len(self.x):
            return before
        token = np.maximum(self.start[:, None] + place, 0)
        # (texts, channels, previous)
        own = self.x[np.minimum(token, len(self.x) - 1)].swapaxes(1, 2)
        return np.where((place >= 0)[:, None], own, before)

    def moved_back(self, d: Array, dfinal: Array | None) -> tuple[Array, Array]:
        """Return the gradients of x and initial, from the gradient d of the weighted sums."""
        taps, last = self.taps, self.previous
        dx = np.empty_like(d)
        shape = (len(self.length), d.shape[1], last)
        dinitial = np.zeros(shape, d.dtype, like=d)
        tokens = len(d)
        for part in self.parts:
            total = d[part] * taps[last]
            for lag in range(1, last + 1):
                later = slice(min(part.start + lag, tokens), min(part.stop + lag, tokens))
                moved = d[later] * taps[last - lag]
                if self.has_early(lag, later):
                    moved = self.with_early(moved, lag, later, lambda at: 0)
                total[: len(moved)] += moved
            dx[part] = total
        for lag in range(1, last + 1 if tokens else 0):
            for slot in range(last - lag, last):  # inputs before the text that its tokens read
                place = slot - last + lag
                token = np.minimum(self.start + place, tokens - 1)
                there = (place < self.length)[:, None]
                dinitial[:, :, slot] += np.where(there, d[token] * taps[last - lag], 0)
        if dfinal is None or not last:
            return dx, dinitial
        slots = np.arange(last, like=self.start)
        if tokens:
            left = self.length[self.text] - self.place  # tokens up to the end of the text
            own = dfinal[self.text, :, np.maximum(last - left, 0)]
            dx += np.where((left <= last)[:, None], own, 0)
        source = np.maximum(slots - self.length[:, None], 0)
        moved = np.take_along_axis(dfinal, source[:, None], axis=2)
        dinitial += np.where((slots >= self.length[:, None])[:, None], moved, 0)
        return dx, dinitial
