"""A whole model on a GPU: its gradients, and what ``finetune`` makes of it there."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import CheckpointConfig
from unsloth_cupy.models import create, load, quantize

from ..harness.parity import within_rule
from ..machines.stand_in import gpu
from .peers import CONFIGS, MIXTURES, SIZES

KINDS = ("llama", "gemma2", "qwen3")
MXFP4 = Path(__file__).parent.parent / "golden" / "models" / "gpt_oss_mxfp4"


@pytest.mark.parametrize("checkpoint", [None, CheckpointConfig(), CheckpointConfig(offload=True)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_runs_on_arrays_of_cupy(kind: str, checkpoint: CheckpointConfig | None) -> None:
    """On the stand-in, whose functions of CuPy have CuPy's own rules."""
    config = SIZES | {"head_dim": 16} | CONFIGS[kind]
    with gpu(devices=2) as machine:
        machine.strict = False
        model = create(config, seed=0, device="cuda")
        tokens = machine.place(np.random.default_rng(0).integers(3, 97, (2, 48)))
        loss, gradients = model.loss_and_gradients(tokens, tokens, checkpoint=checkpoint)
        assert loss.shape == ()
        expected = {name: array.shape for name, array in model.parameters.items()}
        assert {name: array.shape for name, array in gradients.items()} == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [False, True])
def test_rows_and_tables_of_an_adapter_run_on_arrays_of_cupy(tied: bool, dtype: str) -> None:
    config = SIZES | {"model_type": "llama", "tie_word_embeddings": tied}
    with gpu(devices=2) as machine:
        machine.strict = False
        tokens = machine.place(np.random.default_rng(0).integers(3, 97, (2, 48)))
        both = {"embed_tokens": [3, 96], "lm_head": [5, 6, 7]}
        for outer in (
            {"tokens": [3, 96] if tied else both},
            {"modules": ["embed_tokens"] if tied else ["embed_tokens", "lm_head"]},
        ):
            model = create(config, seed=0, device="cuda", dtype=dtype)
            model.resize(100, multiple=8)
            model.add_adapter(2, **outer)
            for _ in range(2):  # the second replays what the first has recorded
                loss, gradients = model.loss_and_gradients(tokens, tokens)
                _, others = model.value_and_gradients(
                    lambda model: model.log_probs(tokens, tokens).log_probs.sum()
                )
            expected = {name: array.shape for name, array in model.trainable.items()}
            for found in (gradients, others):
                assert {name: array.shape for name, array in found.items()} == expected
            assert loss.shape == ()
            assert model.logits(tokens).shape == (2, 48, 104)
            model.merge_adapter()
            assert model.table.shape == (104, 32)


def test_rows_with_adapters_of_their_own_run_on_arrays_of_cupy() -> None:
    with gpu(devices=2) as machine:
        machine.strict = False
        tokens = machine.place(np.random.default_rng(0).integers(3, 97, (3, 24)))
        model = create(SIZES | {"model_type": "llama"}, seed=0, device="cuda", dtype="bfloat16")
        model.add_adapter(2, name="plain")
        model.add_adapter(4, name="dora", dora=True)
        model.mix_adapters({"plain": 0.5}, "half")
        for names in (["plain", None, "half"], ["plain", "dora", "plain"]):
            rows = model.by_rows(names)
            for _ in range(2):  # the second replays the first
                _, gradients = rows.loss_and_gradients(tokens, tokens)
            expected = {name: array.shape for name, array in rows.trainable.items()}
            assert {name: array.shape for name, array in gradients.items()} == expected
            assert rows.generate(tokens, max_new_tokens=3).shape == (3, 27)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["all", "lora", "nf4-double", "int8"])
@pytest.mark.parametrize(
    "label",
    [
        "mixtral",
        "gpt_oss",
        "qwen2_moe",
        "phimoe",
        "glm4_moe groups",
        "deepseek_v2",
        "glm4_moe_lite",
        "qwen3_next",
    ],
)
def test_mixtures_run_on_arrays_of_cupy(label: str, way: str) -> None:
    with gpu(devices=2) as machine:
        machine.strict = False
        tokens = machine.place(np.random.default_rng(0).integers(3, 97, (2, 24)))
        model = create(SIZES | MIXTURES[label], seed=0, device="cuda", dtype="bfloat16")
        if way in ("nf4-double", "int8"):
            quantize(model, way)
        if way != "all":
            model.add_adapter(2)
        expected = {name: array.shape for name, array in model.trainable.items()}
        for checkpoint in (None, None, CheckpointConfig()):  # the second replays the first
            loss, gradients = model.loss_and_gradients(tokens, tokens, checkpoint=checkpoint)
            assert loss.shape == ()
            assert {name: array.shape for name, array in gradients.items()} == expected
        assert model.generate(tokens, max_new_tokens=3).shape == (2, 27)
        if way != "all":
            model.merge_adapter()
            assert model.logits(tokens).shape == (2, 24, 97)


