"""The gated delta rule: stored numbers, the recurrence, texts packed and alone, kernels."""

import itertools
from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.core.dtypes import BFLOAT16, KERNEL_DTYPES
from unsloth_cupy.core.op import OPS
from unsloth_cupy.errors import ConfigError, RangeError, ShapeError

from ..conftest import FOLDER
from ..golden.golden import OpCase, op_cases
from ..harness.parity import EPS, Case, KernelParity, emulator
from ..machines.stand_in import gpu
from .golden_cases import agree, both_dtypes, cast
from .packed_texts import (
    assert_any_schedule,
    assert_bits_of_each_alone,
    assert_states_go_on,
    assert_texts_of_a_device_are_not_read,
)

# The public names, as other people's programs call them.
PUBLIC = (
    "gated_delta_rule(q, k, v, decay, beta, *, initial=None, offsets=None, chunk=64, scale=None, "
    "precision='highest')",
)

CASES = [*op_cases(FOLDER / "ops_next", "delta")]
NAMES = ("q", "k", "v", "decay", "beta")


def unit(array: np.ndarray) -> np.ndarray:
    """Return rows of length 1, as the keys of a model are."""
    return array / np.sqrt(np.square(array).sum(axis=-1, keepdims=True) + 1e-6)


def case(
    label: str,
    heads: int,
    groups: int,
    dim: int,
    value_dim: int,
    *lengths: int,
    batch: int = 0,
    strength: float = 0.1,
    channels: bool = False,
    **how: Any,
) -> Case:
    """Return a call on texts of these lengths; with ``batch``, on rows of one length."""
    rows, tokens, value_heads = batch or 1, sum(lengths), heads * groups
    of_keys, of_values = (rows, tokens, heads, dim), (rows, tokens, value_heads)
    of_decays = (*of_values, dim) if channels else of_values
    arrays: dict[str, Any] = {
        **dict.fromkeys(("q", "k"), lambda rng: unit(rng.standard_normal(of_keys))),
        "decay": lambda rng: -strength * np.abs(rng.standard_normal(of_decays)),
        "beta": lambda rng: rng.random(of_values),
    }
    if not batch:
        arrays["offsets"] = np.cumsum([0, *lengths], dtype=how.pop("kind", np.int64))
    sizes = {"batch": rows, "tokens": tokens, "heads": heads, "value_heads": value_heads}
    sizes |= {"dim": dim, "value_dim": value_dim, "states": batch or len(lengths)}
    return Case(label, arrays=arrays, **sizes, **how)


class TestGatedDeltaRule(KernelParity):
    op = "gated_delta_rule"
    sizes = tuple(
        {
            **{"batch": 1, "tokens": tokens, "heads": 2, "value_heads": 4, "states": 1, "texts": 1},
            **{"dim": dim, "value_dim": value_dim},
            **({"decays": dim} if channels else {}),
            **how,
        }
        for channels, tokens, dim, value_dim, how in (
            (False, 128, 64, 64, {}),
            (False, 128, 128, 128, {"precision": "high"}),
            (False, 128, 128, 128, {}),
            (True, 128, 128, 128, {}),
            *((channels, 1, 128, 128, {}) for channels in (False, True)),
            *((channels, 64, 9, 7, {}) for channels in (False, True)),
        )
    )
    options = ({"chunk": 64},)
    cases = (
        case("a batch", 1, 1, 16, 8, 5, batch=2),
        case("a head for two", 1, 2, 16, 16, 3, batch=1, given=["initial"]),
        case("odd sizes", 1, 1, 9, 7, 6, batch=1, given=["initial"], scale=0.3),
        case("two chunks", 1, 1, 8, 4, 70, batch=1, given=["initial"]),
        case("texts", 1, 1, 8, 8, 3, 0, 65, 1, 0, given=["initial"], kind=np.int32),
        case("texts without states", 1, 1, 8, 8, 64, 2),
        case("dim 64", 1, 1, 64, 40, 2, batch=1),
        case("dim 128", 1, 1, 128, 64, 2, batch=1, given=["initial"]),
        case("one token", 2, 2, 16, 40, 1, batch=2, given=["initial"]),
        case("one token of a new text", 1, 1, 12, 4, 1, batch=1),
        case("no tokens", 1, 1, 8, 4, 0, batch=2, given=["initial"]),
        case("empty texts", 1, 1, 8, 4, 0, 0, given=["initial"]),
        case("no values", 1, 2, 8, 0, 3, batch=1, given=["initial"]),
        case("no columns of keys", 1, 1, 0, 4, 3, batch=1),
        case("chunks of 16", 1, 1, 8, 4, 40, batch=1, chunk=16),
    )


