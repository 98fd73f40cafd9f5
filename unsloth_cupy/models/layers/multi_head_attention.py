"""Multi-head attention as an object that holds the weights of an ``attention_layer``.

layer = MultiHeadAttention(512, 8, seed=0)
y = layer(x)                                    (batch, tokens, hidden) in and out
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...core import arrays
from ...core.call import check_options
from ...core.dtypes import FLOATS, Array, float_dtype
from ...errors import ConfigError, ShapeError, naming
from ...inference.kv_cache import KVCache
from ...inference.paged_kv_cache import PagedKVCache
from ...machine import check_bytes
from ...placement import array_on_device, to_device_of
from ...training.gradients import check_mapping
from .attention_layer import attention_layer

PARTS = ("q", "k", "v", "o")  # names of the projections
NAMES = {f"{part}_{kind}": f"{part}_proj.{kind}" for part in PARTS for kind in ("weight", "bias")}


@check_options
class MultiHeadAttention:
    """Self-attention between linear projections.

    Parameters
    ----------
    hidden : int
        Size of the input vector and the output vector of a token.
    heads : int
        Number of query heads.
    kv_heads : int, optional
        Number of key/value heads; heads must be a multiple of it.  None: heads.
    dim : int, optional
        Head dimension; None: hidden / heads.
    bias : bool
        Whether the projections have biases, initially 0.
    rope : tuple of two arrays, optional
        cos and sin of the positions, as ``rope_tables`` returns them; None: no rotation.
    dtype : dtype or its name
        float16, bfloat16, float32 or float64.
    seed : int
        Seed of the initial weights, which are normal with variance 1 / inputs.
    like : array, optional
        An array on the device on which the parameters are created; None: NumPy.

    Attributes
    ----------
    parameters : dict of str to array
        ``q_proj.weight``, ``q_proj.bias`` and so on, for q, k, v and o: (outputs, inputs) and
        (outputs,).  You may replace them or change them in place: every call reads them again.

    Raises
    ------
    ConfigError
        Sizes contradict each other, or another option is invalid.

    Notes
    -----
    With causal=False it computes what torch.nn.MultiheadAttention computes for one sequence;
    ``load`` reads the weights of that layer.  Vaswani and others, Attention Is All You Need, 2017.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        dim: int | None = None,
        bias: bool = True,
        rope: tuple[Array, Array] | None = None,
        dtype: Any = "float32",
        seed: int,
        like: Array | None = None,
    ) -> None:
        kv_heads = heads if kv_heads is None else kv_heads
        sizes = {"hidden": hidden, "heads": heads, "kv_heads": kv_heads}
        sizes |= {} if dim is None else {"dim": dim}
        for name, size in sizes.items():
            _require(size >= 1, name, size, "pass an integer, 1 or more")
        _require(heads % kv_heads == 0, "kv_heads", kv_heads, f"heads={heads} is not a multiple")
        cure = f"hidden={hidden} is not a multiple; pass dim, the size of a head"
        _require(dim is not None or hidden % heads == 0, "heads", heads, cure)
        _require(seed >= 0, "seed", seed, "pass an integer, 0 or more")
        pair = isinstance(rope, tuple | list) and len(rope) == 2
        _require(rope is None or pair, "rope", rope, "pass (cos, sin), or None")
        self.dtype = float_dtype("MultiHeadAttention", dtype)
        self.hidden, self.heads, self.kv_heads = hidden, heads, kv_heads
        self.dim = hidden // heads if dim is None else dim
        self.rope: tuple[Array, ...] = () if rope is None else tuple(rope)
        like_place, rng = array_on_device("MultiHeadAttention", like), np.random.default_rng(seed)
        rows, kv_rows = heads * self.dim, kv_heads * self.dim
        shapes = ((rows, hidden), (kv_rows, hidden), (kv_rows, hidden), (hidden, rows))
        itemsize = FLOATS[-1].itemsize  # weights are drawn on the host in float64, one at a time
        check_bytes(
            f"MultiHeadAttention({hidden}, {heads})", itemsize * max(map(math.prod, shapes))
        )
        self.parameters: dict[str, Array] = {}
        for part, (outputs, inputs) in zip(PARTS, shapes, strict=True):
            values = rng.standard_normal((outputs, inputs)) * inputs**-0.5
            initial = {"weight": values, **({"bias": np.zeros(outputs)} if bias else {})}
            for kind, array in initial.items():
                parameter = to_device_of(array.astype(self.dtype), like_place)
                self.parameters[f"{part}_proj.{kind}"] = parameter

    @naming("MultiHeadAttention", "attention_layer", **NAMES)
    def __call__(
        self,
        x: Array,
        positions: Array | None = None,
        *,
        parameters: Mapping[str, Any] | None = None,
        causal: bool = True,
        cache: KVCache | PagedKVCache | None = None,
        layer: int = 0,
        sequences: Sequence[int] | None = None,
        **options: Any,
    ) -> Array:
        """Return the attention of the tokens of x to each other and to the tokens of a cache.

        Parameters
        ----------
        x : (batch, tokens, hidden) float
            Tokens, in the dtype of the parameters; a Var of a tape to compute its gradient.
        positions : (tokens,) or (batch, tokens) int, optional
            As in ``attention_layer``.
        parameters : mapping of str to array, optional
            Replace the layer's own parameters of these names, for example by Vars of a tape to
            compute their gradients.
        causal, cache, layer, sequences
            As in ``attention_layer``.
        **options
            Further options of ``attention``.

        Returns
        -------
        y : (batch, tokens, hidden) float

        Raises
        ------
        ConfigError
            parameters has an unknown name, or an option is invalid.
        ShapeError, DTypeError, GradientError, DeviceMemoryError
            As in ``attention_layer``.
        """
        replaced = {} if parameters is None else dict(parameters)
        self._check_names("parameters", replaced.keys() - self.parameters.keys(), "has no")
        used: dict[str, Any] = {**self.parameters, **replaced}
        options |= {f"{part}_bias": used.get(f"{part}_proj.bias") for part in PARTS}
        options |= {"causal": causal, "cache": cache, "layer": layer, "sequences": sequences}
        cos, sin = self.rope or (None, None)
        q, k, v, o = (used[f"{part}_proj.weight"] for part in PARTS)
        return attention_layer(x, q, k, v, o, cos, sin, positions, heads=self.heads, **options)

    def load(self, weights: Mapping[str, Array], prefix: str = "") -> None:
        """Copy weights into the parameters, all of them or none.

        Parameters
        ----------
        weights : mapping of str to array
            Names as in ``parameters``, or as in torch.nn.MultiheadAttention, where
            ``in_proj_weight`` and ``in_proj_bias`` store q, k and v stacked.  Arrays must be of
            the library of the parameters; they are rounded to the dtype of the parameters.
        prefix : str
            Prefix of the names, such as ``model.layers.0.self_attn.``; names without it are
            ignored.

        Raises
        ------
        ConfigError
            A parameter is missing, or a name after the prefix is unknown.
        ShapeError, DTypeError, FrameworkError
            An array has another shape, dtype or library; the parameters are unchanged.
        """
        check_mapping("MultiHeadAttention.load", weights)
        _require(isinstance(prefix, str), "prefix", prefix, "pass the beginning of the names")
        names = {str(name): array for name, array in weights.items()}
        named = {n.removeprefix(prefix): a for n, a in names.items() if n.startswith(prefix)}
        for kind in ("weight", "bias"):
            rows = [len(self.parameters[f"{part}_proj.weight"]) for part in "qkv"]
            if (whole := named.pop(f"in_proj_{kind}", None)) is not None:
                if whole.shape[0] != sum(rows):
                    cure = f"q, k and v have {' + '.join(map(str, rows))}"
                    shape = tuple(whole.shape)
                    problem = f"load: in_proj_{kind} is {shape}; {cure} rows"
                    raise ShapeError(problem, expected=(sum(rows), *shape[1:]), actual=shape)
                parts = np.cumsum([0, *rows]).tolist()
                for part, start, stop in zip("qkv", parts, parts[1:], strict=False):
                    named[f"{part}_proj.{kind}"] = whole[start:stop]
            if f"out_proj.{kind}" in named:
                named[f"o_proj.{kind}"] = named.pop(f"out_proj.{kind}")
        self._check_names("load", self.parameters.keys() - named.keys(), "misses")
        self._check_names("load", named.keys() - self.parameters.keys(), "has no")
        for name, array in self.parameters.items():
            arrays.common("MultiHeadAttention.load", ("the layer", name), (array, named[name]))
            if tuple(named[name].shape) != array.shape:
                shape = tuple(named[name].shape)
                problem = f"load: {prefix}{name} is {shape}; it must be {array.shape}"
                raise ShapeError(problem, expected=array.shape, actual=shape)
            float_dtype(f"MultiHeadAttention.load: {name}", named[name].dtype)
        for name, array in self.parameters.items():
            array[...] = arrays.rounded(named[name], array.dtype)

    def _check_names(self, call: str, wrong: Any, what: str) -> None:
        """Raise a ConfigError if any parameter names are wrong."""
        if wrong:
            known = ", ".join(self.parameters)
            listed = ", ".join(sorted(map(str, wrong)))
            raise ConfigError(
                f"MultiHeadAttention: {call}: the layer {what} {listed}; it has {known}"
            )


def _require(valid: bool, name: str, value: Any, cure: str) -> None:
    """Raise a ConfigError unless an argument is valid."""
    if not valid:
        raise ConfigError(f"MultiHeadAttention({name}={value!r}): {cure}")
