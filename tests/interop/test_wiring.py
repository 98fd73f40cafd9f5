"""The predicted shapes and dtypes of a call equal its results."""

import numpy as np
import pytest

import unsloth_cupy
from unsloth_cupy import attention, rms_norm
from unsloth_cupy.core.op import OPS
from unsloth_cupy.core.signature import parts
from unsloth_cupy.errors import UnslothCupyError
from unsloth_cupy.interop._wiring import (
    Form,
    forms,
    is_product,
    module_names,
    no_gradient,
    operators,
    public,
    shared_outputs,
)

from .calls import drawn, every_call


@every_call
def test_forms_are_those_of_results(op, optional):
    call = drawn(op, optional)[0]
    inputs = {n: Form(a.shape, a.dtype) for n, a in call.arrays.items() if a is not None}
    expected = {n: (a.shape, a.dtype) for n, a in call.run().items()}
    for output in shared_outputs(op, inputs):
        expected.pop(output)
    actual = forms(op, inputs, call.options)
    assert {name: form for name, form in actual.items() if form is not None} == expected


@every_call
def test_forms_of_gradients_are_those_of_their_operands(op, optional):
    call, names = drawn(op, optional)
    outputs = call.run()
    back = call.backward(outputs, call.seeds(outputs, every=True))
    inputs = {n: Form(a.shape, a.dtype) for n, a in back.arrays.items() if a is not None}
    options = back.options | ({"wanted": {names[0]}} if "wanted" in op.backward.options else {})
    actual, elsewhere = forms(op.backward, inputs, options), shared_outputs(op.backward, inputs)
    asked = names[:1] if "wanted" in options else names
    for name in asked:
        form = actual[elsewhere.get(f"d{name}", f"d{name}")]
        assert form == (call.arrays[name].shape, call.arrays[name].dtype)
    assert all(actual[f"d{name}"] is None for name in names if name not in asked)


def test_sums_that_have_one_term_are_that_term():
    forward, backward = OPS["rms_norm_forward"], OPS["rms_norm_backward"]
    assert shared_outputs(forward, {"x", "weight"}) == {"h": "x"}
    assert shared_outputs(forward, {"x", "weight", "residual"}) == {}
    assert shared_outputs(backward, {"residual"}) == {"dresidual": "dx"}
    x = np.ones((2, 4), np.float32)
    _, h, _ = forward(x, x[0])
    assert h is x


def test_every_size_of_a_result_is_told():
    """By the axes of operands, or by a fact of the op."""
    for op in operators():
        known = {parts(axis)[0] for o in op.contract.inputs for axis in o.axes}
        asked = {parts(axis)[0] for o in op.contract.outputs for axis in o.axes}
        asked = {axis for axis in asked if not axis.isdigit()}
        assert asked <= known or {"sizes", "bound"} & op.facts.keys(), op


def test_products_share_an_axis_that_they_sum_over():
    products = {op.__name__ for op in operators() if op.backward is not None and is_product(op)}
    assert products == {
        "attention_forward",
        "attention_varlen_forward",
        "bit_linear_forward",
        "contrastive_forward",
        "experts_mlp_forward",
        "gated_delta_rule",
        "grouped_linear",
        "linear",
        "linear_cross_entropy_forward",
        "linear_divergence_forward",
        "linear_log_probs_forward",
        "linear_top_k_divergence_forward",
        "linears",
        "lora_down",
        "lora_group",
        "lora_linear_forward",
        "lora_up",
        "matmul",
        "ssd",
        "swiglu_mlp",
    }


def test_public_names_are_the_librarys():
    import unsloth_cupy

    names = public()
    assert {"rms_norm", "attention", "lora_linears", "swiglu", "cast"} <= names.keys()
    shown = {name for name in vars(unsloth_cupy) if name in names}
    assert all(getattr(unsloth_cupy, name) is names[name] for name in shown)
    assert not any(name.endswith("_") for name in names)


def test_errors_name_what_a_user_called():
    assert {op.called for op in operators()} <= {*public(), *dir(unsloth_cupy)}
    second = "attention has no second derivatives; take its gradient once"
    assert str(no_gradient(OPS["attention_backward"])).startswith(second)
    assert str(no_gradient(OPS["lora_merge"])).startswith("lora_merge has no gradient: adapters")
    q = np.ones((1, 2, 2, 4), np.float32)
    for wrong in ({"k": q[..., :2]}, {"causal": 3}, {"k": [1]}, {"dropout": 0.5}):
        with pytest.raises(UnslothCupyError, match=r"^attention[:(]"):
            attention(**{"q": q, "k": q, "v": q} | wrong)


def test_a_module_of_a_framework_has_the_librarys_names():
    get, names = module_names({"__name__": "theirs", "own": 1})
    assert get("lora_down") is OPS["lora_down"]
    assert get("rms_norm") is rms_norm
    assert {"own", "lora_down", "rms_norm"} <= {*names()}
    assert names() == sorted(names())
    with pytest.raises(AttributeError, match=r"^module 'theirs' has no attribute 'adamw_'$"):
        get("adamw_")
