"""Patched models are copied, stored, loaded and transformed by torch, in every family."""

import copy
import io
import pickle
from contextlib import suppress

import pytest

torch = pytest.importorskip("torch", reason="needs the extra `peers` (torch)")
pytest.importorskip("transformers", reason="needs the extra `peers` (transformers)")

from unsloth_cupy.interop.huggingface import patch, unpatch  # noqa: E402
from unsloth_cupy.interop.huggingface._patch import is_patched  # noqa: E402

from ..harness.sampling import Sample  # noqa: E402
from .families import NINE, OTHERS, check, model_of, step, texts  # noqa: E402

FAMILIES = [*NINE, *OTHERS]


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def equal(actual, expected):
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", Sample.one_in(12, FAMILIES))
def test_copies_and_stored_models_have_the_bits_of_the_model(family, implementation):
    """A deep copy is patched; what is stored is the model before the patch, and can be patched."""
    model = model_of(family)
    if implementation == "sdpa" and not model._supports_sdpa:
        pytest.skip("it has eager attention alone")
    model.set_attn_implementation(implementation)
    before = step(model)
    taken = patch(model).taken
    after = step(model)
    copied = copy.deepcopy(model)
    equal(step(copied), after)
    unpatch(copied)
    equal(step(copied), before)
    for stored in (saved, pickled):
        loaded = stored(model)
        assert not is_patched(loaded)
        equal(step(loaded), before)
    assert is_patched(model)
    equal(step(model), after)
    assert patch(loaded).taken == taken
    equal(step(loaded), after)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of torch's vmap
@pytest.mark.parametrize("family", Sample.one_in(12, FAMILIES[::-1]))
def test_gradients_by_torch_func_are_those_of_backward(family):
    """Of a loss by labels; and of its texts at once, where the model itself can be mapped."""
    model = model_of(family)
    weights = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}

    def loss(weights, tokens):
        inputs = {"input_ids": tokens, "labels": tokens, "use_cache": False}
        return torch.func.functional_call(model, weights, (), inputs).loss

    def of_texts(tokens):
        each = torch.func.vmap(lambda text: torch.func.grad(loss)(weights, text[None]))(tokens)
        return {name: gradients.mean(0) for name, gradients in each.items()}

    def of_all(tokens):
        return torch.func.grad(loss)(weights, tokens)

    tokens, before, possible = texts("whole")["input_ids"], step(model, "whole"), []
    for function in (of_all, of_texts):
        with suppress(Exception):  # of the model itself, which may read values of its inputs
            function(tokens)
            possible.append(function)
    if not possible:
        pytest.skip("it has functions without a rule for torch.func")
    patch(model)
    actual = [function(tokens) for function in possible]
    unpatch(model)
    for each in actual:
        own = {name: each[name] for name in before if name != "loss"}
        check(own | {"loss": before["loss"]}, before, model, "whole")