class TestGatedDeltaRuleOfChannels(KernelParity):
    op = "gated_delta_rule"
    cases = tuple(
        case(*rest, channels=True, **{"given": ["initial"], **how})  # type: ignore[arg-type]
        for *rest, how in (
            ("a head for two", 1, 2, 16, 16, 3, {"batch": 2, "given": []}),
            ("odd sizes", 1, 1, 9, 7, 6, {"batch": 1, "scale": 0.3}),
            ("two chunks", 1, 1, 8, 4, 70, {"batch": 1}),
            ("texts", 1, 1, 8, 8, 3, 0, 65, 1, 0, {"kind": np.int32}),
            ("parts of channels", 1, 1, 40, 36, 34, {"batch": 1}),
            ("one token", 1, 2, 40, 36, 1, {"batch": 2}),
            ("no tokens", 1, 1, 8, 4, 0, {"batch": 2}),
            ("no columns of keys", 1, 1, 0, 4, 3, {"batch": 1, "given": []}),
            ("chunks of 16", 1, 1, 8, 4, 40, {"batch": 1, "chunk": 16}),
        )
    )


class TestGatedDeltaRuleOnTensorCores(KernelParity):
    """In 16 bits, keys of 64 or 128 columns and values of 64s have other kernels."""

    op = "gated_delta_rule"
    cases = (
        case("texts", 1, 2, 128, 64, 67, 0, 1, 2, given=["initial"], kind=np.int32),
        case("texts without states", 1, 1, 64, 64, 64, 2),
        case("a batch", 2, 1, 64, 128, 5, batch=2, given=["initial"], scale=0.3),
        case("strong decay", 1, 1, 128, 64, 130, batch=1, given=["initial"], strength=20.0),
    )
    test_gradient_matches_finite_differences = None  # the definition has the tests above
    test_rounds_once = None
    test_any_strides = None

    @pytest.mark.parametrize("dtype", KERNEL_DTYPES[:2], ids=str)
    def test_emulated_kernels(self, case: Case, dtype: Any) -> None:
        super().test_emulated_kernels(case, dtype)

    @pytest.mark.parametrize(
        ("dim", "value_dim", "dtype", "suffix"),
        [
            (128, 128, BFLOAT16, "_mma"),
            (64, 192, "float16", "_mma"),
            (128, 128, "float32", ""),
            (128, 40, BFLOAT16, ""),
            (72, 64, BFLOAT16, ""),
        ],
    )
    def test_who_has_them(self, dim: int, value_dim: int, dtype: Any, suffix: str) -> None:
        own = case("", 1, 2, dim, value_dim, 70)
        with gpu("80") as machine:
            call = own.draw(OPS[self.op], dtype)
            call = call.mapped(lambda a: a if a is None else machine.place(a))
            results = call.run()
            call.backward(results, {"dout": results["out"]}).run()
            names = [launch.kernel for launch in machine.launches]
        forward = [f"delta_chunks{suffix}", f"delta_states{suffix}"]
        gradients = [f"delta_{part}_gradients{suffix}" for part in ("state", "chunk")]
        assert names == [*forward, *forward, *gradients]

    @pytest.mark.slow
    @pytest.mark.parametrize("dim", [64, 128])
    @pytest.mark.parametrize("dtype", KERNEL_DTYPES[:2], ids=str)
    def test_precision(self, dtype: Any, dim: int) -> None:
        """With two parts a product is off by up to 2^-16 of its terms, and three follow each other.

        The sums of these terms are as large as results, and no product cancels.
        """
        errors = {}
        for precision in ("high", "highest"):
            own = case("", 1, 1, dim, 64, 70, given=["initial"], precision=precision)
            forward = own.draw(OPS[self.op], dtype)
            results = forward.run()
            for call in (forward, forward.backward(results, forward.seeds(results, every=True))):
                exact, plain = call.cast(np.float64).run(), call.run()
                with emulator(check=False):
                    kernel = call.run()
                for name, array in kernel.items():
                    size = np.abs(exact[name]).max()
                    error = np.abs(array.astype(np.float64) - exact[name]).max() / size
                    own_error = np.abs(plain[name].astype(np.float64) - exact[name]).max() / size
                    bound = 2 * own_error + 4 * EPS[array.dtype.name] + 3 * 2.0**-16
                    assert error <= bound, (precision, name)
                    errors[precision, name] = error
        assert errors["highest", "final"] < errors["high", "final"] / 8

    def test_float32_beside_16_bits(self) -> None:
        """Gradients of decays and shares of float32 are sums of products in two parts."""
        call = case("", 1, 2, 64, 64, 66).draw(OPS[self.op], BFLOAT16)
        names = "decay", "beta"
        call.arrays.update({n: call.arrays[n].astype(np.float32) for n in names})
        call = call.backward(results := call.run(), call.seeds(results, every=True))
        exact = call.cast(np.float64).run()
        with emulator():
            kernel = call.run()
        for name in ("ddecay", "dbeta"):
            assert kernel[name].dtype == np.float32
            size = np.abs(exact[name]).max()
            np.testing.assert_allclose(kernel[name], exact[name], rtol=0, atol=3e-5 * size)


