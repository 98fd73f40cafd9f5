"""Errors name the function that was called and its arguments, not what it calls itself.

Every public function is called with one wrong argument at a time: whatever it raises is an error of
the library, and its message begins with the function's name.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy import models, parallel
from unsloth_cupy.bench import cases
from unsloth_cupy.core.op import OPS
from unsloth_cupy.errors import GradientError, UnslothCupyError, naming

from ..models.peers import SIZES

SCALE = cases.Scale(tokens=32, hidden=64, inner=24, vocab=20, heads=4, kv_heads=2, dim=8)
X, W, BIAS = (np.ones(shape, np.float32) for shape in ((3, 64), (8, 64), (8,)))
HEADS, SQUARE = np.ones((1, 4, 2, 8), np.float32), np.ones((16, 16), np.float32)
LABELS, TOKENS = np.array([0, 1, 2]), np.array([[1, 2, 3]])
STACK = np.ones((2, 8, 64), np.float32)  # of two experts
ROUTES = uc.Routes(np.zeros((3, 1), int), np.ones((3, 1), np.float32))
LORA = {"x": X, "weight": W, "a": W[:2], "b": W[:, :2], "bias": BIAS, "magnitude": BIAS}
LORA |= {"scale": 1.0}
LAYER: dict[str, Any] = {"x": np.ones((1, 4, 16), np.float32), "heads": 2, "causal": True}
LAYER |= {f"{part}_weight": SQUARE for part in "qkvo"}
LAYER |= {f"{part}_bias": SQUARE[0] for part in "qkvo"}
LAYER |= {name: SQUARE[:4, :4] for name in ("cos", "sin")} | {"positions": np.arange(4)[None]}
COMM = parallel.SingleCommunicator()
RING: dict[str, Any] = dict.fromkeys("qkv", HEADS)
RING |= dict.fromkeys(("window", "scale", "softcap", "offsets")) | {"causal": False, "comm": COMM}
PARTS: dict[str, Any] = {"vocab": 8, "smoothing": 0.1, "softcap": None, "comm": COMM}
PARTS |= {"z_loss": 0.0, "ignore": -100, "labels": LABELS}
MODEL = models.create({**SIZES, "model_type": "llama"}, seed=0)
Calls = Mapping[str, tuple[Callable[..., Any], dict[str, Any]]]  # by the name in messages


def lora_linears(x: Any, **layer: Any) -> Any:
    return uc.lora_linears(x, [uc.LoraLayer(**layer)])


# Public functions whose arguments are not those of an op.
COMPOSED: Calls = {
    "lora_linear": (uc.lora_linear, LORA),
    "lora_linears": (lora_linears, LORA),
    "int8_linear": (uc.int8_linear, {"x": X, "weight": uc.int8_weight(W), "threshold": None}),
    "nf4_linear": (uc.nf4_linear, {"x": X, "weight": uc.nf4_quantize(W), "bias": BIAS}),
    "ternary_linear": (
        uc.ternary_linear,
        {"x": X, "weight": uc.ternary_quantize(W), "bias": BIAS, "activations": None},
    ),
    "ternary_scores": (uc.ternary_scores, dict.fromkeys("qk", uc.ternary_quantize(W))),
    "ternary_quantize": (uc.ternary_quantize, {"w": W}),
    "nf4_quantize": (uc.nf4_quantize, {"w": W, "block": 64, "double": False}),
    "int8_weight": (uc.int8_weight, {"w": W}),
    "mxfp4_quantize": (uc.mxfp4_quantize, {"w": W}),
    "int8_quantize": (uc.int8_quantize, {"x": W}),
    "experts_mlp": (
        uc.experts_mlp,
        {"x": X, "gate_up": STACK, "down": STACK[:, ::2].swapaxes(1, 2), "routes": ROUTES}
        | {"activation": "swiglu_clamped", "limit": 7.0, "alpha": None},
    ),
    "to_device": (uc.to_device, {"array": X, "device": "cpu"}),
    "to_host": (uc.to_host, {"array": X}),
    "cast": (uc.cast, {"x": X, "dtype": "float16"}),
    "attention_layer": (uc.attention_layer, LAYER),
    "attention_layer_backward": (uc.attention_layer_backward, LAYER | {"dy": LAYER["x"]}),
    "rope_tables": (uc.rope_tables, {"length": 4, "dim": 8, "base": 1e4, "like": X}),
    "clip_gradients": (uc.clip_gradients, {"gradients": {"w": X.copy()}, "max_norm": 1.0}),
    "measure_gradients": (uc.measure_gradients, {"gradients": {"w": X.copy()}, "max_norm": 1.0}),
    "compute_copies": (uc.compute_copies, {"parameters": {"w": X}, "dtype": "float16"}),
    "Autocast": (uc.Autocast, {"dtype": "float16"}),
    "MixedPrecisionConfig": (
        uc.MixedPrecisionConfig,
        {"compute_dtype": "float16", "master_dtype": "float32", "loss_scale": 1.0},
    ),
    "MultiHeadAttention": (uc.MultiHeadAttention(16, 2, seed=0), {"x": LAYER["x"], "causal": True}),
    "Transformer": (
        lambda tokens, labels, mask: [
            function(tokens, labels, mask=mask)
            for function in (MODEL.loss, MODEL.loss_and_gradients)
        ],
        {"tokens": TOKENS, "labels": TOKENS, "mask": TOKENS},
    ),
    "shard": (parallel.shard, {"x": X, "axis": 0, "comm": COMM}),
    "all_reduce": (parallel.all_reduce, {"x": X, "comm": COMM}),
    "all_gather": (parallel.all_gather, {"x": X, "axis": 0, "comm": COMM}),
    "reduce_scatter": (parallel.reduce_scatter, {"x": X, "axis": 0, "comm": COMM}),
    "all_to_all": (parallel.all_to_all, {"x": X, "divided": 0, "joined": 1, "comm": COMM}),
    **{
        name: (function, {"x": X, "weight": W, "bias": BIAS, "sequence_axis": 0, "comm": COMM})
        for name in ("column_parallel_linear", "row_parallel_linear")
        if (function := getattr(parallel, name))
    },
    "ring_attention": (parallel.ring_attention, RING | {"offsets": np.array([0, 1, 4])}),
    "ulysses_attention": (parallel.ulysses_attention, RING),
    "vocab_parallel_embedding": (
        parallel.vocab_parallel_embedding,
        {"tokens": LABELS, "weight": W, "vocab": 8, "sequence_axis": 0, "comm": COMM},
    ),
    "vocab_parallel_cross_entropy": (
        parallel.vocab_parallel_cross_entropy,
        PARTS | {"logits": X[:, :8]},
    ),
    "vocab_parallel_linear_cross_entropy": (
        parallel.vocab_parallel_linear_cross_entropy,
        PARTS | {"x": X, "weight": W, "max_bytes": None, "sequence_axis": 0},
    ),
    "vocab_parallel_linear_log_probs": (
        parallel.vocab_parallel_linear_log_probs,
        {"labels": LABELS, "vocab": 8, "comm": COMM, "x": X, "weight": W, "sequence_axis": 0},
    ),
}
WITHOUT_ARRAYS = {  # or they take functions
    *("check_errors", "checkpoint", "explain", "find_nan", "format_bytes", "memory_pool"),
    *("constant_schedule", "cosine_schedule", "linear_schedule", "plan_memory", "profile", "shape"),
    *("inverse_sqrt_schedule", "polynomial_schedule", "warmup_stable_decay_schedule"),
    *("estimate_attention_memory", "estimate_flash_attention_memory", "estimate_forward_memory"),
    "estimate_training_memory",
}


def op_of(name: str) -> Any:
    """Return the op whose arrays a public function takes, or None."""
    likely = name, f"{name}_forward", f"{name.removesuffix('_')}_over_"
    return next((OPS[each] for each in likely if each in OPS), None)


def call_of_op(name: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return a public function and valid arguments, drawn for the op whose arrays it takes."""
    function, op = getattr(uc, name), op_of(name)
    forward = next((each for each in OPS.values() if each.backward is op), None)
    call = cases.draw(forward or op, SCALE, optional=True)
    if forward is not None:
        outputs = call.run()
        call = call.backward(outputs, call.seeds(outputs, every=True))
    parameters = inspect.signature(function).parameters
    options = {n: p.default for n, p in parameters.items() if p.default is not p.empty}
    both = options | call.options | call.arrays
    return function, {n: value for n, value in both.items() if n in parameters}


