"""Models of thirteen families against what transformers computed, kept in tests/golden/models."""

from pathlib import Path

import numpy as np
import pytest

from unsloth_cupy.models import load

from ..golden.golden import model_case
from ..harness.tracked import tracked

ROOT = Path(__file__).parent.parent / "golden" / "models"
FAMILIES = [path.parent.name for path in tracked("tests/golden/models/*/config.json")]


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
        assert case.compare_gradients(gradients) < 1e-4
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
        """The checkpoint's own bfloat16 is off by a few roundings of 2**-8, not by more."""
        data = model_case(ROOT / family).data
        model = load(ROOT / family)
        logits = model.logits(data["input_ids"], mask=data["attention_mask"])
        assert logits.dtype.name == "bfloat16"
        real = data["attention_mask"] == 1
        error = np.linalg.norm((logits.astype(np.float32) - data["logits"])[real])
        assert error < 0.05 * np.linalg.norm(data["logits"][real])