def test_mxfp4_runs_on_arrays_of_cupy() -> None:
    with gpu(devices=2) as machine:
        machine.strict = False
        tokens = machine.place(np.random.default_rng(0).integers(3, 97, (2, 24)))
        model = load(MXFP4, device="cuda")
        for rank in (None, 2):
            if rank is not None:
                model.add_adapter(rank)
            _, gradients = model.loss_and_gradients(tokens, tokens)
            assert gradients.keys() == model.trainable.keys()
        assert model.generate(tokens, max_new_tokens=3).shape == (2, 27)


@pytest.mark.parametrize("kind", ["Sequence", "Token"])
def test_classifiers_and_embeddings_run_on_arrays_of_cupy(kind: str) -> None:
    config = SIZES | {"model_type": "llama", "num_labels": 3}
    config["architectures"] = [f"LlamaFor{kind}Classification"]
    with gpu(devices=2) as machine:
        machine.strict = False
        tokens = machine.place(np.random.default_rng(0).integers(3, 97, (2, 48)))
        mask = machine.place(np.arange(48) < np.array([[40], [48]]))
        model = create(config, seed=0, device="cuda", dtype="bfloat16")
        labels = [np.zeros((2, 48), np.int64)]
        if kind == "Sequence":
            labels = [np.array([0, 2]), np.zeros((2, 3), np.float32)]
        for each in map(machine.place, labels):
            loss, gradients = model.loss_and_gradients(tokens, each, mask=mask)
            assert loss.shape == ()
            assert gradients["score.weight"].shape == (3, 32)
        for pooling in ("mean", "last"):
            value, _ = model.value_and_gradients(
                lambda model: model.embeddings(tokens, mask=mask, pooling=pooling).sum()  # noqa: B023
            )
            assert value.shape == ()


@pytest.mark.gpu
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, "mixtral", "gpt_oss"])
def test_gradients_are_those_of_the_definition(kind: str, offload: bool) -> None:
    import cupy

    config = SIZES | {"head_dim": 16} | (CONFIGS | MIXTURES)[kind]
    drawn = np.random.default_rng(0).integers(3, 97, (2, 48))
    weights = create(config, seed=0).parameters
    actual: dict[str, dict[str, Any]] = {}
    for name, dtype in (("exact", "float64"), ("plain", "float32"), ("kernels", "float32")):
        there = name == "kernels"
        model = create(config, seed=0, dtype=dtype, device="cuda" if there else None)
        place = cupy.asarray if there else np.asarray
        model.parameters = {n: place(a.astype(dtype)) for n, a in weights.items()}
        tokens = place(drawn)
        checkpoint = CheckpointConfig(offload=offload) if there else None
        loss, gradients = model.loss_and_gradients(tokens, tokens, checkpoint=checkpoint)
        actual[name] = {"loss": np.asarray([float(loss)], dtype), **gradients}
    within_rule(actual["plain"], actual["exact"], actual["kernels"])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--dtype", "bfloat16", "--state-bits", 8, "--recompute-every", 1],
        ["--dtype", "float16", "--accumulate", 2, "--chunked-mlp"],
    ],
    ids=str,
)
def test_finetune_learns(options: list[Any], tmp_path: Path) -> None:
    testing = pytest.importorskip("click.testing", reason="needs the extra `cli`")
    pytest.importorskip("tokenizers", reason="needs the extra `cli`")
    from unsloth_cupy.cli.commands import group

    draw = random.Random(0)
    words = [["cat", "dog", "fish"], ["sees", "hears", "likes"], ["birds", "horses", "mice"]]
    lines = [" ".join([f"{i}. The", *map(draw.choice, words)]) for i in range(600)]
    (tmp_path / "text.txt").write_text("\n\n".join(lines))
    sizes = ["--layers", 2, "--hidden", 64, "--vocabulary", 300, "--tokens", 32, "--steps", 60]
    given = ["--text", tmp_path / "text.txt", "--out", tmp_path / "run", *sizes, *options]
    command = [*map(str, ["finetune", "--device", "cuda", *given])]
    done = testing.CliRunner().invoke(group, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    log = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
    losses = [line["held_out_loss"] for line in log if "held_out_loss" in line]
    baseline = next(line["unigram_baseline"] for line in log if "unigram_baseline" in line)
    assert losses[-1] < baseline < losses[0]
