import functools

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.errors import ConfigError, DTypeError, ShapeError
from unsloth_cupy.ops.linear.lora_group import lora_group
from unsloth_cupy.ops.linear.lora_linears import lora_down
from unsloth_cupy.ops.linear.lora_merge import row_norms

from ..harness.parity import Case, Parity, within_rule
from ..machines.stand_in import gpu
from .golden_cases import agree, both_dtypes, cast, golden

GIVEN = {"bias": ["bias"], "DoRA": ["bias", "factor"], "plain": []}


class TestLoraLinear(Parity):
    op = "lora_linear_forward"
    cases = (
        Case("plain", rows=[2, 3], inputs=13, outputs=7, rank=3, scale=2.0),
        Case("bias", rows=[5], inputs=4, outputs=3, rank=1, scale=0.3, given=["bias"]),
        Case("DoRA", rows=[4], inputs=6, outputs=5, rank=2, given=["bias", "factor"]),
        Case("dropout", rows=[4], inputs=9, outputs=5, rank=2, dropout=0.4, seed=3),
        Case(
            "DoRA, dropout",
            rows=[2, 2],
            inputs=9,
            outputs=5,
            rank=2,
            scale=1.5,
            dropout=0.4,
            seed=3,
            given=["factor"],
        ),
        Case("one row", rows=[], inputs=5, outputs=2, rank=2),
        Case("no rows", rows=[0], inputs=5, outputs=2, rank=2, given=["bias", "factor"]),
        Case("no rank", rows=[3], inputs=5, outputs=2, rank=0, given=["bias"]),
        Case("no outputs", rows=[3], inputs=5, outputs=0, rank=2),
    )


class TestLoraDown(Parity):
    op = "lora_down"
    cases = (
        Case("three", rows=[2, 3], inputs=13, rank=3, rank2=1, rank3=2, given=["a2", "a3"]),
        Case("two", rows=[5], inputs=9, rank=2, rank2=2, given=["a2"]),
        Case("one", rows=[], inputs=4, rank=2),
        Case("no rows", rows=[0], inputs=4, rank=2, rank2=3, given=["a2"]),
        Case("one of no rank", rows=[3], inputs=4, rank=0, rank2=3, given=["a2"]),
    )


class TestLoraUp(Parity):
    op = "lora_up"
    cases = (
        Case("plain", rows=[2, 3], inputs=13, outputs=7, rank=3, scale=2.0),
        Case("DoRA", rows=[4], inputs=6, outputs=5, rank=2, scale=0.5, given=["bias", "factor"]),
        Case("no rows", rows=[0], inputs=5, outputs=2, rank=2, given=["bias", "factor"]),
        Case("no rank", rows=[3], inputs=5, outputs=2, rank=0, given=["bias"]),
    )


class TestLoraGroup(Parity):
    op = "lora_group"
    cases = (
        Case(
            "three", rows=[2, 3], inputs=13, outputs=7, outputs2=3, outputs3=2, rank=3, rank2=1,
            rank3=2, scale=2.0, scale3=0.5, given=["weight3", "a3", "b3"],
        ),
        Case("two", rows=[5], inputs=4, outputs=6, outputs2=6, rank=2, rank2=2, scale2=0.5),
        Case("no rows", rows=[0], inputs=4, outputs=2, outputs2=3, rank=2, rank2=2),
        Case("one of no rank", rows=[], inputs=4, outputs=2, outputs2=3, rank=0, rank2=1),
    )  # fmt: skip


def test_a_third_layer_is_whole() -> None:
    x, weight, a, b = (np.ones(shape) for shape in ((2, 4), (3, 4), (1, 4), (3, 1)))
    with pytest.raises(ConfigError, match="lora_group: a third layer lacks a3 and b3; pass"):
        lora_group(x, weight, weight, weight, a, a, None, b, b)


class TestDoraFactor(Parity):
    op = "dora_factor"
    cases = (Case("odd", outputs=7), Case("none", outputs=0))


