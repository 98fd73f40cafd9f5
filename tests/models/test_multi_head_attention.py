"""MultiHeadAttention is torch's, its own function, and what a cache says of it."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from unsloth_cupy import (
    AdamW,
    KVCache,
    MultiHeadAttention,
    PagedKVCache,
    Tape,
    attention_layer,
    rope_tables,
)
from unsloth_cupy.errors import (
    ConfigError,
    DeviceMemoryError,
    FrameworkError,
    RangeError,
    ShapeError,
)

HIDDEN, HEADS, KV_HEADS, TOKENS = 24, 4, 2, 7


def drawn(*shape: int, seed: int = 1, dtype: Any = np.float64) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def layer(**options: Any) -> MultiHeadAttention:
    return MultiHeadAttention(HIDDEN, HEADS, **{"dtype": "float64", "seed": 0, **options})


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_is_torch(causal: bool, bias: bool) -> None:
    """With the weights of torch's layer: the same values, and the same gradients of them."""
    torch = pytest.importorskip("torch", reason="torch computes the reference")
    peer = torch.nn.MultiheadAttention(
        HIDDEN, HEADS, bias=bias, batch_first=True, dtype=torch.float64
    )
    with torch.no_grad():
        for seed, weight in enumerate(peer.parameters()):  # torch begins with biases of 0
            weight.copy_(torch.from_numpy(drawn(*weight.shape, seed=seed)) / 3)
    own = layer(bias=bias)
    own.load({name: weight.detach().numpy() for name, weight in peer.state_dict().items()})
    x, dy = drawn(2, TOKENS, HIDDEN), drawn(2, TOKENS, HIDDEN, seed=2)
    tx = torch.tensor(x, requires_grad=True)
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1) if causal else None
    expected, _ = peer(tx, tx, tx, attn_mask=hidden, need_weights=False)
    expected.backward(torch.tensor(dy))
    tape = Tape()
    watched = {name: tape.watch(array) for name, array in own.parameters.items()}
    vx: Any = tape.watch(x)
    y: Any = own(vx, parameters=watched, causal=causal)
    np.testing.assert_allclose(y.value, expected.detach().numpy(), rtol=1e-10, atol=1e-12)
    dx, *actual = tape.gradients(y, [vx, *watched.values()], dy)
    np.testing.assert_allclose(dx, tx.grad.numpy(), rtol=1e-9, atol=1e-11)
    again = layer(bias=bias)  # takes gradients by the same names as weights
    again.load({name: weight.grad.numpy() for name, weight in peer.named_parameters()})
    for gradient, wanted in zip(actual, again.parameters.values(), strict=True):
        np.testing.assert_allclose(gradient, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_is_its_function(dtype: str) -> None:
    """Heads that share keys, a dim of their own and rotary embeddings; parameters by name."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    cos, sin = rope_tables(TOKENS, 10)
    tables = (cos.astype(kind), sin.astype(kind))
    own = layer(kv_heads=KV_HEADS, dim=10, bias=False, rope=tables, dtype=kind)
    assert {name: a.shape for name, a in own.parameters.items()} == {
        "q_proj.weight": (40, HIDDEN),
        "k_proj.weight": (20, HIDDEN),
        "v_proj.weight": (20, HIDDEN),
        "o_proj.weight": (HIDDEN, 40),
    }
    assert {array.dtype for array in own.parameters.values()} == {kind}
    x = drawn(2, TOKENS, HIDDEN, dtype=kind)
    y = own(x, window=(2, 0), softcap=3.0)
    assert (y.shape, y.dtype) == (x.shape, kind)
    options: dict[str, Any] = {"heads": HEADS, "window": (2, 0), "softcap": 3.0}
    expected = attention_layer(x, *own.parameters.values(), *tables, **options)
    np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("kind", ["order", "pages"])
def test_goes_on_behind_a_cache(kind: str) -> None:
    own = layer(kv_heads=KV_HEADS, rope=tuple(t.astype(float) for t in rope_tables(TOKENS, 6)))
    x = drawn(2, TOKENS, HIDDEN)
    options: dict[str, Any] = {}
    if kind == "order":
        options["cache"] = KVCache(2, 2, TOKENS, KV_HEADS, 6, dtype="float64")
    else:
        pages = options["cache"] = PagedKVCache(2, 8, 4, KV_HEADS, 6, dtype="float64")
        options["sequences"] = [pages.allocate(TOKENS), pages.allocate(0)]
    parts = [own(x[:, part], layer=1, **options) for part in (np.s_[:4], np.s_[4:5], np.s_[5:])]
    actual = np.concatenate(parts, axis=1)
    np.testing.assert_allclose(actual, own(x), rtol=1e-10, atol=1e-12)


def test_learns() -> None:
    """To say what another one says: gradients have the names of the parameters."""
    own, teacher = layer(dtype="float32"), layer(dtype="float32", seed=5)
    x = drawn(4, TOKENS, HIDDEN, dtype=np.float32)
    expected, optimizer, losses = teacher(x), AdamW(own.parameters, lr=0.01), []
    for _ in range(30):
        tape = Tape()
        watched: Any = {name: tape.watch(array) for name, array in own.parameters.items()}
        y: Any = own(x, parameters=watched)
        loss = ((y - expected) ** 2).mean()
        losses.append(float(loss.value))
        gradients = tape.gradients(loss, [*watched.values()])
        optimizer.step(dict(zip(watched, gradients, strict=True)))
    assert losses[-1] < losses[0] / 4


def test_equal_seeds_give_equal_weights() -> None:
    one, other, third = layer(), layer(), layer(seed=1)
    for name, array in one.parameters.items():
        assert array.tobytes() == other.parameters[name].tobytes()
        if name.endswith("weight"):
            assert array.tobytes() != third.parameters[name].tobytes()
            assert abs(array.std() * array.shape[1] ** 0.5 - 1) < 0.2  # of 576 numbers
        else:
            assert not array.any()


def test_loads_a_layer_of_a_checkpoint_or_nothing() -> None:
    own, prefix = layer(bias=False, dtype="float32"), "model.layers.3.self_attn."
    kept = {name: array.copy() for name, array in own.parameters.items()}
    weights = {f"{prefix}{name}": array + 1.0 for name, array in kept.items()}
    weights |= {"model.norm.weight": np.ones(HIDDEN)}
    for name, array in kept.items():
        broken: dict[str, Any] = {**weights, prefix + name: np.ones((2, 3))}
        with pytest.raises(ShapeError, match=rf"{name} is \(2, 3\); it must be"):
            own.load(broken, prefix)
        without = {n: a for n, a in weights.items() if n != prefix + name}
        with pytest.raises(ConfigError, match=f"misses {name}"):
            own.load(without, prefix)
        broken[prefix + name] = array.astype(int)
        with pytest.raises(ConfigError, match="int64"):
            own.load(broken, prefix)
        assert all((own.parameters[n] == a).all() for n, a in kept.items())
    with pytest.raises(ConfigError, match=r"has no q_proj.bias"):
        own.load({**weights, f"{prefix}q_proj.bias": np.zeros(HIDDEN)}, prefix)
    with pytest.raises(ShapeError, match=r"in_proj_weight is \(3, 24\); q, k and v have 24 \+"):
        own.load({"in_proj_weight": np.ones((3, HIDDEN)), "out_proj.weight": np.ones((24, 24))})
    arrays = list(own.parameters.values())
    own.load(weights, prefix)
    assert all(one is other for one, other in zip(arrays, own.parameters.values(), strict=True))
    assert all((own.parameters[n] == a + 1).all() for n, a in kept.items())
    torch = pytest.importorskip("torch", reason="whose arrays are not the layer's")
    with pytest.raises(FrameworkError, match=r"q_proj\.weight from torch"):
        own.load({name: torch.from_numpy(array) for name, array in kept.items()})


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"hidden": 0}, "hidden=0"),
        ({"hidden": 24.0}, "hidden=24.0"),
        ({"heads": 5}, r"heads=5\): hidden=24 is not a multiple; pass dim"),
        ({"heads": True}, "heads=True"),
        ({"kv_heads": 3}, r"kv_heads=3\): heads=4 is not a multiple"),
        ({"kv_heads": 0}, "kv_heads=0"),
        ({"dim": -1}, "dim=-1"),
        ({"bias": 1}, "bias=1"),
        ({"rope": 10000.0}, r"pass \(cos, sin\), or None"),
        ({"dtype": "int8"}, "int8"),
        ({"seed": None}, "seed=None"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_options_that_make_no_sense(options: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        MultiHeadAttention(**{"hidden": HIDDEN, "heads": HEADS, "seed": 0, **options})


@pytest.mark.parametrize("size", ["hidden", "heads", "dim"])
@pytest.mark.parametrize("most", [2**40, 10**30])
def test_what_no_memory_holds_is_not_drawn(size: str, most: int) -> None:
    with pytest.raises(DeviceMemoryError, match="pass smaller sizes") as error:
        MultiHeadAttention(**{"hidden": HIDDEN, "heads": HEADS, "dim": 8, "seed": 0, size: most})
    assert error.value.required > error.value.available


def test_bad_calls() -> None:
    own, x = layer(), drawn(1, TOKENS, HIDDEN)
    with pytest.raises(ConfigError, match=r"has no q_weight; it has q_proj\.weight, q_proj"):
        own(x, parameters={"q_weight": x})
    with pytest.raises(ConfigError, match="pass cos and sin"):
        own(x, np.arange(TOKENS))
    with pytest.raises(ShapeError, match="inputs"):
        own(x[..., :5])
    with pytest.raises(RangeError, match="capacity"):
        own(x, cache=KVCache(1, 1, 3, HEADS, 6, dtype="float64"))
