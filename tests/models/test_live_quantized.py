"""Models that transformers quantizes with bitsandbytes, in both directions."""

import pytest

torch = pytest.importorskip("torch", reason="needs the extra `peers` (torch)")
pytest.importorskip("transformers", reason="needs the extra `peers` (transformers)")
pytest.importorskip("bitsandbytes", reason="needs the extra `peers` (bitsandbytes)")

import numpy as np  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from unsloth_cupy import models  # noqa: E402
from unsloth_cupy.errors import ConfigError  # noqa: E402
from unsloth_cupy.ops.quantized.weight import Quantized  # noqa: E402

from ..interop.bitsandbytes_models import (  # noqa: E402
    KINDS,
    one_layout,  # noqa: F401
    quantized_model,
)
from ..interop.families import texts  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # what others warn of is theirs
    pytest.mark.usefixtures("one_layout"),
]
LAYERS = 14  # of two blocks


def error(actual, expected):
    return float((actual - expected).abs().max() / expected.abs().max())


def as_trained(live):
    """Return a model whose layers of 8 bits leave their rows as they are, as in training."""
    return live.train()


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_live_model_is_taken_over(tmp_path, kind, family):
    live = as_trained(quantized_model(tmp_path, kind, family))
    model, tokens = models.from_torch(live), texts("whole")["input_ids"]
    made = {n: w for n, w in model.parameters.items() if isinstance(w, Quantized)}
    assert len(made) == LAYERS
    for name, weight in made.items():
        codes = weight.codes if kind == "int8" else weight.packed
        assert codes.ctypes.data == live.get_parameter(name).data_ptr()
    expected = live(input_ids=tokens, use_cache=False).logits.detach()
    assert error(model.logits(tokens), expected) < 1e-5
    with pytest.raises(ConfigError, match=r"q_proj.weight is quantized, not a tensor; save\("):
        model.to_torch()
    model.save(tmp_path / "again")
    again = models.load(tmp_path / "again")
    assert np.array_equal(again.logits(tokens.numpy()), model.logits(tokens).numpy())


def test_sixteen_bits_say_what_is_computed_in(tmp_path):
    live = quantized_model(tmp_path, "nf4", dtype=torch.bfloat16)
    model = models.from_torch(live)
    assert {w.dtype.name for w in model.parameters.values()} == {"bfloat16"}


def test_a_weight_that_is_packed_for_a_cpu_is_named(tmp_path):
    live = quantized_model(tmp_path, "nf4")
    live.model.layers[1].mlp.up_proj.weight.quant_state.packing_format_for_cpu = True
    words = r"from_torch: model.layers.1.mlp.up_proj.weight: bitsandbytes has packed its weight"
    with pytest.raises(ConfigError, match=words):
        models.from_torch(live)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_loads_in_transformers(tmp_path, kind, family):
    own = as_trained(quantized_model(tmp_path / "dense", kind, family))
    model, tokens = models.load(tmp_path / "dense", quantize=kind), texts("whole")["input_ids"]
    model.save(tmp_path / "saved")
    live = as_trained(AutoModelForCausalLM.from_pretrained(tmp_path / "saved"))
    with torch.no_grad():
        actual, judge = (m(input_ids=tokens, use_cache=False).logits for m in (live, own))
    assert error(model.logits(tokens), actual) < 1e-5
    tied = kind in ("nf4-double", "int8")  # an ulp of a mean or of 127 / absmax decides ties
    assert error(actual, judge) < (2e-3 if tied else 1e-5)
    layer, other = (m.model.layers[1].mlp.down_proj for m in (live, own))
    differing = int((layer.weight != other.weight).sum())
    assert differing <= (layer.weight.numel() // 1000 if kind == "int8" else 0)