@both_dtypes
@golden("lora", "lora", "rslora", "dora", without=("llama",))
def test_equals_peft(golden, dtype) -> None:
    arrays = cast(golden, dtype)
    inputs = [arrays[name] for name in ("x", "weight", "A", "B", "bias")]
    scale, magnitude = golden.params["scaling"], arrays.get("magnitude")
    tape = uc.Tape()
    x, a, b, *rest = (
        tape.watch(array) for array in (inputs[0], *inputs[2:4], magnitude) if array is not None
    )
    y = uc.lora_linear(
        x, inputs[1], a, b, scale=scale, bias=inputs[4], magnitude=rest[0] if rest else None
    )
    agree(y.value, golden.outputs["y"])
    actual = tape.gradients(y, [x, a, b, *rest], arrays["cotangent"])
    for grad, name in zip(actual, ("x", "A", "B", "magnitude"), strict=False):
        agree(grad, golden.grads[name])
    merged = uc.lora_merge(inputs[1], *inputs[2:4], scale=scale, magnitude=magnitude)
    agree(merged, golden.outputs["merged_weight"])
    agree(uc.linear(inputs[0], merged, inputs[4]), golden.outputs["y"])


@both_dtypes
@golden("lora", "lora", "rslora", "dora", without=("llama",))
def test_layers_of_one_x_equal_peft(golden, dtype) -> None:
    """The second of three layers; the others have adapters of other ranks."""
    arrays = cast(golden, dtype)
    inputs = [arrays[name] for name in ("weight", "A", "B")]
    scale, magnitude = golden.params["scaling"], arrays.get("magnitude")
    x, tape = arrays["x"], uc.Tape()
    watched = {
        name: tape.watch(array)
        for name, array in (("x", x), ("A", inputs[1]), ("B", inputs[2]), ("magnitude", magnitude))
        if array is not None
    }
    mine = uc.LoraLayer(
        inputs[0], watched["A"], watched["B"], scale, arrays["bias"], watched.get("magnitude")
    )
    ones = [np.ones((4, x.shape[-1]), dtype), np.ones((1, x.shape[-1]), dtype)]
    other = uc.LoraLayer(*ones, np.ones((4, 1), dtype))
    _, y, _ = uc.lora_linears(watched["x"], [other, mine, other])
    agree(y.value, golden.outputs["y"])
    actual = tape.gradients(y, [*watched.values()], arrays["cotangent"])
    for grad, name in zip(actual, watched, strict=True):
        agree(grad, golden.grads[name])


