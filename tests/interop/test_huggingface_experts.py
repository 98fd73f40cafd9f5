"""Mixtures of experts of transformers: experts by its registry of functions, and routers."""

import copy
import functools
import importlib
import inspect
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs the extra `peers` (torch)")
transformers = pytest.importorskip("transformers", reason="needs the extra `peers` (transformers)")
pytest.importorskip("transformers.integrations.moe", reason="needs transformers 5")

from unsloth_cupy import profile  # noqa: E402
from unsloth_cupy.interop.huggingface import _experts, _router, patch, unpatch  # noqa: E402
from unsloth_cupy.interop.huggingface._changes import Changes  # noqa: E402
from unsloth_cupy.interop.huggingface._trials import Refused  # noqa: E402

from .families import MIXTURES, check, model_of, step, texts  # noqa: E402

FUSED, OWN_GATE = "experts_mlp_forward", "grouped_linear"
QUICK = ("mixtral", "gpt_oss", "deepseek_v3", "minimax_m3_vl_text")
LEFT = {  # reasons of a router that stays as it is
    "afmoe": "it has more than one matrix",
    "deepseek_v4": "its forward also reads input_ids",
    "kolibri1": "no formula known gives the same",
    "lfm2_moe": "no formula known gives the same",
    "phimoe": "no formula known gives the same",
}
NONE = ("hunyuan_v1_moe",)  # a block that routes itself


def families():
    marks = {family: () if family in QUICK else pytest.mark.slow for family in MIXTURES}
    return [pytest.param(family, marks=marks[family]) for family in MIXTURES]


@pytest.mark.filterwarnings("ignore")  # what others warn of is theirs
@pytest.mark.parametrize("family", families())
def test_a_step_is_the_models_own(family):
    model = model_of(family, **MIXTURES[family]).eval()  # phimoe draws noise in training
    scenes = ("left", "whole")
    before = {scene: step(model, scene) for scene in scenes}
    report = patch(model, parts=["experts", "router"])
    with profile() as seen:
        after = {scene: step(model, scene) for scene in scenes}
    unpatch(model)
    for scene in scenes:
        check(after[scene], before[scene], model, scene)
    again = step(model, "whole")
    assert all(torch.equal(again[name], value) for name, value in before["whole"].items())
    assert report.taken["experts"] >= 1
    assert "experts" not in report.left
    ops = {record.op for record in seen.records}
    assert (FUSED in ops) or {OWN_GATE, "sort_by_expert_forward"} <= ops
    if family in LEFT:
        assert report.left["router"] == LEFT[family]
    elif family not in NONE:
        assert report.taken["router"] >= 1
        assert "route_forward" in ops


class Sizes:
    """A config of whatever the experts of a family ask for."""

    hidden_size, hidden_act, _experts_implementation_internal = 16, "silu", "grouped_mm"
    _experts_implementation = property(lambda self: self._experts_implementation_internal)
    swiglu_limit, swiglu_alpha, limit = 1.0, 1.3, 1.0

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if "experts" in name:
            return 5
        if "eps" in name:
            return 1e-6
        return "silu" if "act" in name else 12


def every_class():
    """Return the classes of transformers that ask the registry, by file."""
    asking, folder = [], Path(inspect.getfile(transformers)).parent / "models"
    for file in sorted(folder.glob("*/modeling_*.py")):
        if "\n@use_experts_implementation" in file.read_text():
            asking.append(f"transformers.models.{file.parent.name}.{file.stem}")
    return asking


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_experts_of_every_class_of_transformers_are_taken():
    taken, fused = [], 0
    for path in every_class():
        module = importlib.import_module(path)
        kinds = [
            kind
            for _, kind in inspect.getmembers(module, inspect.isclass)
            if kind.__module__ == path and hasattr(kind, "_apply_gate")
        ]
        for kind in kinds:
            torch.manual_seed(0)
            experts = kind(Sizes())
            for parameter in experts.parameters():
                torch.nn.init.normal_(parameter)
            hidden = experts.down_proj.shape[2 if experts.is_transposed else 1]
            x = torch.randn(9, hidden, requires_grad=True)
            chosen = torch.randn(9, 5).topk(2).indices
            weights = torch.rand(9, 2, requires_grad=True)
            inputs = [x, weights, *experts.parameters()]
            expected = experts(x, chosen, weights)
            slopes = torch.randn_like(expected)
            before = torch.autograd.grad(expected, inputs, slopes)
            with torch.no_grad():
                _experts.take(Changes(), [experts])
            actual = experts(x, chosen, weights)
            assert actual.grad_fn is not None
            gradients = torch.autograd.grad(actual, inputs, slopes)
            for new, old in zip((actual, *gradients), (expected, *before), strict=True):
                most = 2e-6 * float(old.abs().max())
                torch.testing.assert_close(new, old, rtol=0, atol=most, msg=path)
            taken.append(kind.__name__)
            fused += vars(experts)[_experts.FORM] is not None
    assert len(taken) >= len(every_class())
    assert fused >= len(taken) - 12  # others have a gate of their own


def mixture(**options):
    return model_of("mixtral", **MIXTURES["mixtral"] | options)


