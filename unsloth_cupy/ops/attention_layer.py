"""An attention layer as one function, for those who bring their own weights.

q, k, v = x q_weight^T, x k_weight^T, x v_weight^T        by heads; rope turns q and k
y = attention(q, k, v) o_weight^T
"""

from typing import Any

from .._typing import Array
from ..errors import ConfigError, GradientError
from ..kv_cache import KVCache
from ..tape import Tape, Var
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
        heads does not divide the rows of q_weight, or an option makes no sense.
    GradientError
        There is a cache, and x or a weight is on a tape.
    ShapeError, DTypeError
        The arrays do not fit each other; the message shows the whole call.

    Notes
    -----
    Vaswani and others, Attention Is All You Need, 2017.  Su and others, RoFormer, 2021.
    """
    rows = q_weight.shape[0]
    if type(heads) is not int or heads < 1 or rows % heads or k_weight.shape[0] % (rows // heads):
        given = f"q_weight {tuple(q_weight.shape)}, k_weight {tuple(k_weight.shape)}"
        cure = "the rows of q_weight are heads * dim, those of k_weight kv_heads * dim"
        raise ConfigError(f"attention_layer(heads={heads!r}): {cure}; got {given}")
    projected = (linear(x, weight) for weight in (q_weight, k_weight, v_weight))
    shape = (*x.shape[:2], -1, rows // heads)
    q, k, v = (each.reshape(*shape) for each in projected)
    if cache is not None and positions is None:
        cos, sin = (table[cache.length : cache.length + x.shape[1]] for table in (cos, sin))
    elif positions is None:
        cos, sin = cos[: x.shape[1]], sin[: x.shape[1]]
    q, k = rope_qk(q, k, cos, sin, positions, interleaved=interleaved)
    if cache is not None:
        if Var in map(type, (k, v)):
            raise GradientError("attention_layer: a cache has no gradient; leave it out on a tape")
        k, v = cache.append(layer, k, v)
        seen, mask = cache.mask(layer, x.shape[1]), options.get("mask")
        options["mask"] = seen if mask is None else mask if seen is None else mask & seen
    out = attention(q, k, v, causal=causal, **options)
    return linear(out.reshape(*x.shape[:2], rows), o_weight)


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