class TestGatedDeltaRuleStrongDecay(KernelParity):
    op = "gated_delta_rule"
    cases = tuple(
        case(label, 1, 1, 8, 4, 66, batch=1, given=["initial"], strength=20.0, channels=channels)
        for label, channels in (("of tokens", False), ("of channels", True))
    )
    test_gradient_matches_finite_differences = None  # differences do not resolve slopes of e^-20


def taped(arrays: dict[str, Any], function: Any, expected: OpCase, known: Any) -> list[Any]:
    """Compare both results of a case; return the gradients of the arrays."""
    tape = uc.Tape()
    watched = {name: tape.watch(array) for name, array in arrays.items()}
    out, final = function(watched)
    agree(out.value, expected.outputs["y"])
    agree(final.value, expected.outputs["final_state"])
    loss = uc.sum(uc.multiply(out, known["cotangent_y"]))
    loss = loss + uc.sum(uc.multiply(final, known["cotangent_final_state"]))
    return tape.gradients(loss, [*watched.values()])


@both_dtypes
@pytest.mark.parametrize("chunk", [64, 16, 5, 1])
@pytest.mark.parametrize(
    "golden",
    [c for c in CASES if c.name != "decay" and not c.name.startswith("layer")],
    ids=lambda c: c.name,
)
def test_golden(golden: OpCase, chunk: int, dtype: Any) -> None:
    """As transformers computes them token by token, with chunks of any length."""
    known = cast(golden, dtype)
    theirs = {"q": "q", "k": "k", "v": "v", "decay": "g", "beta": "beta", "initial": "state"}
    arrays = {ours: known[name] for ours, name in theirs.items() if name in known}

    def run(watched: dict[str, Any]) -> Any:
        if golden.params["normalise_q_k"]:
            watched = watched | {name: normalised(watched[name]) for name in ("q", "k")}
        return uc.gated_delta_rule(**watched, offsets=known.get("offsets"), chunk=chunk)

    gradients = taped(arrays, run, golden, known)
    for name, gradient in zip(arrays, gradients, strict=True):
        agree(gradient, golden.grads[theirs[name]])


