"""Parameters that 16 bits do not replace: those that transformers has in float32 then."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unsloth_cupy.finetune import Settings, Trainer
from unsloth_cupy.finetune.data.tokenizer import END, train_tokenizer
from unsloth_cupy.models import create, load, merge
from unsloth_cupy.models.configs.config import CORRECTION
from unsloth_cupy.models.parse import parse
from unsloth_cupy.training.precision import DTYPES, compute_copies

from ..harness.sampling import Sample
from .peers import CONFIGS, MIXTURES, RELATIVES, SIZES, class_of

EVERY = CONFIGS | RELATIVES | MIXTURES
HALVES = ("float16", "bfloat16")
TURNS = 3  # days in which every family has its turn


def kept(label: str, dtype: str) -> set[str]:
    """Return the parameters that transformers has in float32 in a model of a dtype."""
    import torch
    import transformers
    from transformers.core_model_loading import build_glob_alternation

    kind = getattr(torch, dtype)
    with torch.device("meta"):
        known = transformers.AutoConfig.for_model(**SIZES | EVERY[label])
        model = class_of(known)._from_config(known, dtype=kind)
    plan = model._get_dtype_plan(kind)
    named = build_glob_alternation([*plan])[0].search if plan else lambda name: None
    every = model.state_dict().items()
    return {name for name, array in every if named(name) or array.dtype == torch.float32}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("label", Sample.one_in(TURNS, EVERY))
def test_transformers_has_them_in_float32(label: str, dtype: str) -> None:
    pytest.importorskip("transformers", reason="needs the extra `peers`")
    config, expected = parse(SIZES | EVERY[label]), kept(label, dtype)
    actual = {n for n in config.shapes() if config.dtype_of(n, DTYPES[dtype]) == np.float32}
    assert expected <= actual
    assert all(name.endswith(CORRECTION) for name in actual - expected)  # small, and of a choice


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    text = tmp_path_factory.mktemp("words") / "text.txt"
    text.write_text(" ".join(np.random.default_rng(0).choice(["a", "tree", "walks"], 400)))
    return text, train_tokenizer(iter([text.read_text()]), 300)


@pytest.mark.parametrize(
    ("label", "dtype", "count"),
    [
        ("olmo_hybrid", "bfloat16", 2),
        ("kimi_linear", "bfloat16", 4),
        ("bailing_hybrid", "bfloat16", 10),
        ("glm4_moe", "float16", 4),
        ("gpt_oss", "float16", 7),
        ("gpt_oss", "bfloat16", 0),
    ],
)
def test_no_way_rounds_them(
    label: str, dtype: str, count: int, words: tuple[Path, Any], tmp_path: Path
) -> None:
    """They are loaded, trained, saved and merged in float32, in models of 16 bits."""
    text, tokenizer = words
    own = {"vocab_size": tokenizer.get_vocab_size(), "eos_token_id": tokenizer.token_to_id(END)}
    whole = create(SIZES | EVERY[label] | own, seed=0)
    rng, names = np.random.default_rng(0), set[str]()
    for name, array in whole.parameters.items():
        if DTYPES[dtype] in whole.config.widened(name):
            array[...] = array + rng.standard_normal(array.shape, np.float32) / 8
            names.add(name)
    assert len(names) == count
    whole.save(base := tmp_path / "base")
    tokenizer.save(str(base / "tokenizer.json"))
    model = load(base, dtype=dtype)
    model.save(tmp_path / "saved")
    model.add_adapter(2)
    model.save_adapter(tmp_path / "adapter")
    merge(tmp_path / "adapter", tmp_path / "merged", dtype=dtype, base=base)
    model.merge_adapter()
    loaded = load(tmp_path / "saved"), load(tmp_path / "merged")
    for each in (model, *loaded, create(whole.texts["config.json"], seed=0, dtype=dtype)):
        wide = {n for n, array in each.parameters.items() if array.dtype == np.float32}
        assert wide == names
    for name in names:
        for each in (model, *loaded):
            np.testing.assert_array_equal(each.parameters[name], whole.parameters[name])
    assert not names & compute_copies(whole.narrowed(DTYPES[dtype]), dtype).keys()
    settings = Settings(
        steps=1, batch=2, tokens=8, dtype=dtype, save_dtype=dtype, lr=1e-3, out=tmp_path / "run"
    )
    run = Trainer(base, text, settings).train()
    trained, final = run.model.parameters, load(run.files.model).parameters
    for name in names:
        assert trained[name].dtype == np.float32, name
        np.testing.assert_array_equal(final[name], trained[name])
