"""Creates calls of ops with random arrays, for ``check`` and ``bench``.

Shapes and dtypes come from the signature of an op.  Two tables add what a signature does not
define: the size of every axis, and valid values for arrays such as offsets and indices.
"""

import difflib
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..core.dtypes import DIFFERENTIABLE, FLOAT32, allowed
from ..core.op import OPS, Op
from ..core.signature import Operand, shape_of
from ..errors import ConfigError

SEQUENCES, PAGE = 2, 16  # sequences packed into a row; tokens per page of a cache


class Scale(NamedTuple):
    """The sizes of the arrays of a call; ``asv_benchmarks`` uses the defaults.

    Without ``queries`` there is one for each of the ``tokens``, and without ``outputs`` a matrix
    has as many rows as columns, ``hidden``.  ``batch`` counts the rows of a cache.
    """

    tokens: int = 1024
    hidden: int = 1024
    inner: int = 2816
    vocab: int = 8192
    heads: int = 8
    kv_heads: int = 2
    dim: int = 64
    experts: int = 8
    k: int = 2  # experts of a token
    batch: int = 1
    queries: int | None = None
    outputs: int | None = None
    few: int = 4  # rows of a product that reads codes


def forward_ops() -> list[str]:
    """Return the names of all forward ops of the library."""
    ours = {name: op for name, op in OPS.items() if op.__module__.startswith("unsloth_cupy.")}
    return sorted(ours.keys() - {op.backward.__name__ for op in ours.values() if op.backward})


# Public functions that call several ops; the ops are checked and timed instead.
COMPOSED = {
    "attention_layer": ["linear", "rope_qk", "attention_forward"],
    "cast": ["cast_to_bfloat16", "cast_to_float16", "cast_to_float32"],
    "int8_weight": ["int8_quantize_forward"],
    "lora_linears": ["lora_down", "lora_up", "lora_group"],
    "nf4_linear": ["linear"],
}
NOTHING = {
    "rope_tables": "it has no array argument, and a model calls it once",
    "ternary_quantize": "it reads values on the host, and a model calls it once",
}


def chosen(*names: str) -> list[Op[..., Any]]:
    """Return the distinct forward ops for names of public functions, ops or backward ops.

    Without names, return all forward ops.
    """
    public = {op.removesuffix("_forward").replace("_over_", "_"): [op] for op in forward_ops()}
    public |= COMPOSED
    known = public | {op: [op] for op in forward_ops()}
    known |= {b.__name__: [op] for op in forward_ops() if (b := OPS[op].backward) is not None}
    for name in names:
        if name in NOTHING:
            raise ConfigError(f"{name}: nothing to check or time: {NOTHING[name]}; leave it out")
        if name not in known:
            close = difflib.get_close_matches(name, known, cutoff=0.5)
            cure = "did you mean" if close else "choose from"
            raise ConfigError(
                f"there is no op {name!r}; {cure} {', '.join(close or sorted(public))}"
            )
    every = [known[name] for name in names] or [forward_ops()]
    return [OPS[name] for name in dict.fromkeys(itertools.chain(*every))]


def composed(names: Iterable[str]) -> list[str]:
    """Return a message for each name that consists of several ops."""
    parts = [name for name in dict.fromkeys(names) if name in COMPOSED]
    return [f"{name} consists of {', '.join(COMPOSED[name])}; results follow." for name in parts]


