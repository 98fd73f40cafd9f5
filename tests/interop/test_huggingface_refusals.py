"""What cannot be patched is refused or left, and a model is never half patched."""

import copy
import functools

import pytest

torch = pytest.importorskip("torch", reason="needs the extra `peers` (torch)")
pytest.importorskip("transformers", reason="needs the extra `peers` (transformers)")

from unsloth_cupy.errors import ConfigError, FrameworkError  # noqa: E402
from unsloth_cupy.interop import huggingface  # noqa: E402
from unsloth_cupy.interop.huggingface import _loss, patch, unpatch  # noqa: E402

from .families import model_of, step  # noqa: E402


def state(model):
    """Return all that a patch may change."""
    modules = [
        {k: v for k, v in vars(m).items() if k[:1] != "_" or k[:2] == "_u"} for m in model.modules()
    ]
    return modules, model.config._attn_implementation, model.__dict__.get("_loss_function")


def test_what_is_no_model_of_transformers_is_refused():
    for strange in (torch.nn.Linear(2, 2), {"a": 1}, None):
        for call in (patch, unpatch):
            with pytest.raises(FrameworkError, match="is not a model of transformers"):
                call(strange)


@pytest.mark.slow
def test_parts_that_are_not_known_are_named():
    model = model_of("llama")
    before = state(model)
    with pytest.raises(
        ConfigError, match=r"parts=\['heads'\] are not known; choose from norm, mlp"
    ):
        patch(model, parts=["norm", "heads"])
    with pytest.raises(ConfigError, match=r"parts=\['heads'\] are not known"):
        huggingface.PatchCallback(parts="heads")
    assert state(model) == before


def test_patching_twice_is_patching_once():
    model = model_of("llama")
    plain, before = step(model), state(model)
    first = patch(model)
    second = patch(model)
    assert str(first) == str(second)
    assert patch(model, parts=["norm"]).taken == {"norm": 5}
    unpatch(model)
    assert state(model) == before
    unpatch(model)
    again = step(model)
    assert all(torch.equal(again[name], value) for name, value in plain.items())


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_whatever_goes_wrong_all_is_undone(monkeypatch, error):
    model = model_of("llama")
    before = state(model)
    names = ("alone", "experts", "router", "rotary", "qk_norm", "attention", "residual", "loss")

    def broken(self, *_):
        raise error("out of memory")

    for name in names:
        with monkeypatch.context() as patched:
            patched.setattr(huggingface._patch._Patching, name, broken)
            with pytest.raises(error):
                patch(model)
        assert state(model) == before
        assert model.training
    patch(model)


@pytest.mark.parametrize("at", ["alone", "loss"])
def test_a_model_that_cannot_be_patched_again_stays_patched(monkeypatch, at):
    model = model_of("llama")
    before = state(model)
    patch(model, parts=["norm", "attention", "loss"])
    patched = state(model)
    actual = step(model)

    def broken(self, *_):
        raise KeyboardInterrupt

    monkeypatch.setattr(huggingface._patch._Patching, at, broken)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            patch(model)
        assert state(model) == patched
    again = step(model)
    assert all(torch.equal(again[name], value) for name, value in actual.items())
    unpatch(model)
    assert state(model) == before


def test_a_part_whose_trial_fails_is_left_and_said(monkeypatch):
    model = model_of("llama")

    def broken(*_, **__):
        raise RuntimeError("no kernel")

    monkeypatch.setattr(_loss, "linear_cross_entropy", broken)
    report = patch(model)
    assert report.left == {"loss": "a trial fails: RuntimeError: no kernel"}
    assert "forward" not in vars(model.lm_head)
    assert step(model)["loss"] > 0


def test_a_module_of_another_structure_than_it_seems_is_left(monkeypatch):
    def broken(module, dtype):
        return module.no_such_part

    monkeypatch.setitem(huggingface._patch.ALONE, "mlp", broken)
    report = patch(model_of("llama"), parts=["mlp", "norm"])
    assert report.taken == {"norm": 5}
    assert "no attribute 'no_such_part'" in report.left["mlp"]


def whole_step(family, parts=None, **options):
    """Return a step of a model, and that of its copy that is patched, with equal random numbers."""
    model = model_of(family, **options)
    patched = copy.deepcopy(model)
    report = patch(patched, parts=parts)
    steps = []
    for each in (model, patched):
        torch.manual_seed(3)
        steps.append(step(each))
    return report, *steps


@pytest.mark.parametrize(
    ("family", "option", "left"),
    [
        ("stablelm", "hidden_dropout", "residual"),  # a module of the layer
        ("persimmon", "hidden_dropout", "residual"),
        ("seed_oss", "residual_dropout", "mlp"),  # a function
    ],
)
def test_dropout_that_is_not_of_a_part_stays(family, option, left):
    report, plain, actual = whole_step(family, [left, "norm"], **{option: 0.25})
    assert report.left == {left: "it has dropout of its own"}
    torch.testing.assert_close(actual, plain, rtol=1e-4, atol=1e-5)
    report, *_ = whole_step(family, [left, "norm"], **{option: 0.0})
    assert not report.left


def test_weights_of_a_layer_itself_learn_although_they_are_ones():
    report, plain, actual = whole_step("doge", ["residual", "norm"])
    assert report.left == {"residual": "it has weights besides the weights of its parts"}
    assert "model.layers.0.input_residual" in actual
    torch.testing.assert_close(actual, plain, rtol=1e-4, atol=1e-5)


def test_weights_that_no_op_can_read_are_refused():
    with pytest.raises(
        FrameworkError, match="is on meta, where no op runs; load the weights first"
    ):
        patch(model_of("llama").to("meta"))
    model = model_of("llama")
    model.lm_head.to("meta")
    before = state(model)
    with pytest.raises(FrameworkError, match=r"lm_head\.weight is on meta"):
        patch(model)
    assert state(model) == before


def test_shards_of_weights_are_refused():
    class DTensor(torch.Tensor):
        pass

    model = model_of("llama")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.data.as_subclass(DTensor))
    with pytest.raises(FrameworkError, match=r"is a DTensor.*patch the model before it is sharded"):
        patch(model)


def test_a_norm_that_somebody_replaced_is_not_undone_in_part():
    model = model_of("llama")
    patch(model)
    before = state(model)
    own = model.model.norm.forward
    model.model.norm.forward = functools.partial(own)
    with pytest.raises(ConfigError, match="forward of LlamaRMSNorm was replaced"):
        unpatch(model)
    model.model.norm.forward = own
    assert state(model) == before
    unpatch(model)


def test_a_forward_around_that_of_the_model_may_stay():
    model = model_of("llama")
    plain = step(model)
    patch(model)
    own = model.forward
    model.forward = functools.partial(own)
    unpatch(model)
    actual = step(model)
    assert all(torch.equal(actual[name], value) for name, value in plain.items())
    assert "another library" in patch(model).left["loss"]


def test_random_numbers_of_the_caller_go_on():
    model = model_of("llama")
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    patch(model)
    assert torch.equal(torch.rand(2), expected)
