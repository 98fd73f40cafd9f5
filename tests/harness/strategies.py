"""Hypothesis strategies: random calls of every op, derived from its signature.

    @given(calls(OPS["softmax"]))
    def test_it(call: Call) -> None: ...

The signature determines sizes of axes (from 0 on), dtypes, memory layouts and optional operands;
tables below have the values of options, and of the few arrays whose values are not arbitrary.
``broken`` draws calls with one wrong argument.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

import unsloth_cupy
from unsloth_cupy.bench.cases import Call
from unsloth_cupy.core.dtypes import FLOATS, allowed
from unsloth_cupy.core.op import Op
from unsloth_cupy.core.signature import Operand, parts, size_of
from unsloth_cupy.ops.common import dynamic_codes
from unsloth_cupy.ops.quantized._planes import WORD, marks_of
from unsloth_cupy.ops.quantized.nf4_dequantize import SCALES, double_absmax

PUBLIC = frozenset(dir(unsloth_cupy))
MOST = 5  # the largest size of an axis
TILE = 128  # tokens of one element of a block mask
Draw = Callable[[Any], Any]
# Sizes of axes and options that depend on them; "given" maps optional operands to whether to pass
# them.
Sizes = dict[str, Any]


# ---- sizes --------------------------------------------------------------------------------------
LENGTHS: Mapping[str, Sequence[int]] = {  # axes whose sizes are not arbitrary
    "dim": (2, 4, 8, 16),
    "value_dim": (1, 3, 8, 16),
    "page": (1, 2, 16),
    "signs": (2,),
    "columns": (1, 2, 7, 33, 65),  # of a row: more than a warp among them
    "inputs": (0, 1, 8, 31, 64, 130),
    "hidden": (0, 1, 2, 7, 64),
    "inner": (0, 1, 8, 9),
    "outputs": (0, 1, 3, 32),
    "vocab": (1, 2, 7, 64),
    "groups": (1,),
    "experts": (1, 2, 5, 33),
    "blocks": (1,),
    "scales": (1,),
}
SIZE = st.one_of(st.integers(1, MOST), st.integers(0, 1))


def _sizes(draw: Draw, op: Op) -> Sizes:
    """Draw a size for every axis of the inputs."""
    sizes: Sizes = {}
    for operand in op.contract.inputs:
        for axis in operand.axes:
            name = parts(axis)[0]
            if name.isdigit() or name in sizes:
                continue
            if axis.startswith("*"):
                sizes[name] = tuple(draw(st.lists(SIZE, max_size=3)))
            else:
                known = LENGTHS.get(name)
                sizes[name] = draw(st.sampled_from(known) if known else SIZE)
    for many, few in op.contract.multiples:
        sizes[many] = sizes[few] * draw(st.integers(1, 3))
    if "half" in sizes:  # of rotary tables
        sizes["length"] = sizes["tokens"] + draw(st.integers(0, 3))
        sizes["half"] = draw(st.integers(0, sizes["dim"] // 2))
    BETWEEN.get(op.__name__, lambda draw, sizes: None)(draw, sizes)
    if "count" in op.options and sizes.get("rows") == 0:
        sizes["count"] = 3  # without it, no rows have no mean
    return sizes


def _no_more_than(small: str, large: str) -> Callable[[Draw, Sizes], None]:
    def between(draw: Draw, sizes: Sizes) -> None:
        sizes[large] = sizes[small] + draw(st.integers(0, 3))

    return between


def _paged(draw: Draw, sizes: Sizes) -> None:
    sizes["pages"] = sizes["batch"] * sizes["max_pages"] + draw(st.integers(1, 2))
    sizes["keys"] = sizes["max_pages"] * sizes["page"]


def _rows_of_pages(draw: Draw, sizes: Sizes) -> None:
    rows = -(-sizes["tokens"] // sizes["page"]) + draw(st.integers(0, 2))
    sizes["row_pages"] = rows
    sizes["pages"] = sizes["batch"] * rows + draw(st.integers(0, 2))


def _pages_or_rows(draw: Draw, sizes: Sizes) -> None:
    paged, sizes["start"] = draw(st.booleans()), 0
    sizes["given"] = {"page_table": paged, "starts": paged}
    if paged:
        _rows_of_pages(draw, sizes)
    else:
        sizes["start"] = draw(st.integers(0, 3))
        sizes["page"] = sizes["start"] + sizes["tokens"] + draw(st.integers(0, 3))
        sizes["pages"] = sizes["batch"]


def _latents(draw: Draw, sizes: Sizes) -> None:
    paged, sizes["dim"] = draw(st.booleans()), max(1, sizes["dim"])
    sizes["given"] = {"page_table": paged}
    if paged:
        _paged(draw, sizes)
    else:
        sizes["pages"], sizes["max_pages"], sizes["keys"] = sizes["batch"], 1, sizes["page"]


def _groups(draw: Draw, sizes: Sizes, columns: int) -> None:
    """Draw the number of scales: one for each group of columns, or one for all."""
    sizes["group"] = draw(st.sampled_from((WORD, 2 * WORD, 128)))
    many = draw(st.booleans()) and columns
    sizes["groups"] = -(-columns // sizes["group"]) if many else 1


def _planes(draw: Draw, sizes: Sizes) -> None:
    # 300 and 520 columns have more than one bit of marks, which cover 256 columns each
    sizes["inputs"] = draw(st.sampled_from((*LENGTHS["inputs"], 300, 520)))
    sizes["bytes"] = -(-sizes["inputs"] // 32) * 4
    _groups(draw, sizes, sizes["inputs"])


def _part_of_planes(draw: Draw, sizes: Sizes) -> None:
    sizes["row"], sizes["column"] = draw(st.integers(0, 3)), draw(st.sampled_from((0, 0, 8, 5, 64)))
    columns = sizes["column"] + sizes["columns"] + draw(st.sampled_from((0, 32)))
    sizes["bytes"] = -(-columns // 32) * 4
    sizes["outputs"] = sizes["row"] + sizes["rows"] + draw(st.integers(0, 3))
    _groups(draw, sizes, columns)


def _blocks(draw: Draw, sizes: Sizes) -> None:
    """Draw the sizes of a weight in blocks of 4-bit codes, sometimes with absmax in 8 bits."""
    double, block = draw(st.booleans()), draw(st.sampled_from((32, 64, 256)))
    values = (sizes.get("top", 0) + sizes["outputs"]) * sizes["columns"]
    sizes["given"], sizes["block"] = {"absmax_codes": double}, block
    sizes["bytes"], sizes["blocks"] = -(-values // 2), -(-values // block)
    sizes["scales"] = sizes["blocks"]
    if double:
        sizes["scales"] = SCALES + -(-sizes["blocks"] // dynamic_codes.BLOCK)


def _whole_of_blocks(draw: Draw, sizes: Sizes) -> None:
    sizes["columns"] = sizes["inputs"]
    _blocks(draw, sizes)


def _part_of_blocks(draw: Draw, sizes: Sizes) -> None:
    left = draw(st.sampled_from((0, 0, 2, 64)))
    right = draw(st.sampled_from((0, 0, 1, 62)))
    sizes["columns"] = columns = left + sizes["inputs"] + right
    sizes["top"] = draw(st.integers(0, 2))
    sizes["start"] = sizes["top"] * columns + left
    stack = columns == sizes["inputs"] and not sizes["top"] and draw(st.booleans())
    sizes["groups+1"] = 1 + draw(st.integers(1, 3))
    if stack:
        sizes["outputs"] *= sizes["groups+1"] - 1
    sizes["assignments"] = draw(st.integers(0, 5))
    _blocks(draw, sizes)
    sizes["given"]["offsets"] = stack


def _slots(draw: Draw, sizes: Sizes) -> None:
    sizes["slots"] = sizes["tokens"] + draw(st.integers(0, 3))


def _rows_or_pages(draw: Draw, sizes: Sizes) -> None:
    paged = draw(st.booleans())
    sizes["given"] = {"page_table": paged}
    if paged:
        _rows_of_pages(draw, sizes)
    else:
        sizes["page"], sizes["pages"] = sizes["tokens"] + draw(st.integers(0, 3)), sizes["batch"]


def _one_function(draw: Draw, sizes: Sizes) -> None:
    sizes["functions"] = 1  # the axis may be absent, and weights are as long
    sizes["rows"] = 2 * draw(st.integers(0, 2))  # whole groups


def _of_a_sampler(draw: Draw, sizes: Sizes) -> None:
    sizes["given"] = {"old": True}  # without it, log_probs are also a constant


def _pairs(draw: Draw, sizes: Sizes) -> None:
    sizes["pairs"] = draw(st.integers(0, 3))
    sizes["rows"] = 2 * sizes["pairs"]


def _groups_of_rows(draw: Draw, sizes: Sizes) -> None:
    if not sizes["experts"]:
        sizes["assignments"] = 0


def _halves(draw: Draw, sizes: Sizes) -> None:
    sizes["both"] = 2 * sizes["inner"]
    if draw(st.booleans()):  # no gate
        sizes |= {"both": sizes["inner"], "activation": "relu2"}


def _rows_of_a_layer(draw: Draw, sizes: Sizes) -> None:
    sizes["masked"] = sizes["rows"][draw(st.integers(0, len(sizes["rows"]))) :]


def _texts(draw: Draw, sizes: Sizes) -> None:
    packed = draw(st.booleans())
    sizes["given"], sizes["states"] = {"offsets": packed}, sizes["batch"]
    if packed:
        sizes["batch"], sizes["states"] = 1, sizes["texts"]
        sizes["tokens"] *= sizes["texts"] > 0


def _scales_of(axis: str) -> Callable[[Draw, Sizes], None]:
    """Return the function that gives each row of a weight a scale."""

    def scales(draw: Draw, sizes: Sizes) -> None:
        sizes["scales"], sizes["block"] = sizes[axis], 0

    return scales


def _texts_of_channels(draw: Draw, sizes: Sizes) -> None:
    _texts(draw, sizes)
    sizes["decays"] = sizes["dim"]


def _without_a_key(draw: Draw, sizes: Sizes) -> None:
    sizes["given"] = {"key": False}  # which is the seed, where there is dropout


def _weight_of_blocks(draw: Draw, sizes: Sizes) -> None:
    blocks = sizes["outputs"] * draw(st.integers(1, 2))
    sizes["inputs"] = sizes["columns"] = blocks * 64 // max(1, sizes["outputs"])
    sizes["whole"], sizes["lows"], sizes["start"] = sizes["outputs"], sizes["rank"], 0
    sizes["bytes"], sizes["scales"], sizes["block"] = blocks * 32, blocks, 64
    sizes["given"] = dict.fromkeys(("sizes", "offsets", "absmax_codes"), False)


def _third_layer(draw: Draw, sizes: Sizes) -> None:
    sizes["given"] = dict.fromkeys(("weight3", "a3", "b3"), draw(st.booleans()))


BETWEEN: Mapping[str, Callable[[Draw, Sizes], None]] = {
    "attention_paged_forward": _paged,
    "attention_paged_int8_forward": _paged,
    "latent_attention_forward": _latents,
    "kv_append_": _slots,
    "rope_append_": _rows_or_pages,
    "kv_append_paged_": _rows_of_pages,
    "kv_append_int8_": _pages_or_rows,
    "ternary_linear_forward": _planes,
    "ternary_dense_": _part_of_planes,
    "nf4_dequantize_": _part_of_blocks,
    "nf4_product_": _whole_of_blocks,
    "int8_dequantize_": _scales_of("rows"),
    "int8_few_rows_": _scales_of("outputs"),
    "advantages_forward": _one_function,
    "policy_forward": _of_a_sampler,
    "preference_forward": _pairs,
    "reward_forward": _pairs,
    "wpo_weights_forward": _pairs,
    "linear_top_k_divergence_forward": _no_more_than("few", "vocab"),
    "contrastive_forward": _no_more_than("rows", "candidates"),
    "grouped_linear": _groups_of_rows,
    "experts_mlp_forward": _halves,
    "lora_group": _third_layer,
    "lora_linear_forward": _without_a_key,
    **dict.fromkeys(("rounded_sum_", "nf4_rounded_sum_"), _weight_of_blocks),
    "balance_loss_forward": _rows_of_a_layer,
    "router_z_loss_forward": _rows_of_a_layer,
    "causal_conv": _texts,
    "gated_delta_rule": _texts_of_channels,
    "selective_scan": _texts,
    "ssd": _texts,
}


# ---- arrays -------------------------------------------------------------------------------------
def _offsets(tokens: str, most: str) -> Callable[..., Any]:
    def offsets_of(rng: Any, shape: Any, sizes: Sizes) -> Any:
        if shape[0] == 1:  # no sequence, and so no token
            sizes[tokens] = sizes[most] = 0
            return np.zeros(1, int)
        inner = rng.integers(0, sizes[tokens] + 1, shape[0] - 2)
        offsets = np.sort(np.concatenate([[0], inner, [sizes[tokens]]]))
        sizes[most] = int(np.diff(offsets).max()) + int(rng.integers(0, 3))
        return offsets

    return offsets_of


def _ends(of: str) -> Callable[..., Any]:
    def ends_of(rng: Any, shape: Any, sizes: Sizes) -> Any:
        inner = rng.integers(0, sizes[of] + 1, max(shape[0] - 2, 0))
        return np.sort(np.concatenate([[0], inner, [sizes[of]]]))[: shape[0]]

    return ends_of


def _unit(rng: Any, shape: Any, sizes: Sizes) -> Any:
    rows = rng.standard_normal(shape)
    return rows / np.sqrt(np.square(rows).sum(axis=-1, keepdims=True) + 1e-6)


def _pages(rng: Any, shape: Any, sizes: Sizes) -> Any:
    return rng.permutation(sizes["pages"])[: shape[0] * shape[1]].reshape(shape)


def _lengths(rng: Any, shape: Any, sizes: Sizes) -> Any:
    return rng.integers(0, sizes["max_pages"] * sizes["page"] + 1, shape)


def _starts(rng: Any, shape: Any, sizes: Sizes) -> Any:
    rows = sizes.get("row_pages")
    room = sizes["slots"] if "slots" in sizes else sizes["page"] * (rows or 1)
    return rng.integers(0, room - sizes["tokens"] + 1, shape)


def _codes(rng: Any, shape: Any, sizes: Sizes) -> Any:
    plus, minus = rng.integers(0, 256, (2, shape[0], shape[2]), np.uint8)
    plus[rng.random(len(plus)) < 0.3] = 0
    minus &= plus[:, ::-1]  # so that some rows are all zeros
    return np.stack([plus, minus & ~plus], 1)


def _absmax(rng: Any, shape: Any, sizes: Sizes) -> Any:
    if not sizes.get("given", {}).get("absmax_codes"):
        return rng.random(shape) + 0.5
    return double_absmax((rng.random(shape[0] - SCALES) + 0.5).astype(np.float32), 3.0)


def _negative(rng: Any, shape: tuple[int, ...], sizes: Sizes) -> Any:
    return -0.1 - rng.random(shape)


def _apart(rng: Any, shape: Any, sizes: Sizes) -> Any:
    """Logits of which no two are near: which are the largest is then no matter of rounding."""
    order = rng.random(shape).argsort(axis=-1) if shape[-1] else np.zeros(shape)
    return (order + 0.2 * rng.random(shape)) * (4 / max(shape[-1], 1)) - 2


def _positive(rng: Any, shape: Any, sizes: Sizes) -> Any:
    return rng.random(shape) + 0.5


RECURRENCES = "causal_conv", "gated_delta_rule", "selective_scan", "ssd"
VALUES: Mapping[str, Callable[..., Any]] = {  # by operand, or by op and operand
    "labels": lambda rng, shape, sizes: np.where(
        rng.random(shape) < 0.2, -100, rng.integers(0, max(sizes["vocab"], 1), shape)
    ),
    "q_offsets": _offsets("tokens", "max_queries"),
    "k_offsets": _offsets("key_tokens", "max_keys"),
    **dict.fromkeys(("grouped_linear.offsets", "nf4_dequantize_.offsets"), _ends("assignments")),
    **dict.fromkeys([f"{each}.offsets" for each in RECURRENCES], _ends("tokens")),
    **dict.fromkeys(("gated_delta_rule.q", "gated_delta_rule.k"), _unit),
    "decay": lambda rng, shape, sizes: -rng.random(shape),
    "gated_delta_rule.beta": lambda rng, shape, sizes: rng.random(shape),
    "route_forward.logits": _apart,
    # smaller than what is between any two scores, whose order is that of logits
    "route_forward.bias": lambda rng, shape, sizes: rng.random(shape) / (40 * max(1, *shape)) ** 2,
    "sort_by_expert_forward.experts": lambda rng, shape, sizes: rng.integers(0, 3, shape),
    "page_table": _pages,
    "lengths": _lengths,
    "starts": _starts,
    "positions": lambda rng, shape, sizes: rng.integers(0, max(sizes.get("length", 99), 1), shape),
    "key_lengths": lambda rng, shape, sizes: rng.integers(0, sizes["keys"] + 1, shape),
    "numbers": lambda rng, shape, sizes: rng.integers(-3, 2**31, shape),
    "query_start": lambda rng, shape, sizes: rng.integers(-3, 9, shape),
    "alibi": lambda rng, shape, sizes: rng.random(shape),
    "planes": _codes,
    "ternary_scores_forward.q": _codes,
    "ternary_scores_forward.k": _codes,
    "absmax": _absmax,
    **dict.fromkeys(("scales", "square", "norm", "class_weights"), _positive),
    **dict.fromkeys(("old", "sampler", "reference", "log_sum_squares"), _negative),
    "log_probs": _negative,
    "linear_top_k_divergence_forward.log_probs": lambda rng, shape, sizes: np.log(
        rng.uniform(0.1, 0.9, shape) / max(shape[-1], 1)
    ),
    "linear_top_k_divergence_forward.tokens": lambda rng, shape, sizes: rng.random(
        (*shape[:-1], sizes["vocab"])
    ).argsort(axis=-1)[..., : shape[-1]],
    **dict.fromkeys(("log.x", "divide.b", "power.x", "sum.x", "mean.x"), _positive),
    "absmax_codes": lambda rng, shape, sizes: rng.integers(0, 256, shape, np.uint8),
}
DERIVED: Mapping[str, Callable[[Any], Any]] = {  # operands that are computed from another one
    "marks": lambda arrays: marks_of(arrays["planes"]),
}


def _packed_in_c(array: Any) -> Any:
    return array


def _fortran(array: Any) -> Any:
    return np.asarray(array, order="F")


def _gaps(array: Any) -> Any:
    if not array.ndim:
        return array
    room = np.zeros((*array.shape[:-1], array.shape[-1] + 3), array.dtype)
    view = room[..., : array.shape[-1]]
    view[...] = array
    return view


def _reversed(array: Any) -> Any:
    return array[..., ::-1].copy()[..., ::-1] if array.ndim else array


def _off_alignment(array: Any) -> Any:
    room = np.empty(array.size + 1, array.dtype)
    view = room[1:].reshape(array.shape)
    view[...] = array
    return view


LAYOUTS = (_packed_in_c, _fortran, _gaps, _reversed, _off_alignment)


def _shape(draw: Draw, operand: Operand, sizes: Sizes) -> tuple[int, ...]:
    """Draw a shape that the operand may have: axes that may be absent or 1 sometimes are."""
    shape: list[int] = []
    leading = True
    for axis in operand.axes:
        operator = parts(axis)[1]
        size = size_of(axis, sizes)
        if operator == "?" and draw(st.booleans()):
            continue
        if operator == "|":
            choice = draw(st.sampled_from(("whole", "one", "absent")))
            if choice == "absent" and leading and not shape:
                continue
            size = 1 if choice == "one" else size
        leading = False
        shape.extend(size if isinstance(size, tuple) else [size])
    return tuple(shape)


def _array(draw: Draw, op: Op, operand: Operand, sizes: Sizes, dtype: Any, rng: Any) -> Any:
    shape = _shape(draw, operand, sizes)
    values = VALUES.get(f"{op.__name__}.{operand.name}", VALUES.get(operand.name))
    choices = allowed(operand.kind, dtype)
    chosen = choices[draw(st.integers(0, len(choices) - 1))]
    if "half" in operand.axes:  # cos and sin share a dtype
        chosen = sizes.setdefault("dtype of tables", chosen)
    if values is not None:
        array = values(rng, shape, sizes)
    elif operand.kind == "bool":
        array = rng.random(shape) < 0.7
    elif operand.kind in ("code", "byte"):
        array = rng.integers(-127 if operand.kind == "code" else 0, 127, shape)
    elif operand.kind == "int":
        array = rng.integers(0, max(sizes[operand.below or ""], 1), shape)
    else:
        array = rng.standard_normal(shape)
    array = np.asarray(array)
    if chosen in FLOATS:  # values that every float dtype can hold, up to one rounding
        array = array.astype(np.float16)
    array = draw(st.sampled_from(LAYOUTS))(array.astype(chosen))
    array.flags.writeable = False
    return array


# ---- options ------------------------------------------------------------------------------------
def _some(*values: Any) -> Callable[..., Any]:
    return lambda draw, sizes, arrays: draw(st.sampled_from(values))


def _window(draw: Draw, sizes: Sizes, arrays: Any) -> Any:
    side = st.none() | st.integers(0, 6)
    return draw(st.none() | st.tuples(side, side))


def _axis(draw: Draw, sizes: Sizes, arrays: Any) -> Any:
    axes = len(arrays["x"].shape)
    one = st.integers(-axes, axes - 1) if axes else st.none()
    many = st.lists(st.integers(0, axes - 1), unique=True) if axes else st.just([])
    return draw(st.none() | one | many.map(tuple))


def _order(draw: Draw, sizes: Sizes, arrays: Any) -> Any:
    axes = len(arrays["x"].shape)
    return draw(st.none() | st.permutations(range(axes)).map(tuple))


def _new_shape(draw: Draw, sizes: Sizes, arrays: Any) -> Any:
    shape = arrays["x"].shape
    return draw(st.sampled_from([shape, (1, *shape), (arrays["x"].size,), (*shape, 1)]))


def _broadcast(draw: Draw, sizes: Sizes, arrays: Any) -> Any:
    return (*draw(st.lists(SIZE, max_size=2)), *arrays["x"].shape)


def _key(draw: Draw, sizes: Sizes, arrays: Any) -> Any:
    if not arrays["x"].ndim:
        return draw(st.sampled_from([..., (), None]))
    every = [..., np.s_[::-1], np.s_[1:], np.s_[..., :2], None, np.s_[:, None], ()]
    return draw(st.sampled_from([*every, -1] if arrays["x"].shape[0] else every))


def _preference(draw: Draw, sizes: Sizes, arrays: Any) -> Any:
    alone = ("orpo",) * (arrays["reference"] is None)
    return draw(st.sampled_from(("sigmoid", "ipo", "simpo", "robust", "bco_pair", *alone)))


def _first(axis: str) -> Callable[..., Any]:
    return lambda draw, sizes, arrays: draw(st.integers(0, sizes[axis]))


def _most(axis: str) -> Callable[..., Any]:
    return lambda draw, sizes, arrays: draw(st.sampled_from([None, sizes[axis]]))


OPTIONS: Mapping[str, Callable[..., Any]] = {  # by option, or by op and option
    "eps": _some(1e-6, 1e-5, 1e-3),
    "offset": _some(0.0, 1.0),
    **dict.fromkeys(("scale", "scale2", "scale3"), _some(1.0, 0.3, -0.5)),
    "latent_attention_forward.scale": _some(1.0, 0.3),
    "latent_attention_forward.rank": lambda draw, sizes, arrays: draw(st.integers(1, sizes["dim"])),
    "softmax.axis": _some(-1),
    "temperature": _some(1.0, 0.7, 2.0),
    "softcap": _some(None, 0.5, 30.0),
    "linear_log_probs_forward.softcap": _some(
        None, 30.0
    ),  # of saturated logits none is the largest
    "window": _window,
    "dropout": _some(0.0, 0.1, 0.9),
    "seed": lambda draw, sizes, arrays: draw(st.integers(0, 2**63 - 1)),
    "smoothing": _some(0.0, 0.1),
    "z_loss": _some(0.0, 1e-3),
    "ignore": _some(-100),
    "max_bytes": _some(None, 1, 4096),
    "chunk": _some(None, 1, 2, 7),
    "betas": _some((0.9, 0.999), (0.0, 0.5)),
    "lr": _some(1e-3, 0.0),
    "weight_decay": _some(0.0, 0.01),
    "step": _some(1, 2, 1000),
    "exponent": _some(2.0, 3.0, 0.5, -1.0, 1.0, 0.0),
    "factor": _some(0.5, -2.0, 0.0),
    "rope_theta": _some(1e4, 1e6),
    "threshold": _some(None, 0.5, 6.0),
    "block": _some(64),
    "axis": _axis,
    "order": _order,
    "key": _key,
    "reshape.shape": _new_shape,
    "broadcast_to.shape": _broadcast,
    "columns.start": _first("columns"),
    "columns.stop": _first("columns"),
    "kv_append_.start": lambda draw, sizes, arrays: draw(
        st.integers(0, sizes["slots"] - sizes["tokens"])
    ),
    "sinks": _some(0),
    "k": lambda draw, sizes, arrays: draw(st.integers(1, arrays["logits"].shape[-1])),
    "scores": _some("softmax", "softmax_of_k", "sigmoid", "sqrt_softplus"),
    **dict.fromkeys(("groups", "top_groups", "limit", "experts_mlp_forward.alpha"), _some(None)),
    "bound": _some(0.5, 8.0),
    "activation": _some("swiglu", "geglu", "geglu_tanh"),
    "causal_conv.activation": _some("silu", None),
    **dict.fromkeys(("gated_delta_rule.chunk", "ssd.chunk"), _some(64, 1, 3)),
    "gated_delta_rule.precision": _some("highest"),  # the errors of "high" break the rule
    "dt_min": _some(0.0, 0.3),
    "dt_max": _some(None, 0.9),
    "sort_by_expert_forward.count": _some(3, 70),
    "max_queries": _most("max_queries"),
    "max_keys": _most("max_keys"),
    "wanted": _some(None),
    "kind": _some("kto"),
    "members": _some(1),
    "stored": _some("nf4", "fp4"),
    **dict.fromkeys(
        ("rounded_sum_.kind", "nf4_rounded_sum_.kind"), _some("nf4", "fp4", "q8_0", "q4_0")
    ),
    **dict.fromkeys(
        ("nf4_dequantize_.kind", "nf4_product_.kind", "nf4_quantize_forward.kind"),
        _some("nf4", "fp4"),
    ),
    "preference_forward.kind": _preference,
    "policy_forward.kind": _some("grpo", "dapo", "luspo", "sapo"),
    "advantages_forward.kind": _some("grpo", "gdpo", "rloo"),
    "advantages_forward.scale": _some("group", "batch", "none"),
    "advantages_forward.group": _some(2),
    "sampler_ratio_forward.kind": _some("sequence_mask", "token_truncate"),
    "contrastive_forward.scale": _some(1.0, 20.0),
    "divergence_forward.kind": _some("jsd", "tvd", "cosine"),
    "linear_divergence_forward.kind": _some("jsd", "tvd", "cosine"),
    **dict.fromkeys(("divergence_forward.beta", "linear_divergence_forward.beta"), _some(0.0, 0.4)),
    "teacher_scale": _some(1.0, 0.3),
    "teacher_softcap": _some(None, 30.0),
    "divergence": _some("reverse_kl", "forward_kl", "js", "alpha"),
    "level": _some("token", "sequence"),
    "weighted_kl": _some(True, False),
    "count": _some(None, 3.0),
    **dict.fromkeys(("beta", "alpha", "gamma", "tau", "low", "high"), _some(0.3)),
    **dict.fromkeys(("tau_above", "tau_below", "power_above", "decay_above"), _some(1.5)),
    **dict.fromkeys(("power_below", "decay_below"), _some(1.5)),
    **dict.fromkeys(("ld_alpha", "share", "shift", "center"), _some(0.0, 0.7)),
    **dict.fromkeys(("cap", "most"), _some(None, 1.3)),
    "least": _some(None, 0.7),
}
FOLLOW = {
    "activation",
    "block",
    "column",
    "columns",
    "count",
    "group",
    "row",
    "start",
}  # options that sizes determine


def _options(draw: Draw, op: Op, sizes: Sizes, arrays: Mapping[str, Any]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    parameters = inspect.signature(op.definition).parameters
    for name in sorted(op.options):
        value = OPTIONS.get(f"{op.__name__}.{name}", OPTIONS.get(name))
        passed = parameters[name].default is inspect.Parameter.empty or draw(st.booleans())
        if name in FOLLOW & sizes.keys():
            options[name] = sizes[name]
        elif isinstance(parameters[name].default, bool):
            options[name] = draw(st.booleans())
        elif passed:
            assert value is not None, f"{op.__name__}: add a line for {name} to OPTIONS"
            options[name] = value(draw, sizes, arrays)
    if options.get("dropout"):
        options["seed"] = OPTIONS["seed"](draw, sizes, arrays)
    return options


@st.composite
def calls(draw: Draw, op: Op, dtypes: Sequence[Any] = FLOATS) -> Call:
    """Draw a valid call with read-only arrays."""
    dtype = draw(st.sampled_from(dtypes))
    sizes = _sizes(draw, op)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    arrays: dict[str, Any] = dict.fromkeys(op.names)
    inputs = sorted(op.contract.inputs, key=lambda o: not o.name.endswith("_offsets"))
    for operand in inputs:
        passed = sizes.get("given", {}).get(operand.name)
        if operand.optional and not (draw(st.booleans()) if passed is None else passed):
            continue
        if operand.name in DERIVED:
            arrays[operand.name] = DERIVED[operand.name](arrays)
        else:
            arrays[operand.name] = _array(draw, op, operand, sizes, dtype, rng)
    return Call(op, arrays, _options(draw, op, sizes, arrays))


# ---- wrong calls --------------------------------------------------------------------------------
STRANGE_DTYPES = ("complex64", "int16", "uint32", "bool", "float64", "float16", ">f4", "U3", "O")
STRANGE_OPTIONS = (
    *(-1, 0, 3, 2**40, -0.5, 1.5, float("nan"), float("inf"), True, None, "x", (), (1, 2), [3]),
)


@st.composite
def broken(draw: Draw, op: Op) -> Call:
    """Draw a call with one array or one option replaced, usually by an invalid one."""
    call = draw(calls(op))
    passed = [name for name, array in call.arrays.items() if array is not None]
    # only the library calls ops that are not public, with options that it has checked
    options = sorted(op.options) if op.__name__ in PUBLIC else []
    at = draw(st.sampled_from([*passed, *options]))
    if at in options:
        value = draw(st.sampled_from(STRANGE_OPTIONS))
        return call._replace(options=call.options | {at: value})
    array = call.arrays[at]
    wrong = draw(
        st.one_of(
            st.sampled_from(STRANGE_DTYPES).map(lambda name: _of(array, name)),
            st.sampled_from([array[None], array[..., None], array.ravel()]),
            st.sampled_from([np.zeros((*array.shape, 2), array.dtype), np.array(1, array.dtype)]),
            st.sampled_from([_longer(array, axis) for axis in range(array.ndim)] or [None]),
            st.sampled_from([None, 1, 1.5, "x", [1.0, 2.0], object()]),
            st.sampled_from([_filled(array, 2**31 - 1), _filled(array, -1), _filled(array, 99)]),
        )
    )
    return call._replace(arrays=call.arrays | {at: wrong})


def _of(array: Any, name: str) -> Any:
    with np.errstate(all="ignore"):
        return array.astype(np.float32).astype(name)


def _filled(array: Any, value: int) -> Any:
    """Return an array of integers filled with this value; other arrays as they are."""
    return np.full_like(array, value) if array.dtype.kind == "i" and array.itemsize > 1 else array


def _longer(array: Any, axis: int) -> Any:
    shape = [n + (i == axis) for i, n in enumerate(array.shape)]
    return np.ones(shape, array.dtype)
