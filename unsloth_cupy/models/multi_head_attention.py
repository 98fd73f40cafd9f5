"""Multi-head attention with weights of its own: ``attention_layer`` as an object.

layer = MultiHeadAttention(512, 8, seed=0)
y = layer(x)                                    (batch, tokens, hidden) in and out
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..core import arrays
from ..core.call import checked
from ..core.dtypes import FLOATS, Array, float_dtype
from ..errors import ConfigError, ShapeError
from ..inference.kv_cache import KVCache
from ..inference.paged_kv_cache import PagedKVCache
from ..machine import check_bytes
from ..placement import home_of, placed
from .attention_layer import attention_layer

PARTS = ("q", "k", "v", "o")  # of the projections


@checked
class MultiHeadAttention:
    """Attention of tokens over each other, between projections.

    Parameters
    ----------
    hidden : int
        Size of a token, in and out.
    heads : int
        Query heads.
    kv_heads : int, optional
        Heads of keys and values, which divide the heads; where absent as many as heads.
    dim : int, optional
        Size of a head; where absent hidden / heads.
    bias : bool
        Whether the projections have biases, which begin at 0.
    rope : tuple of two arrays, optional
        cos and sin of the positions, as ``rope_tables`` returns them; None: nothing is turned.
    dtype : dtype or its name
        float16, bfloat16, float32 or float64.
    seed : int
        Of the weights: normal, with variance 1 / inputs.
    like : array, optional
        The parameters live where this array lives; NumPy where absent.

    Attributes
    ----------
    parameters : dict of str to array
        ``q_proj.weight``, ``q_proj.bias`` and so on, for q, k, v and o: (outputs, inputs) and
        (outputs,).  Replace or change them in place: every call reads them anew.

    Raises
    ------
    ConfigError
        Sizes do not fit each other, or another option makes no sense.

    Notes
    -----
    With the causal option off it computes what torch.nn.MultiheadAttention does of one sequence,
    whose weights ``load`` takes.  Vaswani and others, Attention Is All You Need, 2017.
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
        place, rng = home_of("MultiHeadAttention", like), np.random.default_rng(seed)
        rows, kv_rows = heads * self.dim, kv_heads * self.dim
        shapes = ((rows, hidden), (kv_rows, hidden), (kv_rows, hidden), (hidden, rows))
        drawn_as = FLOATS[-1].itemsize  # on the host, one after the other
        check_bytes(
            f"MultiHeadAttention({hidden}, {heads})", drawn_as * max(map(math.prod, shapes))
        )
        self.parameters: dict[str, Array] = {}
        for part, (outputs, inputs) in zip(PARTS, shapes, strict=True):
            drawn = rng.standard_normal((outputs, inputs)) * inputs**-0.5
            made = {"weight": drawn, **({"bias": np.zeros(outputs)} if bias else {})}
            for kind, array in made.items():
                parameter = placed(array.astype(self.dtype), place)
                self.parameters[f"{part}_proj.{kind}"] = parameter

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
        """Return the attention of the tokens of x over each other and over those of a cache.

        Parameters
        ----------
        x : (batch, tokens, hidden) float
            Tokens, of the dtype of the parameters; a Var of a tape where its gradient is wanted.
        positions : (tokens,) or (batch, tokens) int, optional
            As in ``attention_layer``.
        parameters : mapping of str to array, optional
            What is computed with in place of the layer's own of these names: Vars of a tape where
            gradients are wanted.
        causal, cache, layer, sequences
            As in ``attention_layer``.
        **options
            The other options of ``attention``.

        Returns
        -------
        y : (batch, tokens, hidden) float

        Raises
        ------
        ConfigError
            parameters hold another name, or an option makes no sense.
        ShapeError, DTypeError, GradientError, DeviceMemoryError
            As in ``attention_layer``.
        """
        given = {} if parameters is None else dict(parameters)
        self._check_names("parameters", given.keys() - self.parameters.keys(), "has no")
        found: dict[str, Any] = {**self.parameters, **given}
        options |= {f"{part}_bias": found.get(f"{part}_proj.bias") for part in PARTS}
        options |= {"causal": causal, "cache": cache, "layer": layer, "sequences": sequences}
        cos, sin = self.rope or (None, None)
        q, k, v, o = (found[f"{part}_proj.weight"] for part in PARTS)
        return attention_layer(x, q, k, v, o, cos, sin, positions, heads=self.heads, **options)

    def load(self, weights: Mapping[str, Array], prefix: str = "") -> None:
        """Write weights into the parameters, all of them or none.

        Parameters
        ----------
        weights : mapping of str to array
            Of the names of ``parameters``; or of those of torch.nn.MultiheadAttention, whose
            ``in_proj_weight`` and ``in_proj_bias`` hold q, k and v one under the other.  Arrays of
            the library of the parameters; they are rounded to their dtype.
        prefix : str
            Before each name, such as ``model.layers.0.self_attn.``; other names are passed over.

        Raises
        ------
        ConfigError
            A name is missing, or there is a strange one behind the prefix.
        ShapeError, DTypeError, FrameworkError
            An array does not fit; the parameters are left as they were.
        """
        found = {n.removeprefix(prefix): a for n, a in weights.items() if n.startswith(prefix)}
        for kind in ("weight", "bias"):
            rows = [len(self.parameters[f"{part}_proj.weight"]) for part in "qkv"]
            if (whole := found.pop(f"in_proj_{kind}", None)) is not None:
                if whole.shape[0] != sum(rows):
                    cure = f"q, k and v have {' + '.join(map(str, rows))}"
                    shape = tuple(whole.shape)
                    problem = f"load: in_proj_{kind} is {shape}; {cure} rows"
                    raise ShapeError(problem, expected=(sum(rows), *shape[1:]), actual=shape)
                parts = np.cumsum([0, *rows]).tolist()
                for part, start, stop in zip("qkv", parts, parts[1:], strict=False):
                    found[f"{part}_proj.{kind}"] = whole[start:stop]
            if f"out_proj.{kind}" in found:
                found[f"o_proj.{kind}"] = found.pop(f"out_proj.{kind}")
        self._check_names("load", self.parameters.keys() - found.keys(), "misses")
        self._check_names("load", found.keys() - self.parameters.keys(), "has no")
        for name, array in self.parameters.items():
            arrays.common("MultiHeadAttention.load", ("the layer", name), (array, found[name]))
            if tuple(found[name].shape) != array.shape:
                shape = tuple(found[name].shape)
                problem = f"load: {prefix}{name} is {shape}; it must be {array.shape}"
                raise ShapeError(problem, expected=array.shape, actual=shape)
            float_dtype(f"MultiHeadAttention.load: {name}", found[name].dtype)
        for name, array in self.parameters.items():
            array[...] = arrays.rounded(found[name], array.dtype)

    def _check_names(self, call: str, wrong: Any, what: str) -> None:
        if wrong:
            known = ", ".join(self.parameters)
            listed = ", ".join(sorted(map(str, wrong)))
            raise ConfigError(
                f"MultiHeadAttention: {call}: the layer {what} {listed}; it has {known}"
            )


def _require(fine: bool, name: str, value: Any, cure: str) -> None:
    if not fine:
        raise ConfigError(f"MultiHeadAttention({name}={value!r}): {cure}")
