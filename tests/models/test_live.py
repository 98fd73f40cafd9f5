"""The same weights in a live model of transformers and in a Transformer."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra `peers` (torch)")
transformers = pytest.importorskip("transformers", reason="needs the extra `peers` (transformers)")

from unsloth_cupy.errors import ConfigError, FrameworkError  # noqa: E402
from unsloth_cupy.models import create, from_torch  # noqa: E402

from ..interop.families import NINE, model_of, texts  # noqa: E402


@pytest.mark.parametrize("family", NINE)
def test_logits_and_tokens_are_equal(family):
    live = model_of(family).eval()
    model, tokens = from_torch(live), texts("whole")["input_ids"]
    expected = live(tokens).logits.detach()
    torch.testing.assert_close(model.logits(tokens), expected, rtol=1e-4, atol=2e-5)
    plain = live.generate(tokens, max_new_tokens=4, do_sample=False)
    assert torch.equal(model.generate(tokens, max_new_tokens=4)[:, : plain.shape[1]], plain)
    back = model.to_torch()
    assert type(back) is type(live)
    torch.testing.assert_close(back(tokens).logits, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_memory_is_shared_both_ways(dtype, tmp_path):
    live = model_of("llama").to(dtype)
    model = from_torch(live)
    back = model.to_torch()
    for name, weight in live.named_parameters():
        address = model.parameters[name].ctypes.data
        assert weight.data_ptr() == address == back.get_parameter(name).data_ptr()
    with torch.no_grad():
        live.model.norm.weight.fill_(2.0)
    assert np.all(model.parameters["model.norm.weight"] == 2)
    model.parameters["model.norm.weight"][...] = 3
    assert torch.all(back.model.norm.weight == 3)
    assert back.dtype is dtype
    model.save(tmp_path)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(loaded.lm_head.weight, live.lm_head.weight)


def test_a_model_of_ones_own_goes_to_torch():
    sizes = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    model = create(sizes | heads | {"model_type": "qwen3"}, seed=0)
    live, tokens = model.to_torch(), torch.tensor([[3, 5, 7]])
    torch.testing.assert_close(live(tokens).logits.detach(), model.logits(tokens))
    model.add_adapter(2, seed=0)
    with pytest.raises(ConfigError, match=r"call merge_adapter\(\) first"):
        model.to_torch()


def test_what_is_not_known_is_refused():
    with pytest.raises(FrameworkError, match="Linear is not a model of transformers"):
        from_torch(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="from_torch: config: model_type is 'bloom'"):
        from_torch(model_of("bloom"))
    live = model_of("llama")
    live.lm_head.half()
    with pytest.raises(ConfigError, match=r"model\.to\(dtype\)"):
        from_torch(live)
    live = model_of("llama")
    assert from_torch(live.model).head == "none"
    del live.lm_head
    with pytest.raises(ConfigError, match=r"lm_head\.weight is missing in a llama"):
        from_torch(live)
    live = model_of("llama")
    live.resize_token_embeddings(50)
    live.config.vocab_size = 97
    with pytest.raises(ConfigError, match="its config implies"):
        from_torch(live)
    with pytest.raises(FrameworkError, match="load the weights on a CPU or a GPU first"):
        from_torch(model_of("llama").to("meta"))