FUNCTIONS = [
    name
    for name, function in vars(uc).items()
    if callable(function) and not inspect.isclass(function) and name not in WITHOUT_ARRAYS
]


def wrong(value: Any) -> Iterator[Any]:
    """Yield what an argument may not be in place of a value."""
    yield object()
    if isinstance(value, np.ndarray):
        yield from (1, value.astype(np.int16), value.astype(np.float16), value * 0 + 99)
        yield from (np.ones((3, 1, 5, 1, 2), value.dtype), value.repeat(2, axis=-1))
    else:
        yield from ("x", 1, -1, float("nan"), True)


@pytest.mark.parametrize("name", sorted({*FUNCTIONS, *COMPOSED}))
def test_errors_begin_with_the_name_of_the_call(name: str) -> None:
    function, arguments = COMPOSED[name] if name in COMPOSED else call_of_op(name)
    copies = {n: a.copy() if isinstance(a, np.ndarray) else a for n, a in arguments.items()}
    function(**copies)
    raised = 0
    for argument in (n for n in arguments if n != "comm"):
        for value in wrong(arguments[argument]):
            try:
                with np.errstate(all="ignore"):
                    function(**copies | {argument: value})
            except UnslothCupyError as error:
                raised += 1
                message = str(error)
                starts = tuple(name.removesuffix("_forward") + end for end in (":", "(", " "))
                assert message.startswith(starts), (argument, value, message)
    assert raised