def normalised(x: Any) -> Any:
    """Return x / sqrt(sum(x**2) + 1e-6), as rms_norm computes it."""
    dim = x.shape[-1]
    weight = np.full(dim, dim**-0.5, x.dtype)
    return uc.rms_norm(x, weight, eps=1e-6 / dim)


def slices(*sizes: int) -> list[slice]:
    """Return parts of these sizes, one after the other."""
    return [slice(*pair) for pair in itertools.pairwise(np.cumsum([0, *sizes]).tolist())]


def decay_of(a: Any, w: dict[str, Any]) -> Any:
    """Return -exp(A_log) softplus(a + dt_bias)."""
    ones = np.ones(a.shape, a.dtype)
    bias, rate = (uc.broadcast_to(w[n], shape=ones.shape) for n in ("dt_bias", "A_log"))
    return uc.multiply(uc.exp(rate), uc.log(uc.exp(a + bias) + ones)) * -1.0


@both_dtypes
def test_decays_of_a_layer(dtype: Any) -> None:
    (golden,) = (c for c in CASES if c.name == "decay")
    known, tape = cast(golden, dtype), uc.Tape()
    w = {name: tape.watch(a) for name, a in known.items() if name != "cotangent"}
    decay = decay_of(w["a"], w)
    agree(decay.value, golden.outputs["y"])
    gradients = tape.gradients(decay, [*w.values()], known["cotangent"])
    for name, gradient in zip(w, gradients, strict=True):
        agree(gradient, golden.grads[name])


@both_dtypes
@pytest.mark.parametrize(
    "golden", [c for c in CASES if c.name.startswith("layer")], ids=lambda c: c.name
)
def test_whole_layers(golden: OpCase, dtype: Any) -> None:
    """The layers of Qwen3-Next and Qwen3.5, with all gradients, from the ops they are made of."""
    known, p = cast(golden, dtype), golden.params
    heads, value_heads = p["linear_num_key_heads"], p["linear_num_value_heads"]
    dim, value_dim = p["linear_key_head_dim"], p["linear_value_head_dim"]
    of_keys, of_values = heads * dim, value_heads * value_dim
    parts = slices(of_keys, of_keys, of_values)
    tape = uc.Tape()
    w = {name: tape.watch(a) for name, a in known.items() if name != "cotangent"}
    x = w["x"]
    lead = x.shape[:2]
    if "in_proj_qkvz.weight" in w:  # per head q, k, then v and z of its value heads
        each = uc.reshape(uc.linear(x, w["in_proj_qkvz.weight"]), shape=(*lead, heads, -1))
        some = value_dim * value_heads // heads
        of_head = (uc.index(each, key=np.s_[..., s]) for s in slices(dim, dim, some, some))
        q, k, v, z = (uc.reshape(part, shape=(*lead, -1)) for part in of_head)
        both = uc.reshape(uc.linear(x, w["in_proj_ba.weight"]), shape=(*lead, heads, -1))
        some = value_heads // heads
        b, a = (uc.index(both, key=np.s_[..., i * some : (i + 1) * some]) for i in range(2))
        b, a = (uc.reshape(part, shape=(*lead, -1)) for part in (b, a))
    else:
        mixed, z = (uc.linear(x, w[f"in_proj_{n}.weight"]) for n in ("qkv", "z"))
        q, k, v = (uc.index(mixed, key=np.s_[..., part]) for part in parts)
        b, a = (uc.linear(x, w[f"in_proj_{n}.weight"]) for n in "ba")
    taps = uc.reshape(w["conv1d.weight"], shape=(-1, 4))
    own = (uc.index(taps, key=part) for part in parts)
    q, k, v = (uc.causal_conv(a, t)[0] for a, t in zip((q, k, v), own, strict=True))
    q, k = (normalised(uc.reshape(part, shape=(*lead, heads, dim))) for part in (q, k))
    v, z = (uc.reshape(part, shape=(*lead, value_heads, value_dim)) for part in (v, z))
    ones = np.ones((*lead, value_heads), dtype)
    beta = uc.divide(ones, uc.exp(b * -1.0) + ones)
    out, _ = uc.gated_delta_rule(q, k, v, decay_of(a, w), beta)
    out = uc.gated_rms_norm(out, z, w["norm.weight"], eps=p["rms_norm_eps"])
    y = uc.linear(uc.reshape(out, shape=(*lead, -1)), w["out_proj.weight"])
    agree(y.value, golden.outputs["y"])
    gradients = tape.gradients(y, [*w.values()], known["cotangent"])
    for name, gradient in zip(w, gradients, strict=True):
        agree(gradient, golden.grads[name])


