"""Models of many families against what transformers computed, kept in tests/golden/models."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from unsloth_cupy import CheckpointConfig, Mxfp4
from unsloth_cupy.models import load
from unsloth_cupy.models.configs.names import stored_name
from unsloth_cupy.models.folders.expert_files import file_tensors

from ..golden.golden import model_case
from ..harness.tracked import tracked

ROOT = Path(__file__).parent.parent / "golden" / "models"
FAMILIES = [path.parent.name for path in tracked("tests/golden/models/*/config.json")]
MIXTURES = ("mixtral", "qwen3_moe", "qwen3_moe_norm", "gpt_oss", "gpt_oss_mxfp4", "minimax")


def in_file(model, arrays):
    """Return arrays by parameter as the tensors that the file of a model holds."""
    named = {name: {name: array} for name, array in arrays.items()}
    for name, tensors in file_tensors(model.config).items():
        if name in named:
            named[name] = {stored: place.of(arrays[name]) for stored, place in tensors.items()}
    tensors = ((stored, array) for each in named.values() for stored, array in each.items())
    return {stored_name(stored, model.config.body): array for stored, array in tensors}


@pytest.mark.parametrize("family", FAMILIES)
class TestGolden:
    def test_logits(self, family):
        data = model_case(ROOT / family).data
        logits = load(ROOT / family, dtype="float32").logits(
            data["input_ids"], mask=data["attention_mask"]
        )
        real = data["attention_mask"] == 1
        assert np.abs(logits - data["logits"])[real].max() < 1e-4

    def test_loss_and_gradients(self, family):
        case = model_case(ROOT / family)
        model, data = load(ROOT / family, dtype="float32"), case.data
        arguments = (data["input_ids"], data["labels"])
        loss, gradients = model.loss_and_gradients(*arguments, mask=data["attention_mask"])
        assert abs(loss - data["loss"]) < 1e-5
        assert case.compare_gradients(in_file(model, gradients)) < 1e-4
        assert loss == model.loss(*arguments, mask=data["attention_mask"])

    @pytest.mark.parametrize("prompts", ["generate_single", "generate_padded"])
    def test_greedy_tokens(self, family, prompts):
        data = model_case(ROOT / family).data
        prompt, tokens = data[f"{prompts}/prompt"], data[f"{prompts}/tokens"]
        new = tokens.shape[1]
        made = load(ROOT / family, dtype="float32").generate(
            prompt, mask=data[f"{prompts}/mask"], max_new_tokens=new, min_new_tokens=new
        )
        np.testing.assert_array_equal(made, np.concatenate([prompt, tokens], axis=1))

    def test_low_precision(self, family):
        """In bfloat16 a token's logits are off by a few roundings of 2**-8, not by more.

        Near a tie of a router a token has other experts, which later tokens see: of mixtures a
        quarter of the tokens counts.
        """
        data = model_case(ROOT / family).data
        model = load(ROOT / family, dtype="bfloat16")
        logits = model.logits(data["input_ids"], mask=data["attention_mask"])
        assert logits.dtype.name == "bfloat16"
        real = data["attention_mask"] == 1
        expected = data["logits"][real]
        errors = np.linalg.norm(logits.astype(np.float32)[real] - expected, axis=-1)
        norms = np.linalg.norm(expected, axis=-1)
        if model.config.experts is not None:
            assert np.quantile(errors / norms, 0.25) < 0.05
        else:
            assert np.linalg.norm(errors) < 0.05 * np.linalg.norm(norms)


@pytest.mark.parametrize("family", MIXTURES)
class TestMixtures:
    def test_loss_of_the_router(self, family, tmp_path):
        """It is added where config.json asks for it, without padding, of all layers together."""
        case = model_case(ROOT / family)
        shutil.copy(ROOT / family / "model.safetensors", tmp_path)
        settings = {**case.config, "output_router_logits": True}
        (tmp_path / "config.json").write_text(json.dumps(settings))
        model, data = load(tmp_path, dtype="float32"), case.data
        arguments, mask = (data["input_ids"], data["labels"]), data["attention_mask"]
        loss, gradients = model.loss_and_gradients(*arguments, mask=mask)
        assert abs(loss - data["loss_with_aux"]) < 1e-5
        assert loss == model.loss(*arguments, mask=mask)
        own = in_file(model, gradients)
        expected = {n.removeprefix("aux/grad/"): g for n, g in data.items() if "aux/grad/" in n}
        assert expected
        for name, gradient in expected.items():
            assert np.linalg.norm(own[name] - gradient) < 1e-4 * np.linalg.norm(gradient), name
        again, kept = model.loss_and_gradients(*arguments, mask=mask, checkpoint=CheckpointConfig())
        assert again == loss
        for name, gradient in gradients.items():
            np.testing.assert_array_equal(kept[name], gradient, err_msg=name)

    def test_the_loss_of_the_router_is_added_once_by_parts(self, family, tmp_path):
        """Parts of a batch weigh it by their labels."""
        data = model_case(ROOT / family).data
        model = load(ROOT / family, dtype="float32")
        experts = replace(model.config.experts, balance=0.1)
        ids = data["input_ids"][:1]
        count = ids.shape[1] - 1
        plain = model.loss(ids, ids)
        model.config = replace(model.config, experts=experts)
        added = model.loss(ids, ids) - plain
        assert added > 0.1 * experts.k * (1 - 1e-6)  # the smallest, of even use, is k
        half = model.loss(ids, ids, count=2 * count)
        assert abs(half - (plain + added) / 2) < 1e-6


def test_mxfp4_is_read_exactly():
    """Codes in the file are the same numbers as in the dtype of the model."""
    case = model_case(ROOT / "gpt_oss_mxfp4")
    for dtype in ("float32", None):
        model = load(ROOT / "gpt_oss_mxfp4", dtype=dtype)
        stacks = {n: v for n, v in model.parameters.items() if isinstance(v, Mxfp4)}
        assert len(stacks) == 4
        own = in_file(model, {name: stack.dequantize() for name, stack in stacks.items()})
        for name, values in case.data.items():
            if name.startswith("dequantized/"):
                read = own[name.removeprefix("dequantized/")].astype(np.float32)
                np.testing.assert_array_equal(read, values.astype(np.float32))
