"""Patched models that read images: the loss and gradients of transformers, and steps of TRL."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra `peers` (torch)")
transformers = pytest.importorskip("transformers", reason="needs the extra `peers`")

from unsloth_cupy.interop.huggingface import patch  # noqa: E402

from ..golden import golden  # noqa: E402
from ..golden.generate_methods import HERE, tokenizer  # noqa: E402
from ..harness.tracked import tracked  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # of other libraries
FOLDER = HERE / "images"
KINDS = [path.parent.name for path in tracked("tests/golden/images/*/config.json")]
# modules that stay, each with its reason
LEFT = {
    "it has no gate and up with one activation",  # MLPs of towers; torch's GELU reads less
    "it was not called",  # towers, as the trial has tokens alone
    "it does not always normalize and rotate, once each",  # Gemma 4: layers without keys
}


def model_of(kind: str) -> Any:
    auto = transformers.AutoModelForImageTextToText
    return auto.from_pretrained(FOLDER / kind, dtype=torch.float32, attn_implementation="sdpa")


def batch_of(kind: str) -> dict[str, Any]:
    """Return the arguments of the golden call."""
    data = golden.model_case(FOLDER / kind).data
    names = [name for name in data if "/" not in name and name not in ("logits", "loss")]
    arrays = {name: torch.from_numpy(data[name]) for name in names}
    return {n: a.long() if a.dtype == torch.int32 else a for n, a in arrays.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_of_models_that_read_images(kind: str) -> None:
    model, case = model_of(kind), golden.model_case(FOLDER / kind)
    report = patch(model)
    left = {row.reason for row in report.rows if row.reason}
    assert left <= LEFT, str(report)
    loss = model(**batch_of(kind)).loss
    loss.backward()
    assert loss.item() == pytest.approx(case.facts["loss"], rel=1e-6)
    zero = {f"gradnorm/{name}" for name in case.facts["gradient_vanishes"]}
    case = replace(case, data={n: a for n, a in case.data.items() if n not in zero})
    gradients = {n: w.grad.numpy() for n, w in model.named_parameters() if w.grad is not None}
    assert case.compare_gradients(gradients) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_three_steps_of_trl_with_images(kind: str, tmp_path: Any) -> None:
    """A patched model trains as an unpatched one: losses of three steps, on a golden batch."""
    pytest.importorskip("trl", reason="needs the extra `peers` (trl)")
    expected, actual = (losses(kind, tmp_path / str(way), patched=way) for way in (False, True))
    assert expected[-1] < expected[0]
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def losses(kind: str, folder: Any, *, patched: bool) -> list[float]:
    import datasets
    import trl

    model, batch = model_of(kind), batch_of(kind)
    if patched:
        patch(model)
    arguments = trl.SFTConfig(
        str(folder), per_device_train_batch_size=1, max_steps=3, learning_rate=1e-3,
        use_cpu=True, report_to=[], logging_steps=1, bf16=False, save_strategy="no",
        disable_tqdm=True, remove_unused_columns=False, lr_scheduler_type="constant",
        dataset_kwargs={"skip_prepare_dataset": True},
    )  # fmt: skip
    words = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer(), eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    trainer = trl.SFTTrainer(
        model, args=arguments, train_dataset=datasets.Dataset.from_list([{"row": 0}] * 3),
        processing_class=words, data_collator=lambda _: dict(batch),
    )  # fmt: skip
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]