def by_tokens(q: Any, k: Any, v: Any, decay: Any, beta: Any, state: Any, scale: float) -> Any:
    """Return out and the last state by the recurrence, a token at a time."""
    outs = []
    for t in range(q.shape[1]):
        groups = v.shape[2] // q.shape[2]
        key, query = (a[:, t].repeat(groups, axis=1) for a in (k, q))
        factor = np.exp(decay[:, t])
        state = (factor if factor.ndim == 3 else factor[..., None])[..., None] * state
        error = v[:, t] - np.einsum("bhkv,bhk->bhv", state, key)
        state = state + np.einsum("bh,bhk,bhv->bhkv", beta[:, t], key, error)
        outs.append(scale * np.einsum("bhkv,bhk->bhv", state, query))
    return np.stack(outs, axis=1), state


both_decays = pytest.mark.parametrize("channels", [(), (8,)], ids=["of tokens", "of channels"])


@both_decays
@pytest.mark.parametrize("strength", [0.0, 0.01, 1.0, 30.0, 1000.0])
def test_chunks_are_the_recurrence(strength: float, channels: tuple[int, ...]) -> None:
    """In float64 along a text of many chunks; decays of every strength, keys that repeat."""
    rng = np.random.default_rng(0)
    q, k = unit(rng.standard_normal((2, 2, 300, 2, 8)))
    k[:, 100:200] = k[:, 100:101]  # powers of A would be as large as 2^64
    v, state = rng.standard_normal((2, 300, 4, 6)), rng.standard_normal((2, 4, 8, 6))
    decay, beta = -strength * rng.random((2, 300, 4, *channels)), rng.random((2, 300, 4))
    beta[:, 100:200] = 1
    out, final = uc.gated_delta_rule(q, k, v, decay, beta, initial=state)
    expected = by_tokens(q, k, v, decay, beta, state, 8**-0.5)
    for actual, exact in zip((out, final), expected, strict=True):
        np.testing.assert_allclose(actual, exact, rtol=1e-10, atol=1e-12)
    narrow = [a.astype(np.float32) for a in (q, k, v, decay, beta)]
    out, final = uc.gated_delta_rule(*narrow, initial=state.astype(np.float32))
    for actual, exact in zip((out, final), expected, strict=True):
        np.testing.assert_allclose(actual, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strength", [0.3, 30.0])
def test_channels_as_torch_differentiates_them(strength: float) -> None:
    """The recurrence of channels, a token at a time, in float64."""
    torch = pytest.importorskip("torch", reason="torch computes the reference")
    rng = np.random.default_rng(0)
    q, k = unit(rng.standard_normal((2, 1, 70, 1, 8)))
    v, dout = rng.standard_normal((2, 1, 70, 2, 6))
    initial, dfinal = rng.standard_normal((2, 1, 2, 8, 6))
    decay, beta = -strength * rng.random((1, 70, 2, 8)), rng.random((1, 70, 2))
    arrays = q, k, v, decay, beta, initial
    tensors = [torch.tensor(a, requires_grad=True) for a in arrays]
    queries, keys, values, decays, shares, state = tensors
    outs = []
    for t in range(70):
        state = state * decays[:, t].exp()[..., None]
        key, query = keys[:, t].expand(1, 2, 8), queries[:, t].expand(1, 2, 8)
        error = values[:, t] - (state * key[..., None]).sum(2)
        state = state + (shares[:, t, :, None] * key)[..., None] * error[:, :, None]
        outs.append(8**-0.5 * (state * query[..., None]).sum(2))
    results = torch.stack(outs, 1), state
    actual = uc.gated_delta_rule(*arrays[:5], initial=initial)
    for ours, expected in zip(actual, results, strict=True):
        np.testing.assert_allclose(ours, expected.detach(), rtol=1e-10, atol=1e-12)
    expected = torch.autograd.grad(results, tensors, [torch.tensor(a) for a in (dout, dfinal)])
    gradients = uc.gated_delta_rule_backward(dout, dfinal, *arrays, None)
    for ours, theirs in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
@both_decays
def test_a_decay_that_empties_the_state(channels: tuple[int, ...]) -> None:
    """-inf: the texts before and after it are apart, in results and in gradients."""
    rng = np.random.default_rng(0)
    q, k, v = unit(rng.standard_normal((3, 1, 90, 1, 8)).astype(np.float32))
    decay, beta = np.zeros((1, 90, 1, *channels), np.float32), np.ones((1, 90, 1), np.float32)
    decay[0, 40] = -np.inf

    def run() -> list[Any]:
        out, _ = uc.gated_delta_rule(q, k, v, decay, beta)
        return [out, *uc.gated_delta_rule_backward(v, None, q, k, v, decay, beta, None, None)]

    expected = run()
    after = (a[:, 40:] for a in (q, k, v, np.zeros_like(decay), beta))
    alone, _ = uc.gated_delta_rule(*after)
    np.testing.assert_allclose(expected[0][:, 40:], alone, rtol=1e-5, atol=1e-6)
    assert all(np.isfinite(a).all() for a in expected[:-1])
    with emulator():
        for actual, exact in zip(run()[:-1], expected[:-1], strict=True):
            np.testing.assert_allclose(actual, exact, rtol=1e-4, atol=1e-5)


def drawn(
    lengths: tuple[int, ...],
    dtype: Any,
    channels: tuple[int, ...] = (),
    dim: int = 8,
    values: int = 4,
) -> dict[str, np.ndarray]:
    """Return the arrays of packed texts, their states and the gradients of both results."""
    rng = np.random.default_rng(0)
    tokens = sum(lengths)
    q, k = unit(rng.standard_normal((2, 1, tokens, 1, dim)))
    v, dout = rng.standard_normal((2, 1, tokens, 2, values))
    decay, beta = -rng.random((1, tokens, 2, *channels)), rng.random((1, tokens, 2))
    arrays = {"q": q, "k": k, "v": v, "decay": decay, "beta": beta, "dout": dout}
    arrays = {name: array.astype(dtype) for name, array in arrays.items()}
    states = np.promote_types(dtype, np.float32)
    initial, dfinal = rng.standard_normal((2, len(lengths), 2, dim, values)).astype(states)
    return arrays | {"initial": initial, "dfinal": dfinal}


def both_ways(arrays: dict[str, np.ndarray], offsets: Any) -> list[Any]:
    """Return results of tokens, then those of states, of a call and its backward."""
    inputs = [arrays[name] for name in NAMES]
    out, final = uc.gated_delta_rule(*inputs, initial=arrays["initial"], offsets=offsets)
    *gradients, dinitial = uc.gated_delta_rule_backward(
        arrays["dout"], arrays["dfinal"], *inputs, arrays["initial"], offsets
    )
    return [out, *gradients, final, dinitial]


def packed_and_alone(lengths: tuple[int, ...], *rest: Any) -> None:
    assert_bits_of_each_alone(both_ways, drawn(lengths, *rest), lengths, of_tokens=6)


@both_decays
@pytest.mark.parametrize("dtype", [*KERNEL_DTYPES, np.dtype("float64")], ids=str)
def test_packed_texts_have_the_bits_of_each_alone(dtype: Any, channels: tuple[int, ...]) -> None:
    packed_and_alone((5, 0, 130, 1, 64, 3), dtype, channels)


@pytest.mark.slow
@both_decays
def test_kernels_of_packed_texts_have_the_bits_of_each_alone(channels: tuple[int, ...]) -> None:
    """None begins where a chunk of all tokens would; one token alone has a kernel of its own."""
    with emulator():
        packed_and_alone((5, 0, 1, 66, 2), KERNEL_DTYPES[1], channels)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [64, 128])
