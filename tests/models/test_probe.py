"""What is saved or exported computes what the model does, or has no name."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import models
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.models.adapters.adapter import Adapter
from unsloth_cupy.models.adapters.probe import check_same, check_written, explained, own_tokens
from unsloth_cupy.models.folders import checkpoint_files

from .exported import IN_LLAMA_CPP, make
from .peers import CONFIGS, MIXTURES, RELATIVES, SIZES

WIDE = {"model_type": "llama", "hidden_size": 256}


def adapted(folder: Path, config: Any = WIDE, **options: Any) -> models.Transformer:
    """Return a model with an adapter that changes it, both saved."""
    model = make(folder / "base", config)
    model.add_adapter(2, base=str(folder / "base"), **options)
    draw = np.random.default_rng(1)
    for array in model.adapter.parameters.values():
        array[...] += 0.05 * draw.standard_normal(array.shape)
    model.save_adapter(folder / "adapter")
    return model


@pytest.mark.parametrize("kind", ["f32", "q4_0", "q2_k"])
@pytest.mark.parametrize("place", ["folder", "memory"])
def test_an_export_of_other_weights_is_refused(
    kind: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A merge that leaves a layer out is not rounding, however coarse the file is."""
    model = adapted(tmp_path)
    source: Any = model if place == "memory" else tmp_path / "adapter"
    merge = Adapter.merge

    def without(self: Any, name: str, weight: Any, *given: Any, **options: Any) -> Any:
        lost = name.endswith("layers.1.mlp.up_proj.weight")
        return weight if lost else merge(self, name, weight, *given, **options)

    monkeypatch.setattr(Adapter, "merge", without)
    problem = r"outputs of the written model differ from those of .* by a relative 0\.\d+, and"
    with pytest.raises(ConfigError, match=problem):
        models.export_gguf(source, tmp_path / "m.gguf", kind=kind, tokenizer=tmp_path / "base")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["adapter", "base"]
    monkeypatch.undo()
    models.export_gguf(source, tmp_path / "m.gguf", kind=kind, tokenizer=tmp_path / "base")


@pytest.mark.parametrize("kind", ["f32", "bf16", "q3_k_m"])
def test_a_file_with_other_weights_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one whose rows are not in llama.cpp's order."""
    model = adapted(tmp_path)
    monkeypatch.setattr("unsloth_cupy.models.gguf._tensors.interleaved", lambda array, *_: array)
    problem = r"the written model\.layers\.0\.self_attn\.q_proj\.weight has an error of"
    with pytest.raises(ConfigError, match=problem):
        models.export_gguf(model, tmp_path / "m.gguf", kind=kind, tokenizer=tmp_path / "base")
    assert not (tmp_path / "m.gguf").exists()


@pytest.mark.parametrize(
    "label", [*(pytest.param(each, marks=pytest.mark.slow) for each in IN_LLAMA_CPP), "gemma3"]
)
def test_what_rounding_explains_is_written(label: str, tmp_path: Path) -> None:
    """Of every family, with what llama.cpp has in another form: norms times a factor, say."""
    config = (CONFIGS | RELATIVES | IN_LLAMA_CPP)[label]
    adapted(tmp_path, config)
    for kind in ("f32", "q4_0"):
        models.export_gguf(tmp_path / "adapter", tmp_path / f"{kind}.gguf", kind=kind)


@pytest.mark.parametrize(
    "options",
    [
        {"dora": True}, {"tokens": [5, 9]}, {"modules": ["embed_tokens"]}, {"init": "pissa"},
        {"targets": ["lm_head", "q_proj"]}, {"merge_into": "q4_0"}, {"merge_into": "nf4"},
    ],
    ids=str,
)  # fmt: skip
def test_every_part_of_an_adapter_is_compared(options: dict[str, Any], tmp_path: Path) -> None:
    model = adapted(tmp_path, WIDE | {"tie_word_embeddings": False}, **options)
    for number, source in enumerate((model, tmp_path / "adapter")):
        kind = "q4_0" if options.get("merge_into") == "q4_0" else "q8_0"
        file = tmp_path / f"{number}.gguf"
        models.export_gguf(source, file, kind=kind, tokenizer=tmp_path / "base")


