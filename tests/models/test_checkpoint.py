"""Models whose blocks are computed again on the way back."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from unsloth_cupy import CheckpointConfig
from unsloth_cupy.models import Transformer, create, load

from ..golden.golden import model_case
from ..harness.moving import moving
from ..harness.tracked import tracked

ROOT = Path(__file__).parent.parent / "golden" / "models"
FAMILIES = [path.parent.name for path in tracked("tests/golden/models/*/config.json")]
CONFIGS = [
    CheckpointConfig(),
    CheckpointConfig(recompute_every=2, offload=True),
    CheckpointConfig(keep=("attention_forward",)),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_equal_to_the_last_bit(family: str) -> None:
    data = model_case(ROOT / family).data
    model = load(ROOT / family, dtype="float32")
    batch, mask = (data["input_ids"], data["labels"]), data["attention_mask"]
    loss, gradients = model.loss_and_gradients(*batch, mask=mask)
    for config in CONFIGS:
        with moving() as sizes:
            again, actual = model.loss_and_gradients(*batch, mask=mask, checkpoint=config)
        assert bool(sizes) is config.offload
        assert again == loss
        for name, gradient in gradients.items():
            np.testing.assert_array_equal(actual[name], gradient, err_msg=f"{config} {name}")


@pytest.fixture(scope="module")
def deep() -> Transformer:
    config = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    return create(config, seed=0, dtype="float32")


@pytest.fixture(scope="module")
def kept(deep: Transformer) -> int:
    """The peak of a step that keeps all activations."""
    return peak(deep, None)


def peak(model: Transformer, config: CheckpointConfig | None) -> int:
    """Return the bytes of NumPy beyond weights and gradients at the worst moment of a step."""
    tokens = np.arange(2 * 256).reshape(2, 256) % 64
    model.loss_and_gradients(tokens[:, :2], tokens[:, :2], checkpoint=config)
    weights = sum(array.nbytes for array in model.parameters.values())
    tracemalloc.start()
    kept = model.loss_and_gradients(tokens, tokens, checkpoint=config)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(kept[1]) == len(model.parameters)
    return most - weights


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "share"),
    [
        (CheckpointConfig(), 0.3),
        (CheckpointConfig(recompute_every=4), 0.4),
        (CheckpointConfig(keep=("attention_forward",)), 0.5),
    ],
    ids=["every block", "every 4 blocks", "attention kept"],
)
def test_activations_take_less_than_half(
    deep: Transformer, kept: int, config: CheckpointConfig, share: float
) -> None:
    assert peak(deep, config) < share * kept
