"""An attention layer as one function, for those who bring their own weights.

q, k, v = x q_weight^T, x k_weight^T, x v_weight^T        by heads; rope turns q and k
y = attention(q, k, v) o_weight^T
"""

from typing import Any

from .._arrays import common
from .._call import is_integer
from .._typing import Array
from ..errors import ConfigError, GradientError, ShapeError
from ..kv_cache import KVCache
from ..tape import Tape
from ..variable import Var
from .attention import attention
from .linear import linear
from .rope_qk import rope_qk


def attention_layer(
    x: Array,
    q_weight: Array,
    k_weight: Array,
    v_weight: Array,
    o_weight: Array,
    cos: Array,
    sin: Array,
    positions: Array | None = None,
    *,
    heads: int,
    causal: bool = True,
    interleaved: bool = False,
    cache: KVCache | None = None,
    layer: int = 0,
    **options: Any,
) -> Array:
    """Return attention between projections: a layer of a transformer without its norm.

    Parameters
    ----------
    x : (batch, tokens, hidden) float
        What the layer reads; like the weights, a Var of a tape where gradients are wanted.
    q_weight : (heads * dim, hidden) float
        Its rows are the heads, one after another, as checkpoints store them.
    k_weight, v_weight : (kv_heads * dim, hidden) float
        kv_heads divides heads.
    o_weight : (outputs, heads * dim) float
        Of the output projection.
    cos, sin : (length, half) dtype of x or float32
        As ``rope_tables`` returns them.
    positions : (tokens,) or (batch, tokens) int, optional
        Of the tokens; where absent those that follow the cache's, or 0, 1, 2 ...
    heads : int
        Query heads.
    causal : bool
        A query sees no key after its own position.
    interleaved : bool
        As in ``rope``.
    cache : KVCache, optional
        Keys and values of earlier tokens, to which these are added; it takes no part in gradients.
    layer : int
        Of the cache.
    **options
        The other options of ``attention``.

    Returns
    -------
    y : (batch, tokens, outputs) float

    Raises
    ------
    ConfigError
        heads does not divide the rows of q_weight, cache is no KVCache, or an option makes no
        sense.
    GradientError
        There is a cache, and x or a weight is on a tape.
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.

    Notes
    -----
    Vaswani and others, Attention Is All You Need, 2017.  Su and others, RoFormer, 2021.
    """
    weights = {"q_weight": q_weight, "k_weight": k_weight, "v_weight": v_weight}
    _check_axes(x=x, **weights, o_weight=o_weight, cos=cos, sin=sin)
    rows, *kv_rows = (weight.shape[0] for weight in weights.values())
    dim = rows // heads if is_integer(heads, 1) else 0
    if not dim or rows % heads or kv_rows[0] % dim or kv_rows[0] != kv_rows[1]:
        given = ", ".join(f"{name} {tuple(weight.shape)}" for name, weight in weights.items())
        cure = "q_weight has heads * dim rows, k_weight and v_weight have kv_heads * dim"
        raise ConfigError(f"attention_layer(heads={heads!r}): {cure}; got {given}")
    any_cache: Any = cache  # a caller's mistake is for run time
    if not isinstance(any_cache, KVCache | None):
        cure = "pass a KVCache; attention_paged reads a cache in pages"
        raise ConfigError(f"attention_layer: cache is a {type(cache).__name__}; {cure}")
    q, k, v = (
        linear(x, weight).reshape(*x.shape[:2], weight.shape[0] // dim, dim)
        for weight in weights.values()
    )
    if positions is None:
        start = 0 if cache is None or layer not in range(len(cache.filled)) else cache.filled[layer]
        cos, sin = (table[start : start + x.shape[1]] for table in (cos, sin))
    q, k = rope_qk(q, k, cos, sin, positions, interleaved=interleaved)
    if cache is not None:
        if Var in map(type, (k, v)):
            raise GradientError("attention_layer: a cache has no gradient; leave it out on a tape")
        k, v = cache.append(layer, k, v)
        seen, mask = cache.mask(layer, x.shape[1]), options.get("mask")
        options["mask"] = seen if mask is None else mask if seen is None else mask & seen
    out = attention(q, k, v, causal=causal, **options)
    return linear(out.reshape(*x.shape[:2], rows), o_weight)


def _check_axes(**arrays: Any) -> None:
    """Raise unless these are arrays, or Vars, of as many axes as are looked at here."""
    values = [array.value if type(array) is Var else array for array in arrays.values()]
    common("attention_layer", [*arrays], values)
    for name, value in zip(arrays, values, strict=True):
        axes, shape = 3 if name == "x" else 2, tuple(getattr(value, "shape", ()))
        if len(shape) != axes:
            cure = "it must have (batch, tokens, hidden)" if name == "x" else "it must have 2 axes"
            raise ShapeError(f"attention_layer: {name} is {shape}; {cure}")


def attention_layer_backward(
    dy: Array,
    x: Array,
    q_weight: Array,
    k_weight: Array,
    v_weight: Array,
    o_weight: Array,
    cos: Array,
    sin: Array,
    positions: Array | None = None,
    *,
    heads: int,
    **options: Any,
) -> tuple[Array, Array, Array, Array, Array]:
    """Return the gradients of x, q_weight, k_weight, v_weight and o_weight.

    The layer is computed again, on a tape; ``attention_layer`` documents the arrays and options.
    """
    tape = Tape()
    watched: Any = [tape.watch(array) for array in (x, q_weight, k_weight, v_weight, o_weight)]
    layer: Any = attention_layer  # of Vars it makes a Var
    y = layer(*watched, cos, sin, positions, heads=heads, **options)
    dx, dq_weight, dk_weight, dv_weight, do_weight = tape.gradients(y, watched, dy)
    return dx, dq_weight, dk_weight, dv_weight, do_weight