@pytest.mark.parametrize("config", [WIDE, MIXTURES["mixtral"]], ids=["llama", "mixtral"])
def test_a_save_of_other_weights_is_refused(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder keeps what it had."""
    model = models.create(SIZES | config, seed=0)
    model.save(tmp_path / "m")
    before = {each.name: each.read_bytes() for each in (tmp_path / "m").iterdir()}
    tensors_of = checkpoint_files.tensors_of

    def shifted(name: str, *given: Any) -> Any:
        own = tensors_of(name, *given)
        rolled = name == "lm_head.weight"
        return {n: np.roll(a, 1, axis=0) for n, a in own.items()} if rolled else own

    monkeypatch.setattr(checkpoint_files, "tensors_of", shifted)
    with pytest.raises(ConfigError, match="save: the outputs of the written model differ from"):
        model.save(tmp_path / "m")
    after = {each.name: each.read_bytes() for each in (tmp_path / "m").iterdir()}
    assert after == before


def test_weights_that_are_not_finite_are_saved(tmp_path: Path) -> None:
    """A run that diverged is kept for a look at it."""
    model = models.create(SIZES | WIDE, seed=0)
    model.table[...] = np.nan
    model.save(tmp_path / "m")
    assert np.isnan(models.load(tmp_path / "m").table).all()


def test_tokens_of_an_adapter_are_among_those_that_are_compared() -> None:
    """Rows of a table that an adapter trains are few: random tokens would seldom be among them."""
    model = models.create(SIZES | CONFIGS["llama"], seed=0)
    model.add_adapter(2, tokens=[5, 90])
    assert [*own_tokens(model.adapter)] == [5, 90]
    assert [*own_tokens(None)] == []
    compared = []

    def numbers(tokens: Any) -> Any:
        compared.append(tokens)
        return np.ones((tokens.size, 4))

    config = SimpleNamespace(vocab=10**9, experts=None)
    model = SimpleNamespace(config=config, path="a", numbers=numbers)
    assert check_same("call", model, model, own=[5, 90]) == 0  # type: ignore[arg-type]
    assert {5, 90} < {*compared[0].ravel().tolist()}
    check_same("call", model, model, own=range(100))  # type: ignore[arg-type]
    assert compared[-1].shape == compared[0].shape
    assert compared[-1].ravel().tolist() == [*range(8), *compared[0].ravel()[8:]]


def test_what_rounding_explains() -> None:
    names = ("float16", "float32", "float64")
    assert [explained(np.dtype(name)) for name in names] == [2**-5, 1e-3, 1e-3]
    config = SimpleNamespace(vocab=90, experts=None)

    def model(numbers: Any, config: Any = config) -> Any:
        return SimpleNamespace(config=config, path="a", numbers=lambda tokens: numbers)

    before, after = np.ones((16, 4)), np.ones((16, 4))
    after[3] = 1.0009
    assert 8e-4 < check_same("call", model(before), model(after)) < 1e-3
    after[3] = 1.0011
    with pytest.raises(ConfigError, match=r"differ from .* by a relative 0\.0011, and rou"):
        check_same("call", model(before), model(after))
    with pytest.raises(ConfigError, match=r"differ from .* by a relative 0\.0011, and rou"):
        check_same("call", model(0 * before), model(0 * before + 0.00055))  # of a norm of 0
    mixture = SimpleNamespace(vocab=90, experts=True)  # in which a token may go another way
    assert check_same("call", model(before, mixture), model(after, mixture)) == 0


@pytest.mark.parametrize(
    ("name", "steps"), [("model.layers.0.mlp.up_proj.weight", 6), ("model.norm.weight", 8)]
)
def test_a_tensor_is_written_but_for_rounding(name: str, steps: int) -> None:
    """Of float32, by the norm of the tensor; that of a norm's weight may be added to 1."""
    exact = np.full((4, 4), 3, np.float32)
    for more, error, passes in (
        *((steps - 1, 0.0, True), (steps + 1, 0.0, False)),
        *((steps + 64, 2.0**-16, True), (steps + 66, 2.0**-16, False)),  # 64 steps, and 1 %
    ):
        written = exact.copy()
        written[1, 2] += more * 2.0**-22  # of numbers from 2 to 4
        if passes:
            check_written("call", name, exact, written, error)
            continue
        expected = rf"the written {name} has an error of .* \(norm 12\)"
        with pytest.raises(ConfigError, match=expected):
            check_written("call", name, exact, written, error)
    exact[0, 0] = np.nan
    check_written("call", name, exact, exact, 0.0)
