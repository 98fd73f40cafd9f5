"""An attention layer as one function: the caller passes the weights.

q = x q_weight^T + q_bias                         k and v likewise, each split into heads
y = attention(q, k, v) o_weight^T + o_bias        rope rotates q and k first, if there are tables
"""

from collections.abc import Callable, Sequence
from typing import Any

from ...core.arrays import common, framework_of
from ...core.call import is_integer
from ...core.dtypes import Array
from ...errors import ConfigError, GradientError, ShapeError, naming
from ...inference.kv_cache import KVCache
from ...inference.paged_kv_cache import PagedKVCache
from ...inference.paged_rows import PagedRows, rows_of
from ...ops.attention.attention import attention
from ...ops.linear.linear import linear
from ...ops.position.rope_qk import rope_qk
from ...training.tape import Tape
from ...training.variable import Var


@naming("attention_layer", "rope_qk", "attention", "attention_paged")
def attention_layer(
    x: Array,
    q_weight: Array,
    k_weight: Array,
    v_weight: Array,
    o_weight: Array,
    cos: Array | None = None,
    sin: Array | None = None,
    positions: Array | None = None,
    *,
    heads: int,
    q_bias: Array | None = None,
    k_bias: Array | None = None,
    v_bias: Array | None = None,
    o_bias: Array | None = None,
    causal: bool = True,
    interleaved: bool = False,
    cache: KVCache | PagedKVCache | None = None,
    layer: int = 0,
    sequences: Sequence[int] | None = None,
    **options: Any,
) -> Array:
    """Return the output of an attention layer: projections, rope, attention, output projection.

    Parameters
    ----------
    x : (batch, tokens, hidden) float
        Input of the layer.  Pass x and weights as Vars of a tape to compute their gradients.
    q_weight : (heads * dim, hidden) float
        Weight of the query projection: the rows of all heads, one head after another.
    k_weight, v_weight : (kv_heads * dim, hidden) float
        Weights of the key and value projections; heads must be a multiple of kv_heads.
    o_weight : (outputs, heads * dim) float
        Weight of the output projection.
    cos, sin : (length, half) dtype of x or float32, optional
        Tables from ``rope_tables``; None: q and k are not rotated.
    positions : (tokens,) or (batch, tokens) int, optional
        Positions of the tokens in the tables; None: 0, 1, 2 ..., counted on from the tokens in
        the cache.
    heads : int
        Number of query heads.
    q_bias, k_bias, v_bias, o_bias : (rows of the weight,) dtype of x or float32, optional
        Biases of the projections.
    causal : bool
        Whether queries ignore keys after their own position.
    interleaved : bool
        As in ``rope``.
    cache : KVCache or PagedKVCache, optional
        Keys and values of earlier tokens, to which keys and values of x are appended.  A cache
        has no gradient.
    layer : int
        Index of this layer in the cache.
    sequences : sequence of int, optional
        The sequence of a PagedKVCache that each row continues.
    **options
        Further options of ``attention``, or of ``attention_paged`` with a PagedKVCache.

    Returns
    -------
    y : (batch, tokens, outputs) float

    Raises
    ------
    ConfigError
        heads does not divide the rows of q_weight, cache is not a cache, or an option is invalid.
    GradientError
        A cache is passed, and x or a weight is on a tape.
    DeviceMemoryError
        The cache has too few free pages; the cache is unchanged.
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.

    Notes
    -----
    Vaswani and others, Attention Is All You Need, 2017.  Su and others, RoFormer, 2021.

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import attention_layer, attention_layer_backward, rope_tables
    >>> rng = np.random.default_rng(0)
    >>> x = rng.standard_normal((1, 6, 32), np.float32)
    >>> wq, wk, wv, wo = rng.standard_normal((4, 32, 32), np.float32) * 0.1
    >>> cos, sin = rope_tables(6, 8)  # 6 positions, dim 8
    >>> y = attention_layer(x, wq, wk, wv, wo, cos, sin, heads=4)
    >>> dx, *weights = attention_layer_backward(y, x, wq, wk, wv, wo, cos, sin, heads=4)
    >>> assert dx.shape == x.shape
    """
    weights = {"q_weight": q_weight, "k_weight": k_weight, "v_weight": v_weight}
    tables = {"cos": cos, "sin": sin} if _are_tables(cos, sin, positions) else {}
    _check_axes(x=x, **weights, o_weight=o_weight, **tables)
    rows, *kv_rows = (weight.shape[0] for weight in weights.values())
    dim = rows // heads if is_integer(heads, 1) else 0
    if not dim or rows % heads or kv_rows[0] % dim or kv_rows[0] != kv_rows[1]:
        shapes = ", ".join(f"{name} {tuple(weight.shape)}" for name, weight in weights.items())
        cure = "q_weight has heads * dim rows, k_weight and v_weight have kv_heads * dim"
        raise ConfigError(f"attention_layer(heads={heads!r}): {cure}; got {shapes}")
    kv_cache = rows_of("attention_layer", cache, sequences, x.shape[0])
    q, k, v = (  # (batch, tokens, heads or kv_heads, dim)
        PROJECTIONS[part](x, weight, bias).reshape(*x.shape[:2], weight.shape[0] // dim, dim)
        for part, weight, bias in zip(
            "qkv", weights.values(), (q_bias, k_bias, v_bias), strict=True
        )
    )
    if kv_cache is not None and Var in map(type, (q, k, v)):
        raise GradientError("attention_layer: a cache has no gradient; leave it out on a tape")
    if cos is not None and sin is not None:
        if positions is None:
            start, positions = _next(kv_cache, layer, x.shape[1])
            rows_of_tables = slice(start, start + x.shape[1]) if positions is None else slice(None)
            cos, sin = cos[rows_of_tables], sin[rows_of_tables]
        q, k = rope_qk(q, k, cos, sin, positions, interleaved=interleaved)
    if kv_cache is None:
        out = attention(q, k, v, causal=causal, **options)
    else:
        out = kv_cache.attend(layer, q, k, v, causal=causal, **options)
    return PROJECTIONS["o"](out.reshape(*x.shape[:2], rows), o_weight, o_bias)


def _projection(part: str) -> Callable[[Array, Array, Array | None], Array]:
    """Return ``linear`` for one weight; its errors show the layer's argument names."""

    @naming("attention_layer", "linear", weight=f"{part}_weight", bias=f"{part}_bias")
    def projection(x: Array, weight: Array, bias: Array | None) -> Array:
        return linear(x, weight, bias)

    return projection


PROJECTIONS = {part: _projection(part) for part in "qkvo"}


def _are_tables(cos: Any, sin: Any, positions: Any) -> bool:
    """Return whether rope tables are passed; raise if only some of the three arguments are."""
    if (cos is None) != (sin is None) or (cos is None and positions is not None):
        missing = "cos" if cos is None else "sin"
        cure = "pass cos and sin, as rope_tables returns them, or neither and no positions"
        raise ConfigError(f"attention_layer: {missing} is missing; {cure}")
    return cos is not None


def _next(kv_cache: KVCache | PagedRows | None, layer: int, new: int) -> tuple[int, Any]:
    """Return the table row of the first new token, and all positions if rows of x differ."""
    if isinstance(kv_cache, PagedRows):
        return kv_cache.places(new, layer)
    in_cache = kv_cache is not None and layer in range(len(kv_cache.filled))
    return kv_cache.filled[layer] if kv_cache is not None and in_cache else 0, None


def _check_axes(**arrays: Any) -> None:
    """Raise unless x has 3 axes and every other array or Var has 2."""
    values = [array.value if type(array) is Var else array for array in arrays.values()]
    common("attention_layer", [*arrays], values)
    for name, value in zip(arrays, values, strict=True):
        axes, shape = 3 if name == "x" else 2, tuple(getattr(value, "shape", ()))
        if len(shape) != axes:
            cure = "it must have (batch, tokens, hidden)" if name == "x" else "it must have 2 axes"
            problem = f"attention_layer: {name} is {shape}; {cure}"
            raise ShapeError(problem, expected=axes, actual=shape)


@naming("attention_layer_backward", "attention_layer", "Tape.watch", "Tape.gradients", seed="dy")
def attention_layer_backward(
    dy: Array,
    x: Array,
    q_weight: Array,
    k_weight: Array,
    v_weight: Array,
    o_weight: Array,
    cos: Array | None = None,
    sin: Array | None = None,
    positions: Array | None = None,
    *,
    heads: int,
    q_bias: Array | None = None,
    k_bias: Array | None = None,
    v_bias: Array | None = None,
    o_bias: Array | None = None,
    **options: Any,
) -> tuple[Array | None, ...]:
    """Return the gradients of x, q_weight, k_weight, v_weight and o_weight.

    If any bias is passed, the gradients of q_bias, k_bias, v_bias and o_bias follow, None for an
    absent bias.  The layer is computed again on a tape.  ``attention_layer`` documents the arrays
    and options.
    """
    arrays = {"x": x, "q_weight": q_weight, "k_weight": k_weight}
    arrays |= {"v_weight": v_weight, "o_weight": o_weight}
    biases = {"q_bias": q_bias, "k_bias": k_bias, "v_bias": v_bias, "o_bias": o_bias}
    present = {name: bias for name, bias in biases.items() if bias is not None}
    for name, array in (arrays | present).items():
        framework_of(array, f"attention_layer_backward: {name}")  # raises for other objects
    tape = Tape()
    watched: Any = [tape.watch(array) for array in arrays.values()]
    on_tape: Any = {name: tape.watch(bias) for name, bias in present.items()}
    layer: Any = attention_layer  # returns a Var for Vars; the annotation only has arrays
    y = layer(*watched, cos, sin, positions, heads=heads, **on_tape, **options)
    computed = iter(tape.gradients(y, [*watched, *on_tape.values()], dy))
    gradients = [next(computed) for _ in watched]
    if on_tape:
        gradients += [next(computed) if name in on_tape else None for name in biases]
    return tuple(gradients)