def test_experts_that_no_row_chooses_and_one_that_all_choose():
    model = mixture(num_hidden_layers=1)
    gate = next(m for n, m in model.named_modules() if n.endswith("mlp.gate"))
    with torch.no_grad():
        gate.weight.copy_(torch.zeros_like(gate.weight))  # all equal: the first of them
    patch(model, parts=["experts", "router"])
    grads = step(model, "whole")
    stack = next(value for name, value in grads.items() if name.endswith("experts.down_proj"))
    assert (stack[:2] != 0).any(dim=(1, 2)).all()
    assert not stack[2:].any()


def test_16_bits_and_autocast_are_no_further_from_float32():
    exact_model = mixture(num_experts_per_tok=4)  # rounding may choose others
    exact = step(exact_model)

    def distance(model, narrow):
        with torch.autocast("cpu", torch.bfloat16, enabled=not narrow):
            found = step(model)
        return sum(float(((found[n].float() - grad) ** 2).sum()) for n, grad in exact.items())

    for narrow in (True, False):
        model = copy.deepcopy(exact_model)
        model = model.bfloat16() if narrow else model
        before = distance(model, narrow)
        assert patch(model, parts=["experts", "router"]).taken == {"experts": 2, "router": 2}
        assert distance(model, narrow) <= 1.3 * before


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["gpt_oss", "deepseek_v3"])
def test_compiled_in_one_graph(family):
    torch._dynamo.reset()
    model = model_of(family, **MIXTURES[family]).eval()
    patch(model, parts=["experts", "router"])
    expected = step(model)
    actual = step(model, call=torch.compile(model, fullgraph=True, backend="aot_eager"))
    for name, value in expected.items():
        most = max(1e-4 * float(value.abs().max()), 1e-7)
        torch.testing.assert_close(actual[name], value, rtol=0, atol=most)


def test_the_implementation_of_experts_is_the_users_to_switch():
    model = mixture()
    before = step(model)
    patch(model)
    assert model.config._experts_implementation == "unsloth_cupy"
    model.set_experts_implementation("eager")
    with profile() as seen:
        check(step(model), before, model, "left")
    assert FUSED not in {record.op for record in seen.records}
    unpatch(model)
    assert model.config._experts_implementation == "eager"
    model.set_experts_implementation("unsloth_cupy")  # unpatched: by the gate of the module
    check(step(model), before, model, "left")


def test_ranks_and_strange_experts_are_left():
    model = mixture()
    before = step(model)
    layers = [module for module in model.modules() if _experts.asks(module)]
    layers[0]._is_expert_parallel = True
    report = patch(model, parts="experts")
    assert report.left == {"experts": "ranks divide its experts"}
    assert "experts" not in report.taken
    layers[0]._is_expert_parallel = False
    layers[0].forward = functools.partial(layers[0].forward)
    assert patch(model, parts="experts").left == {"experts": "another library replaced its forward"}
    del layers[0].forward
    unpatch(model)
    assert all(torch.equal(step(model)[name], value) for name, value in before.items())
    assert model.config._experts_implementation == "grouped_mm"
    left = patch(model_of("llama4_text"), parts=["experts", "router"]).left
    assert "does not let other libraries" in left["experts"]
    assert "does not return logits, weights and experts" in left["router"]


@pytest.mark.parametrize(
    "change",
    [
        lambda logits, weights, chosen: (logits, 1.001 * weights, chosen),
        lambda logits, weights, chosen: (2 * logits, weights, chosen),
        lambda logits, weights, chosen: (logits, weights, (chosen + 1) % 4),
    ],
    ids=["weights", "logits", "experts"],
)
def test_a_router_that_differs_is_left(monkeypatch, change):
    router = next(m for m in mixture().modules() if _router.is_router(m))
    own = type(router).forward
    monkeypatch.setattr(type(router), "forward", lambda self, x: change(*own(self, x)))
    with torch.no_grad(), pytest.raises(Refused, match="gives"):
        _router.take(Changes(), router)


def test_noise_in_training_is_left(monkeypatch):
    router = next(m for m in mixture().modules() if _router.is_router(m))
    own = type(router).forward

    def noisy(self, hidden_states):
        x = hidden_states * (1 + 0.1 * torch.rand_like(hidden_states) * self.training)
        return own(self, x)

    monkeypatch.setattr(type(router), "forward", noisy)
    with torch.no_grad(), pytest.raises(Refused, match="something else in training"):
        _router.take(Changes(), router)
    assert router.training


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_adapters_of_peft_on_experts(family):
    peft = pytest.importorskip("peft", reason="needs the extra `peers` (peft)")
    stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapter = {"target_modules": ["q_proj"], "r": 4, "init_lora_weights": False}
    config = peft.LoraConfig(target_parameters=stacks, **adapter)
    model = peft.get_peft_model(model_of(family, **MIXTURES[family]), config)
    before = step(model)
    assert patch(model).taken["experts"] == 2
    after = step(model)
    unpatch(model)
    check(after, before, model, "left")
    assert any("experts.base_layer.lora_A" in name for name in after)


def test_generated_tokens_are_equal():
    model, tokens = mixture().eval(), texts("whole")["input_ids"][:, :6]
    options = {"max_new_tokens": 6, "do_sample": False}
    plain = model.generate(tokens, **options)
    patch(model)
    assert torch.equal(model.generate(tokens, **options), plain)