def sizes(scale: Scale) -> dict[str, Any]:
    """Return the size of each axis, and the values of required options."""
    tokens, part = scale.tokens, scale.tokens // SEQUENCES
    row_pages, outputs = tokens // PAGE, scale.outputs or scale.hidden
    return {
        **scale._asdict(),
        "rows": (tokens,),
        "axes": (tokens, scale.hidden),
        "columns": scale.hidden,
        "inputs": scale.hidden,
        **dict.fromkeys(("outputs", "outputs2", "outputs3"), outputs),
        **dict.fromkeys(("rank", "rank2", "rank3"), 16),
        "ranks": 32,  # the sum of the LoRA ranks of two adapters
        **{"one": 1, "state": 128, "d_state": 16, "bound": 1.0},
        "half": scale.dim // 2,
        "value_dim": scale.dim,
        "queries": scale.queries or tokens,
        "sequences": SEQUENCES,
        **{"states": 1, "channels": scale.hidden, "previous": 3, "value_heads": scale.heads},
        **dict.fromkeys(("keys", "key_tokens", "length", "slots", "candidates"), tokens),
        **dict.fromkeys(("max_queries", "max_keys"), part),
        **{"pages": scale.batch * row_pages, "max_pages": row_pages, "row_pages": row_pages},
        "page": PAGE,
        "axis": -1,  # a 16-bit sum over all axes would overflow
        "start": 0,
        "stop": scale.hidden // 2,
        "shape": (-1,),
        "matrices": (scale.heads,),
        **dict.fromkeys(("height", "width"), scale.dim),
        **{"whole": scale.hidden, "lows": 16},
        "signs": 2,
        **dict.fromkeys(("q_rows", "k_rows"), tokens),
        "groups": 1,
        "top_groups": 1,
        **{"count": scale.experts, "both": 2 * scale.inner},
        "assignments": scale.k * tokens,
        "assigned": (tokens, scale.k),
        "masked": (tokens,),
        "int8": True,  # the kernel for many rows exists only with int8 products
        "key": np.s_[1:],
        "exponent": 2.0,
        "factor": 0.5,
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-6,
        "weight_decay": 0.01,
        "step": 1,
    }


