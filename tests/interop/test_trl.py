"""Trainers of TRL on a patched model, and with this library's head; their first steps are ours."""

import json

import numpy as np
import pytest

trl = pytest.importorskip("trl", reason="needs the extra `peers` (trl)")
datasets = pytest.importorskip("datasets", reason="needs the extra `peers` (trl)")
torch = pytest.importorskip("torch", reason="needs the extra `peers` (torch)")
transformers = pytest.importorskip("transformers", reason="needs the extra `peers`")

from unsloth_cupy import linear_log_probs, losses  # noqa: E402
from unsloth_cupy.interop import huggingface  # noqa: E402
from unsloth_cupy.models import from_torch  # noqa: E402

from ..golden import generate_methods as golden  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # what others warn of is theirs
LLAMA = golden.HERE / "models" / "llama"


class Head:
    """This library's head, called as TRL calls its own."""

    calls = 0

    @classmethod
    def apply(cls, x, weight, bias, labels, temperature, chunk, softcap, scale, outputs):
        cls.calls += 1
        options = {"temperature": temperature, "softcap": softcap, "scale": scale}
        return tuple(linear_log_probs(x, weight, labels, bias, **options))


def model_of(kind, share=1.0):
    """Return the golden model, with its weights times a number."""
    head = {"num_labels": 1} if kind == "SequenceClassification" else {}
    auto = getattr(transformers, f"AutoModelFor{kind}")
    model = auto.from_pretrained(LLAMA, dtype=torch.float32, **head)
    with torch.no_grad():
        if head:
            weight = golden.head(1, model.config.hidden_size)
            model.score.weight.copy_(torch.from_numpy(weight))
        for parameter in model.parameters():
            parameter.mul_(share)
    return model


def distinct(completions, **_):
    """Return a reward of each completion."""
    return [float(len(set(each.split()))) for each in completions]


def trainer(name, folder, callbacks=(), **options):
    """Return a trainer of TRL for two steps on words."""
    rows = {"KTO": golden.rated, "Reward": golden.scored}.get(name, golden.pairs)()
    more = {"ref_model": model_of("CausalLM", 0.9)} if name in ("DPO", "KTO") else {}
    if name == "GRPO":
        rows = [{"prompt": row["prompt"]} for row in rows]
        more["reward_funcs"] = distinct
        options = {"num_generations": 2, "max_completion_length": 6} | options
    arguments = getattr(trl, f"{name}Config")(
        str(folder), per_device_train_batch_size=len(rows), max_steps=2, max_grad_norm=1e9,
        use_cpu=True, report_to=[], logging_steps=1, bf16=False, disable_dropout=True,
        save_strategy="no", disable_tqdm=True, **options,
    )  # fmt: skip
    words = transformers.PreTrainedTokenizerFast(
        tokenizer_object=golden.tokenizer(), eos_token="</s>", pad_token="<pad>", unk_token="<unk>"
    )
    kind = "SequenceClassification" if name == "Reward" else "CausalLM"
    return getattr(trl, f"{name}Trainer")(
        model_of(kind), args=arguments, train_dataset=datasets.Dataset.from_list(rows),
        processing_class=words, callbacks=[*callbacks], **more,
    )  # fmt: skip


def steps(trained):
    """Return loss and norm of the gradient of each step."""
    trained.train()
    lines = [line for line in trained.state.log_history if "loss" in line]
    assert len(lines) == 2
    return [(line["loss"], line["grad_norm"]) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["DPO", "KTO", "Reward", "GRPO"])
def test_a_patched_model_and_this_head_train_the_same(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    expected = steps(trainer(name, tmp_path))
    callback = huggingface.PatchCallback()
    patched = steps(trainer(name, tmp_path, [callback]))
    np.testing.assert_allclose(patched, expected, rtol=1e-5, atol=1e-6)
    taken = callback.report.taken
    assert taken["norm"] == 5
    assert taken["attention"] == 1
    if name == "Reward":  # its head is a matrix of one row
        return
    monkeypatch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", Head)
    Head.calls = 0
    ours = steps(trainer(name, tmp_path, [huggingface.PatchCallback()]))
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)
    assert Head.calls


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"beta": 0.0}, {"loss_type": "grpo", "temperature": 0.7}, {"loss_type": "dr_grpo"}],
    ids=json.dumps,
)
def test_the_first_step_of_grpo_is_ours(options, tmp_path, monkeypatch):
    """Loss and gradient of the answers that TRL drew; the others' are in tests/finetune."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    seen = []
    made = trainer("GRPO", tmp_path, **options)
    compute = made._compute_loss

    def noted(model, inputs):
        loss = compute(model, inputs)
        seen.append(({name: each for name, each in inputs.items()}, float(loss.detach())))
        return loss

    monkeypatch.setattr(made, "_compute_loss", noted)
    (_, norm), _ = steps(made)
    inputs, expected = seen[0]
    parts = (inputs[f"{part}_ids"].numpy() for part in ("prompt", "completion"))
    masks = [inputs[f"{part}_mask"].numpy() != 0 for part in ("prompt", "completion")]
    tokens, real = np.concatenate([*parts], axis=1), np.concatenate(masks, axis=1)
    drawn = np.zeros(real.shape, bool)
    drawn[:, masks[0].shape[1] - 1 : -1] = masks[1]
    gains, kind = inputs["advantages"].numpy(), options.get("loss_type", "dapo")
    ours = from_torch(model_of("CausalLM"))

    def loss(model):
        temperature = options.get("temperature", 1.0)
        found = model.log_probs(tokens, tokens, mask=real, temperature=temperature).log_probs
        count = len(tokens) * 6 if kind == "dr_grpo" else None
        return losses.policy(found, drawn, gains, kind=kind, count=count)

    value, gradients = ours.value_and_gradients(loss)
    assert float(value) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    total = np.sqrt(sum((each.astype(np.float64) ** 2).sum() for each in gradients.values()))
    assert total == pytest.approx(norm, rel=1e-4)