def test_arguments_have_the_names_of_the_call() -> None:
    half, layer = BIAS.astype(np.float16), LAYER | {"k_bias": SQUARE[0].astype(np.int32)}
    for call, said in (
        (lambda: uc.lora_linear(**LORA | {"magnitude": half}), "^lora_linear: magnitude is float1"),
        (lambda: lora_linears(**LORA | {"magnitude": half}), "^lora_linears: magnitude is float16"),
        (lambda: uc.attention_layer(**layer), "(?s)^attention_layer: k_bias is int32; .* k_bias"),
        (
            lambda: uc.MultiHeadAttention(16, 2, seed=0)(LAYER["x"].astype(np.float16)),
            r"^MultiHeadAttention: q_proj\.weight is float32; it must be float16",
        ),
        (lambda: uc.Autocast("int8"), r"^Autocast\(dtype='int8'\)"),
    ):
        with pytest.raises(UnslothCupyError, match=said):
            call()


def test_a_table_of_arrays_stays_aligned() -> None:
    @naming("gate", "linear", bias="gate_bias")
    def raised(message: str) -> None:
        raise UnslothCupyError(message)

    table = "x(*rows, inputs)       = (2,)\n  bias?(outputs): param = (3,)"
    with pytest.raises(UnslothCupyError) as caught:
        raised(f"linear: bias is int16; pass bias.astype(...)\n  {table}")
    assert str(caught.value) == (
        "gate: gate_bias is int16; pass gate_bias.astype(...)\n"
        "  x(*rows, inputs)           = (2,)\n"
        "  gate_bias?(outputs): param = (3,)"
    )
    other = "linear_cross_entropy: bias is int16"  # of another function
    with pytest.raises(UnslothCupyError, match=f"^{other}$"):
        raised(other)


FROZEN = uc.nf4_quantize(W)
SLOPES = {
    "dy": np.ones((3, 8), np.float32),
    "dlow": None,
    "bias": None,
    "factor": None,
    "key": None,
    "numbers": None,
}
SLOPES |= {"x": X, "weight": FROZEN, "a": W[:2], "b": W[:, :2], "low": X[:, :2]}
GATED = {"dy": X, "x": X, "gate_weight": FROZEN, "up_weight": W, "down_weight": W.T}


@pytest.mark.parametrize("name", ["linear", "lora_linear", "lora_up", "swiglu_mlp"])
def test_a_frozen_weight_is_named_with_the_call(name: str) -> None:
    arrays, weight = (GATED, "gate_weight") if name == "swiglu_mlp" else (SLOPES, "weight")
    op = OPS[f"{name}_backward"]
    with pytest.raises(GradientError, match=f"^{name}_backward: {weight}: a quantized weight is"):
        op(**{operand: arrays[operand] for operand in op.names}, wanted={weight})