def meaning(scale: Scale, rng: np.random.Generator) -> dict[str, Callable[[], Any]]:
    """Return functions that create arrays whose values must be valid, by array name or OP.ARRAY."""
    tokens, batch, k, experts = scale.tokens, scale.batch, scale.k, scale.experts
    codes = scale.hidden * (scale.outputs or scale.hidden)  # of a quantized matrix
    angles = np.outer(np.arange(tokens), 1e4 ** (-2 * np.arange(scale.dim // 2) / scale.dim))
    offsets = np.linspace(0, tokens, SEQUENCES + 1).astype(int)
    return {
        "labels": lambda: rng.integers(0, scale.vocab, tokens),
        # distinct tokens per row
        **dict.fromkeys(
            (f"linear_top_k_divergence_{side}.tokens" for side in ("forward", "backward")),
            lambda: (
                np.arange(4) * (scale.vocab // 4) + rng.integers(0, scale.vocab // 4, (tokens, 4))
            ),
        ),
        **dict.fromkeys(
            (f"linear_top_k_divergence_{side}.log_probs" for side in ("forward", "backward")),
            lambda: np.log(rng.random((tokens, 4)) / 4),
        ),
        "q_offsets": lambda: offsets,
        "k_offsets": lambda: offsets,
        "offsets": lambda: np.linspace(0, k * tokens, experts + 1).astype(int),
        **dict.fromkeys(
            ("order", "places"),
            lambda: rng.permutation(k * tokens).reshape(tokens, k).astype(np.int32),
        ),
        "route_backward.experts": lambda: rng.integers(0, experts, (tokens, k), np.int32),
        "sort_by_expert_forward.experts": lambda: rng.integers(0, experts, (tokens, k)),
        # keys of length 1, so that corrections do not grow
        **dict.fromkeys(
            ("gated_delta_rule.q", "gated_delta_rule.k"),
            lambda: _unit(rng.standard_normal((1, tokens, scale.heads, scale.dim))),
        ),
        "decay": lambda: -rng.random((1, tokens, scale.heads)),
        "gated_delta_rule.beta": lambda: rng.random((1, tokens, scale.heads)),
        "positions": lambda: np.arange(tokens)[None],
        "page_table": lambda: rng.permutation(batch * (tokens // PAGE)).reshape(batch, -1),
        "lengths": lambda: np.full(batch, tokens),
        "starts": lambda: np.zeros(batch, int),
        "cos": lambda: np.cos(angles),  # a rotation: values do not grow when repeated in place
        "sin": lambda: np.sin(angles),
        "alibi": lambda: 2.0 ** -np.arange(1, scale.heads + 1),
        # each bit is set in exactly one of the two planes
        "ternary_linear_forward.planes": lambda: _planes(rng, scale.hidden, scale.hidden),
        "ternary_dense_.planes": lambda: _planes(rng, tokens, scale.hidden),
        "ternary_scores_forward.q": lambda: _planes(rng, tokens, scale.hidden),
        "ternary_scores_forward.k": lambda: _planes(rng, tokens, scale.hidden),
        "ternary_dense_.scale": lambda: rng.random((1, 1)),
        **dict.fromkeys(
            ("kv_append_int8_.keys", "kv_append_int8_.values"),
            lambda: np.zeros((1, tokens, scale.kv_heads, scale.dim), np.int8),
        ),
        **dict.fromkeys(
            ("rope_append_.keys", "rope_append_.values"),
            lambda: np.zeros((1, tokens, scale.kv_heads, scale.dim), np.float32),
        ),
        "kv_append_int8_.scales": lambda: rng.random((2, 1, tokens, scale.kv_heads)),
        **dict.fromkeys(
            ("nf4_dequantize_.packed", "nf4_product_.packed", "nf4_rounded_sum_.packed"),
            lambda: rng.integers(0, 256, codes // 2, np.uint8),
        ),
        **dict.fromkeys(
            ("nf4_dequantize_.absmax", "nf4_product_.absmax", "nf4_rounded_sum_.absmax"),
            lambda: rng.random(codes // 64) * scale.hidden**-0.5,
        ),
        "int8_dequantize_.absmax": lambda: rng.random(tokens),
        "int8_few_rows_.absmax": lambda: rng.random(scale.outputs or scale.hidden),
        **dict.fromkeys(
            ("rounded_sum_.sizes", "nf4_rounded_sum_.sizes"),
            lambda: rng.random(codes // 64) + 1,
        ),
        "square": lambda: rng.random((tokens, scale.hidden)),  # a mean of squares, at least 0
        # log-probabilities are at most 0; class weights are at least 0
        **dict.fromkeys(
            ("log_probs", "old", "sampler", "reference", "log_sum_squares"),
            lambda: -rng.random((tokens, tokens)),
        ),
        "class_weights": lambda: rng.random(scale.vocab),
        # positive: avoids logarithms of negative numbers, and cancellation
        **dict.fromkeys(
            ("log.x", "divide.b", "sum.x", "mean.x"),
            lambda: rng.random((tokens, scale.hidden)) + 0.5,
        ),
    }


def _unit(rows: Any) -> Any:
    """Return rows of length 1."""
    return rows / np.sqrt(np.square(rows).sum(axis=-1, keepdims=True))


def _planes(rng: np.random.Generator, rows: int, columns: int) -> Any:
    """Return the bit planes of a random ternary weight, (rows, 2, bytes)."""
    plus = rng.integers(0, 256, (rows, 1, -(-columns // 32) * 4), np.uint8)
    return np.concatenate([plus, ~plus], axis=1)


class Call(NamedTuple):
    """A call: an op, its arrays by name, and its options."""

    op: Op[..., Any]
    arrays: dict[str, Any]
    options: dict[str, Any]

    def run(self) -> dict[str, Any]:
        """Run the op; return its outputs by name, without None."""
        result = self()
        result = result if isinstance(result, tuple) else (result,)
        names = [operand.name for operand in self.op.contract.outputs]
        return {n: a for n, a in zip(names, result, strict=True) if a is not None}

    def __call__(self) -> Any:
        """Run the op like a call of a user."""
        return self.op.call([self.arrays[name] for name in self.op.names], dict(self.options))

    def launched(self) -> Any:
        """Return the result of the launch only; NotImplemented if there is no kernel."""
        op = self.op
        parameters = inspect.signature(op.definition).parameters  # a call passes every option
        defaults = {n: parameters[n].default for n in op.options}
        arrays = [self.arrays.get(name) for name in op.names]
        return op.launch(arrays, defaults | self.options) if op.launch else NotImplemented

    def launches(self) -> bool:
        """Run the launch only; return whether there is a kernel for these options and dtypes."""
        return self.launched() is not NotImplemented

    def mapped(self, place: Callable[[Any], Any]) -> "Call":
        """Return the call with ``place(array)`` for each array, such as a copy on a GPU."""
        moved = {name: None if a is None else place(a) for name, a in self.arrays.items()}
        return self._replace(arrays=moved)

    def cast(self, dtype: Any, *, constants: bool = False) -> "Call":
        """Return the call with its float arrays cast to a dtype, or to the nearest allowed dtype.

        With ``constants``, also cast arrays without a gradient, such as teacher logits.
        """
        kinds = {o.name: o.kind for o in self.op.contract.inputs}

        def converted(name: str, array: Any) -> Any:
            if constants and kinds[name] == "constant" and getattr(array, "dtype", None) == FLOAT32:
                return array.astype(dtype)
            if array is None or kinds[name] not in (*DIFFERENTIABLE, "table"):
                return array
            return array.astype(allowed(kinds[name], np.dtype(dtype))[0])

        return self._replace(arrays={n: converted(n, a) for n, a in self.arrays.items()})

    def backward(self, outputs: dict[str, Any], seeds: dict[str, Any]) -> "Call":
        """Return the call of the backward op, with its arguments by name."""
        op: Any = self.op.backward
        known = self.arrays | outputs | seeds
        options = {name: value for name, value in self.options.items() if name in op.options}
        return Call(op, {name: known.get(name) for name in op.names}, options)

    def seeds(self, outputs: dict[str, Any], *, every: bool, rng: Any = None) -> dict[str, Any]:
        """Return random upstream gradients; without ``every``, only the required ones.

        The generator ``rng`` of NumPy or CuPy determines the library of the arrays.
        """
        op: Any = self.op.backward
        rng = np.random.default_rng(1) if rng is None else rng
        accepted = {o.name for o in op.contract.inputs if every or not o.optional}
        return {
            "d" + name: rng.standard_normal(a.shape, np.float32).astype(a.dtype)
            for name, a in outputs.items()
            if "d" + name in accepted
        }


def draw(
    op: Op[..., Any],
    scale: Scale,
    *,
    options: Mapping[str, Any] = {},
    optional: bool = False,
    random: bool = True,
    numbers: Any = None,
) -> Call:
    """Return a call with random, writable float32 arrays on the host, and these options.

    ``optional`` also creates optional arrays, where the signature defines their values.  Without
    ``random``, arrays of arbitrary values are zero, which is faster.  ``numbers``, a generator of
    CuPy, creates those arrays on its GPU.
    """
    rng, known = np.random.default_rng(0), sizes(scale)
    if op.__name__ == "broadcast_to":
        known["shape"] = (2, *known["axes"])
    if op.__name__ == "latent_attention_forward":  # the only op whose scale has no default
        known |= {"scale": scale.dim**-0.5, "rank": max(1, scale.dim // 2)}
        known |= {"pages": scale.batch, "page": scale.tokens}  # without a page_table: rows of slots
    creators = meaning(scale, rng)
    arrays: dict[str, Any] = dict.fromkeys(op.names)
    for operand in op.contract.inputs:
        if operand.optional and not (optional and _drawable(operand)):
            continue
        create = creators.get(f"{op.__name__}.{operand.name}", creators.get(operand.name))
        if create is not None:
            array = np.array(create())
            arrays[operand.name] = array.astype(np.float32) if array.dtype.kind == "f" else array
        else:
            source = rng if numbers is None else numbers
            arrays[operand.name] = _array(operand, known, source if random else None)
    own = {name: known[name] for name in op.options & known.keys()}
    return Call(op, arrays, own | dict(options))


def _drawable(operand: Operand) -> bool:
    return operand.kind in (*DIFFERENTIABLE, "table", "bool") or operand.below is not None


def _array(operand: Operand, known: dict[str, Any], rng: Any) -> Any:
    shape = shape_of(operand, known) or ()
    if rng is None:
        kinds = {"bool": np.bool_, "code": np.int8, "int": np.int64}
        return np.zeros(shape, kinds.get(operand.kind, np.float32))
    if operand.kind == "bool":
        return rng.random(shape) < 0.7
    if operand.kind == "code":
        return rng.integers(-127, 128, shape, np.int8)
    if operand.kind == "int":
        return rng.integers(0, known[operand.below or ""], shape)
    array = rng.standard_normal(shape, np.float32)
    matrix = operand.name.endswith(("weight", "gate_up", "down"))
    if matrix and len(shape) in (2, 3):
        array *= shape[-1] ** -0.5  # as in a new layer: outputs have a size near 1
    return array