@pytest.mark.parametrize("dora", [False, True], ids=["plain", "DoRA"])
def test_dropout_equals_peft(dora: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the mask that is drawn here put in the place of torch's own."""
    torch = pytest.importorskip("torch", reason="peft is made of it")
    peft = pytest.importorskip("peft", reason="the peer of lora_linear")
    torch.manual_seed(0)
    base = torch.nn.Sequential(torch.nn.Linear(12, 10).double())
    config = peft.LoraConfig(
        r=4, lora_alpha=8, use_dora=dora, lora_dropout=0.5, target_modules=["0"]
    )
    model = peft.get_peft_model(base, config)
    layer = model.base_model.model[0]
    torch.nn.init.normal_(layer.lora_B["default"].weight)
    layer.double()
    inputs = torch.randn(6, 12, dtype=torch.float64, requires_grad=True)
    rank = np.eye(12)
    seen = uc.lora_linear_forward(
        np.ones((6, 12)), np.zeros((1, 12)), rank, np.zeros((1, 12)), dropout=0.5, seed=9
    )[1]
    monkeypatch.setattr(
        layer.lora_dropout["default"], "forward", lambda x: x * torch.from_numpy(seen)
    )
    y = layer.train()(inputs)
    parts = {name.split(".")[0]: p.detach().numpy() for name, p in layer.named_parameters()}
    weight = layer.base_layer.weight.detach().numpy()
    arrays = weight, parts["lora_A"], parts["lora_B"]
    tape = uc.Tape()
    x, a, b = (tape.watch(array) for array in (inputs.detach().numpy(), *arrays[1:]))
    options = {"scale": 2.0, "bias": layer.base_layer.bias.detach().numpy(), "dropout": 0.5}
    magnitude = parts.get("lora_magnitude_vector")
    mine = uc.lora_linear(x, weight, a, b, magnitude=magnitude, seed=9, **options)
    np.testing.assert_allclose(mine.value, y.detach().numpy(), rtol=1e-10, atol=1e-12)
    cotangent = torch.randn_like(y)
    expected = torch.autograd.grad(
        y, [inputs, layer.lora_A["default"].weight, layer.lora_B["default"].weight], cotangent
    )
    actual = tape.gradients(mine, [x, a, b], cotangent.numpy())
    for grad, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(grad, theirs.numpy(), rtol=1e-10, atol=1e-11)


def draw_layers(rng: np.random.Generator, dtype: str, dora: bool) -> list[uc.LoraLayer]:
    """Return four layers of 8 inputs, of ranks 1 to 4; the second has float32 factors."""
    layers = []
    for rank, outputs in enumerate((6, 3, 3, 5), 1):
        shapes = (outputs, 8), (rank, 8), (outputs, rank), (outputs,), (outputs,)
        kinds = (dtype, *(["float32"] if rank == 2 and dtype == "float16" else [dtype]) * 4)
        drawn = zip(shapes, kinds, strict=True)
        weight, a, b, bias, magnitude = (rng.standard_normal(s).astype(d) for s, d in drawn)
        layers.append(uc.LoraLayer(weight, a, b, 0.5, bias, abs(magnitude) if dora else None))
    return layers


@pytest.mark.parametrize("dora", [False, True], ids=["plain", "DoRA"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_layers_of_one_x_are_layers(dtype: str, dora: bool) -> None:
    """Results and gradients of lora_linear, as near as sums in another order are."""
    rng = np.random.default_rng(5)
    x, layers = rng.standard_normal((2, 3, 8)).astype(dtype), draw_layers(rng, dtype, dora)
    shares = [rng.standard_normal((2, 3, len(n.weight))).astype(dtype) for n in layers]

    def run(call):
        tape = uc.Tape()
        first = tape.watch(x)
        on_tape = [
            n._replace(**{k: tape.watch(v) for k, v in n._asdict().items() if np.ndim(v)})
            for n in layers
        ]
        ys = call(first, on_tape)
        wrt = [first, *(v for n in on_tape for v in n if isinstance(v, type(first)))]
        parts = [uc.multiply(y, c)[..., :3] for y, c in zip(ys, shares, strict=True)]
        total = functools.reduce(uc.add, parts)
        return [y.value for y in ys], tape.gradients(total, wrt, np.ones((2, 3, 3), dtype))

    ys, grads = run(uc.lora_linears)
    expected, others = run(lambda x, layers: [uc.lora_linear(x, **n._asdict()) for n in layers])
    assert [y.dtype for y in ys] == [np.dtype(dtype)] * 4
    for actual, other in zip([*ys, *grads], [*expected, *others], strict=True):
        error = np.abs(actual.astype(np.float64) - other).max()
        assert error <= 8 * np.finfo(dtype).eps * np.abs(other).max()


def test_adapters_of_one_x_are_one_product() -> None:
    """x is read once for them on the way forward, and once for all gradients of a on the way back:
    7 products of three layers instead of 9, and 2 instead of 6."""
    drawn = draw_layers(np.random.default_rng(0), "float32", dora=False)[:3]
    with gpu() as machine:
        x, *arrays = (
            machine.place(array)
            for array in (np.ones((5, 8), np.float32), *(a for n in drawn for a in n[:3]))
        )
        layers = [uc.LoraLayer(*arrays[i : i + 3]) for i in (0, 3, 6)]
        for layer in layers:
            uc.lora_linear(x, *layer[:3])
        assert len(machine.products) == 9
        uc.lora_linears(x, layers)
        assert len(machine.products) == 9 + 7
        factors = [layer.a for layer in layers]
        lows = lora_down(x, *factors)
        before = len(machine.products)
        lora_down.backward.call([*lows, x, *factors], {})
        assert len(machine.products) == before + 2


def test_a_frozen_base_costs_no_gradient() -> None:
    x, weight, a, b = (np.ones(shape) for shape in [(2, 5), (3, 5), (1, 5), (3, 1)])
    tape = uc.Tape()
    watched = [tape.watch(array) for array in (a, b)]
    y = uc.lora_linear(x, weight, *watched)
    entry = tape.entries[-1]
    low, dy = entry.values["low"], np.ones((2, 3))
    actual = uc.lora_linear_backward(
        dy, None, x, weight, a, b, None, None, low, wanted=frozenset({"a", "b"})
    )
    assert [grad is None for grad in actual] == [True, True, False, False, True, True]
    for mine, taped in zip(actual[2:4], tape.gradients(y, watched, dy), strict=True):
        np.testing.assert_array_equal(mine, taped)


def test_float32_adapters_of_narrow_rows() -> None:
    rng = np.random.default_rng(0)
    shapes = (6, 8), (5, 8), (2, 8), (5, 2)
    x, weight, a, b = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    narrow = [array.astype(np.float16) for array in (x, weight)]
    tape = uc.Tape()
    watched = [tape.watch(array) for array in (a, b)]
    y = uc.lora_linear(*narrow, *watched)
    assert y.value.dtype == np.float16
    assert {g.dtype.name for g in tape.gradients(y, watched, y.value)} == {"float32"}
    exact = uc.lora_linear(*(array.astype(np.float64) for array in (*narrow, a, b)))
    assert np.abs(y.value - exact).max() < 2**-9 * np.abs(exact).max()


def test_a_row_of_zeros_has_no_direction() -> None:
    """The norm of a row of zeros is 0: DoRA leaves it 0, and makes no NaN."""
    x, weight, a, b = np.ones((2, 4)), np.zeros((3, 4)), np.zeros((1, 4)), np.zeros((3, 1))
    tape = uc.Tape()
    magnitude = tape.watch(np.ones(3))
    y = uc.lora_linear(x, weight, a, b, magnitude=magnitude)
    assert not y.value.any()
    assert not tape.gradients(y, [magnitude], np.ones((2, 3)))[0].any()


def test_norms_are_of_the_rows_of_what_is_merged() -> None:
    rng = np.random.default_rng(0)
    shapes = (7, 300), (2, 300), (7, 2)
    weight, a, b = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    plain, exact = (
        np.linalg.norm(uc.lora_merge(*(m.astype(kind) for m in (weight, a, b)), scale=0.5), axis=1)
        for kind in (np.float32, np.float64)
    )
    actual = row_norms(weight, a, b, scale=0.5)
    within_rule({"norm": plain}, {"norm": exact}, {"norm": actual})


@pytest.mark.parametrize(("outputs", "inputs", "rank"), [(0, 4, 2), (3, 0, 2), (3, 4, 0)])
def test_empty_axes(outputs: int, inputs: int, rank: int) -> None:
    shapes = (outputs, inputs), (rank, inputs), (outputs, rank)
    weight, a, b = map(np.ones, shapes)
    magnitude = np.full(outputs, 4.0)
    np.testing.assert_array_equal(row_norms(weight, a, b), np.full(outputs, inputs**0.5))
    merged = uc.lora_merge(weight, a, b, magnitude=magnitude)
    np.testing.assert_array_equal(merged, 2 * weight)
    y = uc.lora_linear(np.ones((2, inputs)), weight, a, b, magnitude=magnitude)
    np.testing.assert_array_equal(y, np.full((2, outputs), 2.0 * inputs))


def test_wrong_calls() -> None:
    x, weight, a, b = (np.ones(shape) for shape in [(2, 5), (3, 5), (1, 5), (3, 1)])
    with pytest.raises(ShapeError, match=r"b has rank=1; it must be 2"):
        uc.lora_linear(x, weight, np.ones((2, 5)), b)
    with pytest.raises(ConfigError, match=r"lora_linear: dropout=1.5 must be"):
        uc.lora_linear(x, weight, a, b, dropout=1.5, seed=0)
    with pytest.raises(ConfigError, match=r"pass seed=0"):
        uc.lora_linear(x, weight, a, b, dropout=0.5)
    for wrong in (np.ones(4), np.ones((3, 1))):
        with pytest.raises(ShapeError, match=r"^lora_linear: magnitude has .*; it must be \(3,\)"):
            uc.lora_linear(x, weight, a, b, magnitude=wrong)
        with pytest.raises(ShapeError, match=r"^lora_linears: magnitude has .*; it must be \(3,\)"):
            uc.lora_linears(x, [uc.LoraLayer(weight, a, b, magnitude=wrong)])


def test_wrong_calls_of_dora_and_of_merging() -> None:
    """Errors name lora_linear, and not the norms, which are taken first."""
    x, weight, a, b = (np.ones(shape) for shape in [(2, 5), (3, 5), (1, 5), (3, 1)])
    short, ones = np.ones((2, 1)), np.ones(3)
    for call in (
        lambda b, **options: uc.lora_linear(x, weight, a, b, magnitude=ones, **options),
        lambda b, **options: uc.lora_linears(x, [uc.LoraLayer(weight, a, b, magnitude=ones)]),
        lambda b, **options: uc.lora_merge(weight, a, b, **options),
    ):
        with pytest.raises(ShapeError, match=r"b has outputs=2; it must be 3"):
            call(short)
        with pytest.raises(DTypeError, match=r"b is not an array but list"):
            call(b.tolist())
    with pytest.raises(ShapeError, match=r"magnitude has outputs=4; it must be 3"):
        uc.lora_merge(weight, a, b, magnitude=np.ones(4))
    with pytest.raises(ConfigError, match=r"lora_merge\(scale='2'\)"):
        uc.lora_merge(weight, a, b, scale="2")
    for operands in ((None, a, b), (weight, None, b), (weight, a, None), (weight, a, short)):
        with pytest.raises((DTypeError, ShapeError), match=r"^lora_linear: "):
            uc.lora_linear(x, *operands, magnitude=ones)
    with pytest.raises(DTypeError, match=r"^lora_linear: magnitude is not an array but str"):
        uc.lora_linear(x, weight, a, b, magnitude="x")
    for layers in (None, [weight], weight):
        with pytest.raises(
            ConfigError, match=r"lora_linears: pass a list of LoraLayer\(weight, a, b"
        ):
            uc.lora_linears(x, layers)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_torch_arrays_come_back_as_such(dtype: str) -> None:
    torch = pytest.importorskip("torch", reason="whose arrays are given")
    rng = np.random.default_rng(0)
    shapes = (2, 8), (5, 8), (2, 8), (5, 2), (5,)
    arrays = [rng.standard_normal(shape).astype(dtype) for shape in shapes]
    x, weight, a, b, magnitude = (torch.from_numpy(array) for array in arrays)
    for actual, expected in (
        (
            uc.lora_linear(x, weight, a, b, magnitude=magnitude),
            uc.lora_linear(*arrays[:4], magnitude=arrays[4]),
        ),
        (
            uc.lora_merge(weight, a, b, magnitude=magnitude),
            uc.lora_merge(*arrays[1:4], magnitude=arrays[4]),
        ),
    ):
        assert type(actual) is torch.Tensor
        np.testing.assert_array_equal(actual.numpy(), expected)
