"""Patched models whose layers are those of bitsandbytes, with and without adapters."""

import copy

import pytest

torch = pytest.importorskip("torch", reason="needs the extra `peers` (torch)")
pytest.importorskip("transformers", reason="needs the extra `peers` (transformers)")

from unsloth_cupy.interop import huggingface, quantized_layers  # noqa: E402
from unsloth_cupy.interop.huggingface import patch, unpatch  # noqa: E402

from .bitsandbytes_models import KINDS, one_layout, quantized_model  # noqa: E402, F401
from .families import step, texts  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # what others warn of is theirs
    pytest.mark.usefixtures("one_layout"),
]
LAYERS = 14  # of two blocks
EXACT, EIGHT_BITS = 1e-5, 0.08  # of the largest: the latter rounds rows, and 16 bits hold them


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("dense")


def logits(model):
    tokens = texts("whole")["input_ids"]
    mode = model.training
    with torch.no_grad():
        result = model.eval()(input_ids=tokens, use_cache=False).logits
    model.train(mode)
    return result


def near(actual, expected, most):
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype is value.dtype
        error = float((actual[name] - value).abs().max() / value.abs().max())
        assert error <= most, (name, error)


def adapted(model, **options):
    peft = pytest.importorskip("peft", reason="needs the extra `peers` (peft)")
    config = peft.LoraConfig(
        r=4, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM", **options
    )
    torch.manual_seed(1)
    return peft.get_peft_model(model, config).train()


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_taken_and_given_back(folder, kind):
    model = quantized_model(folder, kind)
    plain, expected, layer = step(model), logits(model), model.model.layers[0].mlp.up_proj
    report = patch(model)
    assert report.taken["quantized"] == LAYERS
    assert not report.left
    assert layer.forward.__func__.__module__.endswith("huggingface._quantized")
    near(step(model), plain, EXACT)
    near({"y": logits(model)}, {"y": expected}, EIGHT_BITS if kind == "int8" else EXACT)
    unpatch(model)
    assert "forward" not in vars(layer)
    assert torch.equal(logits(model), expected)
    assert all(torch.equal(value, plain[name]) for name, value in step(model).items())


@pytest.mark.parametrize("kind", KINDS)
def test_the_weight_is_the_layers_own_memory(folder, kind):
    layer = quantized_model(folder, kind).model.layers[0].mlp.up_proj
    weight = quantized_layers.weight_of(layer)
    codes = weight.codes if kind == "int8" else weight.packed
    assert codes.ctypes.data == layer.weight.data_ptr()
    if kind in ("nf4", "fp4"):
        assert weight.absmax.ctypes.data == layer.weight.quant_state.absmax.data_ptr()
    assert quantized_layers.weight_of(layer) is weight
    twin = copy.deepcopy(layer)
    assert quantized_layers.weight_of(twin) is not weight
    layer.weight.data = layer.weight.data.clone()
    moved = quantized_layers.weight_of(layer)
    assert (moved.codes if kind == "int8" else moved.packed).ctypes.data == layer.weight.data_ptr()


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_in_sixteen_bits(folder, kind):
    model = quantized_model(folder, kind, dtype=torch.bfloat16)
    exact = logits(quantized_model(folder, kind, dtype=torch.float32))
    own = logits(model)
    assert patch(model).taken["quantized"] == LAYERS
    actual = logits(model)
    assert actual.dtype is torch.bfloat16
    errors = [float((y.float() - exact).abs().max()) for y in (actual, own)]
    assert errors[0] <= 1.5 * errors[1]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"lora_dropout": 0.5}])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_of_peft(folder, kind, options):
    if kind == "int8" and "use_dora" in options:
        pytest.skip("DoRA of peft on 8 bits fails by itself, in evaluation after training")
    model = adapted(quantized_model(folder, kind), **options)
    expected = logits(model)
    plain = step(model)
    report = patch(model)
    assert report.taken["lora"] == report.taken["quantized"] == LAYERS
    if "lora_dropout" not in options:
        near(step(model), plain, EXACT)
    near({"y": logits(model)}, {"y": expected}, EIGHT_BITS if kind == "int8" else EXACT)
    learning = step(model)
    assert learning.keys() == plain.keys()  # adapters alone
    unpatch(model)
    assert torch.equal(logits(model), expected)