def test_tensor_cores_of_packed_texts_have_the_bits_of_each_alone(dim: int) -> None:
    """One token alone has a kernel of its own."""
    with emulator():
        packed_and_alone((5, 0, 1, 66, 2), BFLOAT16, (), dim, 64)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rest",
    [(np.float32,), (np.float32, (8,)), (BFLOAT16, (), 64, 64), (BFLOAT16, (), 128, 64)],
    ids=["of tokens", "of channels", "tensor cores", "two warps"],
)
def test_any_schedule(rest: tuple[Any, ...]) -> None:
    assert_any_schedule(both_ways, drawn((3, 4), *rest), (3, 4))


@both_decays
def test_heads_apart_have_the_bits_of_all_together(channels: Any, monkeypatch: Any) -> None:
    """Backward takes as many heads as its memory allows, here one after the other."""
    rng = np.random.default_rng(0)
    q, k = unit(rng.standard_normal((2, 2, 70, 3, 8)))
    v, dout = rng.standard_normal((2, 2, 70, 6, 4))
    decay, beta = -rng.random((2, 70, 6, *channels)), rng.random((2, 70, 6))
    initial, dfinal = rng.standard_normal((2, 2, 6, 8, 4))

    def run() -> list[bytes]:
        arrays = dout, dfinal, q, k, v, decay, beta, initial, None
        return [a.tobytes() for a in uc.gated_delta_rule_backward(*arrays)]

    together = run()
    monkeypatch.setattr("unsloth_cupy.ops.recurrence.gated_delta_rule.KEPT", 1)
    assert run() == together


@both_decays
@pytest.mark.parametrize("lengths", [(5, 0, 130, 1, 64, 3), (0, 0), (64,), (0, 7, 0)], ids=str)
def test_texts_of_a_device_are_not_read(lengths: Any, channels: tuple[int, ...]) -> None:
    assert_texts_of_a_device_are_not_read(both_ways, drawn(lengths, np.float64, channels), lengths)


@both_decays
def test_a_state_goes_on_with_a_text(channels: tuple[int, ...]) -> None:
    """In pieces of any length, down to one token."""
    arrays = drawn((100,), np.float64, channels)
    inputs = {name: arrays[name] for name in NAMES}
    assert_states_go_on(uc.gated_delta_rule, inputs, (1, 1, 70, 20, 1, 7))


def test_wrong_calls() -> None:
    q = np.ones((2, 6, 2, 4), np.float32)
    decay = np.zeros((2, 6, 2), np.float32)
    with pytest.raises(ConfigError, match=r"chunk=0; pass an integer of 1 or more, such as 64"):
        uc.gated_delta_rule(q, q, q, decay, decay, chunk=0)
    with pytest.raises(ConfigError, match=r"precision='low'; choose from highest, high"):
        uc.gated_delta_rule(q, q, q, decay, decay, precision="low")
    with pytest.raises(ShapeError, match=r"batch=2; with offsets it must be 1: pass reshape\(1,"):
        uc.gated_delta_rule(q, q, q, decay, decay, offsets=np.array([0, 6]))
    one = [a[:1] for a in (q, q, q, decay, decay)]
    with pytest.raises(RangeError, match="must rise from 0 to 6, the number of tokens"):
        uc.gated_delta_rule(*one, offsets=np.array([0, 7]))
    with pytest.raises(ShapeError, match="initial has 3 states"):
        uc.gated_delta_rule(*one, initial=np.zeros((3, 2, 4, 4), np.float32))
    with pytest.raises(ShapeError, match="decay has 3 channels and k 4; pass one decay for each"):
        uc.gated_delta_rule(q, q, q, q[..., :3], decay)
    three = np.ones((2, 6, 3, 4), np.float32)
    with pytest.raises(ShapeError, match="value_heads=3 must be a multiple of heads=2"):
        uc.gated_delta_rule(q, q, three, three[..., 0], three[..., 0])