@pytest.mark.slow
def test_a_layer_that_computes_in_another_dtype_than_its_adapter(folder):
    model = adapted(quantized_model(folder, "nf4", bnb_4bit_compute_dtype=torch.bfloat16))
    expected = logits(model)
    assert patch(model).taken["lora"] == LAYERS
    most = 0.03  # of bfloat16, through two blocks
    near({"y": logits(model)}, {"y": expected}, most)
    with torch.autocast("cpu", torch.bfloat16):
        actual = logits(model)
        unpatch(model)
        near({"y": actual}, {"y": logits(model)}, most)


def test_weights_in_another_storage(folder):
    model = quantized_model(folder, "nf4", bnb_4bit_quant_storage=torch.float32)
    expected = logits(model)
    assert model.model.layers[0].mlp.up_proj.weight.dtype is torch.float32
    assert patch(model).taken["quantized"] == LAYERS
    near({"y": logits(model)}, {"y": expected}, EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["", "mlp.up_proj"], ids=["layers", "adapters"])
def test_a_patched_model_is_compiled_around_its_layers(folder, part):
    torch._dynamo.reset()
    breaks = torch._dynamo.utils.counters["graph_break"]
    breaks.clear()
    model = quantized_model(folder, "nf4")
    if part:
        adapted(model)
    patch(model)
    expected = step(model)
    for layer in model.model.layers:
        layer.get_submodule(part).compile(backend="aot_eager")
    near(step(model), expected, EXACT)
    assert breaks
    assert all("a quantized weight cannot be in a graph" in why for why in breaks)


def test_copies_compute_with_their_own_weights(folder):
    model = quantized_model(folder, "nf4")
    patch(model)
    twin, before = copy.deepcopy(model), logits(model)
    twin.model.layers[0].mlp.up_proj.weight.data.zero_()
    assert torch.equal(logits(model), before)
    assert not torch.equal(logits(twin), before)


def test_weights_that_are_packed_for_a_cpu_are_left_and_said(folder):
    model = quantized_model(folder, "nf4")
    layer = model.model.layers[0].mlp.up_proj
    layer.weight.quant_state.packing_format_for_cpu = True
    report = patch(model, parts=["quantized"])
    assert report.taken["quantized"] == LAYERS - 1
    assert "has packed its weight for this CPU" in report.left["quantized"]
    assert "forward" not in vars(layer)


def test_trials_let_no_weight_be_packed(folder, monkeypatch):
    """What bitsandbytes packs in evaluation on some CPUs is trained there without gradients."""
    model = quantized_model(folder, "nf4")
    monkeypatch.setattr(quantized_layers, "weight_of", None)
    for layer in model.modules():
        if quantized_layers.kind_of(layer):
            layer.support_avx512bf16_for_cpu = True
    patch(model, parts=["norm", "mlp", "attention", "residual", "loss"])
    packed = "packing_format_for_cpu"
    states = [w.quant_state for w in model.parameters() if hasattr(w, "quant_state")]
    assert len(states) == LAYERS
    assert not any(getattr(state, packed, False) for state in states)


def test_a_layer_that_the_library_computes_otherwise_is_left(folder, monkeypatch):
    model = quantized_model(folder, "nf4")
    real = huggingface._quantized.weight_of

    class Wrong:
        def __getattr__(self, name):
            raise RuntimeError("no kernel")

    broken = model.model.layers[1].mlp.down_proj
    monkeypatch.setattr(
        huggingface._quantized,
        "weight_of",
        lambda layer: Wrong() if layer is broken else real(layer),
    )
    report = patch(model, parts=["quantized"])
    assert report.taken["quantized"] == LAYERS - 1
    assert report.left["quantized"] == "no formula known gives the same"
    assert "forward" not in vars(broken)
