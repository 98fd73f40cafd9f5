"""Several adapters over one base: by name, mixed by weight, and by the rows of a batch."""

import json
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import PagedKVCache
from unsloth_cupy.errors import ConfigError, ShapeError
from unsloth_cupy.models import Transformer, create, load, quantize
from unsloth_cupy.training.adamw import AdamW

from ..harness.parity import emulator
from .peers import SIZES
from .test_invariant import FAMILIES, REFUSED

NAMES = ["chat", None, "code", "chat", "dora"]
TOKENS = np.random.default_rng(0).integers(3, 60, (5, 7))
LABELS = np.where(TOKENS % 5 == 0, -100, TOKENS)


def made(kind: str = "dense", dtype: str = "float32") -> Transformer:
    model = create(SIZES | {"model_type": "llama"}, seed=0, dtype=dtype)
    if kind != "dense":
        quantize(model, kind)
    return adapted(model)


def adapted(model: Transformer) -> Transformer:
    for number, (name, options) in enumerate(
        [
            ("chat", {"rank": 4}),
            ("code", {"rank": 2, "targets": ["q_proj", "down_proj"], "alpha": 8}),
            ("dora", {"rank": 3, "dora": True, "dropout": 0.25}),
        ]
    ):
        model.add_adapter(name=name, seed=number, **options)
        draw = np.random.default_rng(number)
        for array in model.adapter.parameters.values():
            array[...] = array + 0.1 * draw.standard_normal(array.shape)
    model.set_adapter(None)
    return model


def of_one(model: Transformer, name: str | None, rows: list[int], call: Any, labels: Any) -> Any:
    """Return what a model with one adapter returns for its rows of the batch."""
    model.set_adapter(name)
    result = call(model, TOKENS[rows], labels[rows])
    model.set_adapter(None)
    return result


@pytest.mark.parametrize("others", [["chat", None, "code", "code", "chat"], NAMES], ids=str)
@pytest.mark.parametrize(
    "call",
    [
        lambda model, tokens, labels: model.logits(tokens),
        lambda model, tokens, labels: model.log_probs(tokens, labels).log_probs,
        lambda model, tokens, labels: model.generate(tokens, max_new_tokens=5, stop=()),
        lambda model, tokens, labels: model.generate(
            tokens, max_new_tokens=5, stop=(), cache=PagedKVCache(3, 20, 4, 2, 8, dtype="float32")
        ),
        lambda model, tokens, labels: model.generate(
            tokens, max_new_tokens=5, stop=(), mask=labels >= 0,
            cache=PagedKVCache(3, 20, 4, 2, 8, dtype="float32"),
        ),
    ],
    ids=["logits", "log_probs", "generate", "pages", "padding in pages"],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["dense", "nf4"])
def test_rows_are_those_of_a_batch_with_their_adapter(
    call: Any, others: list[str | None], kind: str
) -> None:
    model = made(kind)
    labels = np.where(np.arange(7) < 2, -100, TOKENS)  # where it is a mask: padding on the left
    actual = call(model.by_rows(others), TOKENS, labels)
    for name in dict.fromkeys(others):
        rows = [i for i, own in enumerate(others) if own == name]
        expected = of_one(model, name, rows, call, labels)
        np.testing.assert_allclose(actual[rows], expected, atol=2e-5)
        assert name is None or (expected != of_one(model, None, rows, call, labels)).any()


@pytest.mark.parametrize("others", [["chat", None, "code", "code", "chat"], NAMES], ids=str)
def test_rows_of_an_invariant_model_have_the_bits_of_their_own_batch(
    others: list[str | None],
) -> None:
    """Padded, packed, and one token at a time in pages."""
    model = made()
    model.invariant = True
    mask = np.arange(7) >= np.array([0, 3, 1, 0, 2])[:, None]
    lengths = mask.sum(axis=1)
    rows = model.by_rows(others)
    padded = rows.logits(TOKENS, mask=mask)
    packed = rows.logits(TOKENS[mask][None], offsets=np.append(0, lengths.cumsum()))[0]
    drawn = rows.generate(TOKENS, mask=mask, max_new_tokens=4, stop=(), temperature=1.0, seed=0)
    np.testing.assert_array_equal(packed, padded[mask])
    wide = np.pad(mask, ((0, 0), (0, 4)), constant_values=True)
    together = rows.log_probs(drawn, drawn, mask=wide).log_probs
    for row, name in enumerate(others):
        model.set_adapter(name)
        alone = model.logits(TOKENS[row, mask[row]][None])[0]
        np.testing.assert_array_equal(padded[row, mask[row]], alone)
        text = drawn[row, 7 - lengths[row] :]
        likely = model.log_probs(text[None], text[None]).log_probs[0]
        np.testing.assert_array_equal(together[row, 7 - lengths[row] :], likely)
        model.set_adapter(None)


@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("samples", [1, 2, 3])
def test_samples_of_a_prompt_have_its_adapter(samples: int, invariant: bool, pages: bool) -> None:
    """A name of each prompt; the numbers are those of rollouts with that adapter alone."""
    model, names = made(), ["chat", None, "code"]
    model.invariant = invariant
    prompts = [TOKENS[0, :4], TOKENS[1, :6], TOKENS[2, :4]]

    def drawn(one: Transformer, rows: list[Any], first: int) -> Any:
        pool = PagedKVCache(3, 60, 4, 2, 8, dtype="float32") if pages else None
        options = {"seed": 3, "max_new_tokens": 5, "cache": pool, "first": first}
        return one.rollouts(rows, samples=samples, **options)

    actual = drawn(model.by_rows(names), prompts, 0)
    for place, name in enumerate(names):
        model.set_adapter(name)
        expected = drawn(model, [prompts[place]], place * samples)
        rows, width = slice(place * samples, (place + 1) * samples), expected.tokens.shape[1]
        assert actual.completions()[rows] == expected.completions()
        own = actual.log_probs[rows, -width:]
        np.testing.assert_allclose(own, expected.log_probs, atol=0 if invariant else 1e-5)
        model.set_adapter(None)
    with pytest.raises(ShapeError, match="2 adapters are named for 3 rows; name one, or None"):
        drawn(model.by_rows(names[:2]), prompts, 0)


@pytest.mark.parametrize("kind", ["dense", "nf4", "int8"])
def test_rows_of_a_narrow_invariant_model_are_rounded_as_alone(kind: str) -> None:
    """In bfloat16 a layer with one adapter rounds its output once, its rows beside others twice."""
    model = made(kind, "bfloat16")
    model.invariant = True
    actual = model.by_rows(NAMES[:3]).logits(TOKENS[:3])
    for row, name in enumerate(NAMES[:3]):
        model.set_adapter(name)
        np.testing.assert_array_equal(actual[row], model.logits(TOKENS[row][None])[0])
        model.set_adapter(None)


@pytest.mark.parametrize("pages", [False, True])
@pytest.mark.parametrize(
    "change",
    [lambda model: model.set_adapter("code"), lambda model: model.merge_adapter()],
    ids=["set_adapter", "merge_adapter"],
)
def test_a_stream_keeps_the_adapter_that_it_began_with(change: Any, pages: bool) -> None:
    """The keys of its cache are of that adapter."""
    model = made()
    model.set_adapter("chat")

    def options() -> dict[str, Any]:
        cache = {"cache": PagedKVCache(3, 20, 4, 2, 8, dtype="float32")} if pages else {}
        return {"max_new_tokens": 8, "stop": (), **cache}

    expected = model.generate(TOKENS, **options())[:, 7:]
    stream = model.stream(TOKENS, **options())
    first = [next(stream) for _ in range(3)]
    change(model)
    np.testing.assert_array_equal(np.stack([*first, *stream], axis=1), expected)


@pytest.mark.parametrize("others", [["chat", None, "code", "code", "chat"], NAMES], ids=str)
def test_gradients_are_the_sums_over_the_rows_of_each(others: list[str | None]) -> None:
    """Also of packed texts, of which each has one."""
    model = made()
    rows = model.by_rows(others)
    loss, gradients = rows.loss_and_gradients(TOKENS, LABELS)
    offsets = np.arange(6) * 7
    packed_loss, packed = rows.loss_and_gradients(
        TOKENS.reshape(1, -1), LABELS.reshape(1, -1), offsets=offsets
    )
    np.testing.assert_allclose(packed_loss, loss, rtol=1e-5)
    count = int((LABELS[:, 1:] != -100).sum())
    total, names = 0.0, set[str]()
    for name in dict.fromkeys(others):
        own = [i for i, each in enumerate(others) if each == name]
        model.set_adapter(name)
        part, expected = model.loss_and_gradients(TOKENS[own], LABELS[own], count=count)
        model.set_adapter(None)
        total += part
        if name is None:
            continue
        for parameter, gradient in expected.items():
            names.add(f"{parameter}@{name}")
            largest = np.abs(gradient).max()
            for actual in (gradients, packed):
                actual_gradient = actual[f"{parameter}@{name}"]
                np.testing.assert_allclose(actual_gradient, gradient, atol=1e-5 * largest)
    np.testing.assert_allclose(loss, total, rtol=1e-5)
    assert gradients.keys() == rows.trainable.keys() == names


def test_several_learn_at_once() -> None:
    """A step of all is a step of each, with dropout of its own too, and leaves the others alone."""
    model, alone = made(), made()
    rows = model.by_rows(["chat", "chat", "dora", "dora"])
    optimizer = AdamW(rows.trainable, lr=0.01)
    for step in range(2):
        optimizer.step(rows.loss_and_gradients(TOKENS[:4], LABELS[:4], seed=step, count=10)[1])
    for name, own in (("chat", slice(0, 2)), ("dora", slice(2, 4))):
        alone.set_adapter(name)
        optimizer = AdamW(alone.trainable, lr=0.01)
        for step in range(2):
            _, gradients = alone.loss_and_gradients(TOKENS[own], LABELS[own], seed=step, count=10)
            optimizer.step(gradients)
        for parameter, expected in alone.trainable.items():
            actual = model.adapters[name].parameters[parameter]
            np.testing.assert_allclose(actual, expected, atol=2e-5)
    for parameter, array in made().adapters["code"].parameters.items():
        np.testing.assert_array_equal(model.adapters["code"].parameters[parameter], array)


STEP = ["chat", None, "code", "chat", "code"]  # of 20 tokens each
PACK = np.arange(6) * 20
REAL = np.arange(20) >= np.array([0, 7, 3, 0, 12])[:, None]  # padding on the left


def of_family(label: str, kind: str = "dense", dtype: str = "float32") -> Transformer:
    """Return an invariant model with adapters of each linear layer but those of experts."""
    model = create(SIZES | FAMILIES[label], seed=0, dtype=dtype)
    if kind != "dense":
        quantize(model, kind)
    linear = sorted(
        {name.split(".")[-2] for name in model.parameters if name.endswith("_proj.weight")}
    )
    for number, name in enumerate(("chat", "code")):
        model.add_adapter(4, name=name, seed=number, targets=linear)
        draw = np.random.default_rng(number)
        for array in model.adapter.parameters.values():
            array[...] = array + 0.05 * draw.standard_normal(array.shape)
    model.set_adapter(None)
    model.invariant = True
    return model


def assert_steps_equal_own_steps(model: Transformer, layout: str) -> None:
    """Assert that gradients of a batch of several have the bits of a batch of each."""
    tokens = np.random.default_rng(1).integers(3, 97, (5, 20))
    names = ["chat", "code"] if layout == "few" else STEP
    tokens = tokens[:2, :7] if layout == "few" else tokens
    count = int(REAL[:, 1:].sum()) if layout == "padded" else 95

    def gradients(model: Transformer, rows: list[int]) -> dict[str, np.ndarray]:
        own = {"tokens": tokens[rows], "labels": tokens[rows], "count": count}
        if layout == "padded":
            own["mask"] = REAL[rows]
        elif layout == "packed" and len(rows) == 5:
            own |= {name: own[name].reshape(1, -1) for name in ("tokens", "labels")}
            own["offsets"] = PACK
        return model.loss_and_gradients(**own)[1]

    actual = gradients(model.by_rows(names), [*range(len(names))])
    for name in ("chat", "code"):
        model.set_adapter(name)
        expected = gradients(model, [i for i, own in enumerate(names) if own == name])
        for parameter, gradient in expected.items():
            assert np.isfinite(gradient).all()
            np.testing.assert_array_equal(actual[f"{parameter}@{name}"], gradient)
    model.set_adapter(None)


@pytest.mark.parametrize("layout", ["few", "rows", "padded", "packed"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["dense", "nf4", "int8"])
@pytest.mark.parametrize("label", ["cohere", "mixtral"])
def test_gradients_of_several_have_the_bits_of_their_own(
    label: str, kind: str, dtype: str, layout: str
) -> None:
    """Of layers of one input and biases; of experts, where each adapter has a router's loss."""
    assert_steps_equal_own_steps(of_family(label, kind, dtype), layout)


@pytest.mark.slow
@pytest.mark.parametrize("label", sorted(FAMILIES.keys() - REFUSED))
def test_gradients_of_several_in_every_family(label: str) -> None:
    assert_steps_equal_own_steps(of_family(label), "padded")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("label", ["llama", "mixtral"])
def test_gradients_of_several_by_emulated_kernels(
    label: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SIZES, "num_hidden_layers", 1)
    with emulator(check=False):
        assert_steps_equal_own_steps(of_family(label, "dense", dtype), "few")


def test_names_folders_and_sums(tmp_path: Path) -> None:
    model = made()
    folder = tmp_path / "base"
    model.save(folder)
    for name in model.adapters:
        model.set_adapter(name)
        model.save_adapter(tmp_path / name)
    again = load(folder)
    for name in ("chat", "code"):
        again.load_adapter(tmp_path / name, name)
        again.set_adapter(name)
        model.set_adapter(name)
        np.testing.assert_array_equal(again.logits(TOKENS), model.logits(TOKENS))
    again.mix_adapters({"chat": 0.7, "code": -0.3}, "both")
    again.set_adapter("both")
    expected = load(folder).parameters
    for name, weight in (("chat", 0.7), ("code", -0.3)):
        changed = load(folder, lora=tmp_path / name)
        changed.merge_adapter()
        base = load(folder).parameters
        for parameter, array in changed.parameters.items():
            expected[parameter] = expected[parameter] + weight * (array - base[parameter])
    by_hand = load(folder)
    by_hand.parameters |= expected
    np.testing.assert_allclose(again.logits(TOKENS), by_hand.logits(TOKENS), atol=2e-5)
    again.save_adapter(tmp_path / "both")
    read = load(folder, lora=tmp_path / "both")
    np.testing.assert_array_equal(read.logits(TOKENS), again.logits(TOKENS))
    again.merge_adapter()
    assert [*again.adapters] == ["chat", "code"]
    np.testing.assert_allclose(again.logits(TOKENS), by_hand.logits(TOKENS), atol=2e-5)


@pytest.mark.filterwarnings("ignore:.*chat.adapter_config.json")  # of what is left out
@pytest.mark.parametrize(
    "left_out",
    [
        {"layers_to_transform": [0], "layers_pattern": "layers"},
        {"exclude_modules": ["q_proj"]},
        {"exclude_modules": r".*layers\.[01].*"},
    ],
    ids=str,
)
def test_a_sum_is_saved_with_the_layers_of_all(left_out: dict[str, Any], tmp_path: Path) -> None:
    """Not only those that the settings of the first adapter leave in."""
    model = made()
    model.save(tmp_path / "base")
    for name in ("chat", "code"):
        model.set_adapter(name)
        model.save_adapter(tmp_path / name)
    settings = tmp_path / "chat" / "adapter_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | left_out))
    again = load(tmp_path / "base")
    for name in ("chat", "code"):
        again.load_adapter(tmp_path / name, name)
    again.mix_adapters({"chat": 0.5, "code": 1.0}, "sum")
    again.set_adapter("sum")
    again.save_adapter(tmp_path / "sum")
    actual = load(tmp_path / "base", lora=tmp_path / "sum")
    np.testing.assert_array_equal(actual.logits(TOKENS), again.logits(TOKENS))


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, in peft
def test_peft_has_the_same_sum(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="whose sum this is")
    transformers = pytest.importorskip("transformers", reason="whose model this is")
    import torch

    model = made()
    model.save(tmp_path / "base")
    for name in ("chat", "code"):
        model.set_adapter(name)
        model.save_adapter(tmp_path / name)
    model.set_adapter(None)
    whole = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "base", dtype=torch.float32
    )
    peer = peft.PeftModel.from_pretrained(whole, tmp_path / "chat", adapter_name="chat")
    peer.load_adapter(tmp_path / "code", adapter_name="code")
    peer.add_weighted_adapter(["chat", "code"], [0.7, 0.4], "both", combination_type="cat")
    peer.set_adapter("both")
    model.mix_adapters({"chat": 0.7, "code": 0.4}, "both")
    model.set_adapter("both")
    with torch.no_grad():
        expected = peer(torch.from_numpy(TOKENS)).logits.numpy()
    np.testing.assert_allclose(model.logits(TOKENS), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda m, t: m.set_adapter("chta"),
            r"no adapter is named 'chta'; there is 'chat'",
        ),
        (lambda m, t: m.by_rows(["chat", "x"]), r"by_rows: no adapter is named 'x'"),
        (lambda m, t: m.add_adapter(2, name="chat"), r"an adapter has this name; choose another"),
        (lambda m, t: m.load_adapter(t, ""), r"load_adapter\(name=''\): pass a name"),
        (lambda m, t: m.load_adapter(t / "nothing", "new"), r"nothing.* is not a folder"),
        (lambda m, t: m.mix_adapters({}, "new"), r"mix_adapters\({}\): pass numbers by name"),
        (lambda m, t: m.mix_adapters({"chat": "a"}, "new"), "pass numbers by name"),
        (lambda m, t: m.mix_adapters({"dora": 1}, "new"), r"'dora' has more than A and B"),
        (lambda m, t: m.by_rows(["chat"]).save_adapter(t), r"choose one by set_adapter\(name\)"),
        (lambda m, t: m.by_rows(["chat"]).merge_adapter(), r"choose one by set_adapter\(name\)"),
        (lambda m, t: rows_of(m).by_rows(["table"]), r"'table' changes tables, heads or experts"),
        (lambda m, t: rows_of(m).mix_adapters({"table": 1}, "new"), "'table' has more than A and"),
        (lambda m, t: unnamed(m).set_adapter("chat"), r"has no name and would be lost; name it"),
        (lambda m, t: m.by_rows(["chat"]).train_through("nf4"), "each row has its own adapter"),
        (
            lambda m, t: chunked(m.by_rows(["chat"] * 5)).logits(TOKENS),
            "each row .* its own adapter",
        ),
        (lambda m, t: beside(rows_of(m)).resize(110), r"adapter 'table' has rows or tables of its"),
    ],
)
def test_what_names_cannot_say(call: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        call(made(), tmp_path)


def rows_of(model: Transformer) -> Transformer:
    model.add_adapter(2, name="table", tokens=[5])
    return model


def beside(model: Transformer) -> Transformer:
    model.set_adapter(None)
    return model


def chunked(model: Transformer) -> Transformer:
    model.chunked_mlp = True
    return model


def unnamed(model: Transformer) -> Transformer:
    model.add_adapter(2)
    return model


def test_a_copy_is_a_model_of_its_own() -> None:
    """It can be sent to another process; and tables that grow are not those of the first."""
    model = made()
    rows = model.by_rows(NAMES)
    expected = rows.logits(TOKENS)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(rows)).logits(TOKENS), expected)
    model.base.resize(110)
    assert rows.logits(TOKENS).shape == expected.shape


USES: dict[str, Any] = {
    "set_adapter": lambda model: model.set_adapter("code"),
    "mix_adapters": lambda model: model.mix_adapters({"code": 1.0}, "sum"),
    "by_rows": lambda model: model.by_rows([None, "code"]),
}


@pytest.mark.parametrize("requantize", [False, True])
@pytest.mark.parametrize("kind", ["dense", "nf4"])
def test_a_merge_ends_the_use_of_other_adapters(
    kind: str, requantize: bool, tmp_path: Path
) -> None:
    """They belong to the weights from before, for which they can be saved."""
    made(kind).save(tmp_path / "base")
    model = adapted(load(tmp_path / "base"))
    before = model.by_rows(["code"] * 5)
    model.set_adapter("code")
    expected = model.logits(TOKENS)
    model.save_adapter(tmp_path / "code")
    model.set_adapter("chat")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what rounding leaves
        model.merge_adapter(requantize=requantize)
    assert [*model.adapters] == ["code", "dora"]
    for name, use in USES.items():
        with pytest.raises(ConfigError, match=f"^{name}: 'code' belongs to the weights before"):
            use(model)
    with pytest.raises(ConfigError, match=r"load_adapter: .*code belongs to the weights of"):
        model.load_adapter(tmp_path / "code", "again")
    np.testing.assert_array_equal(before.logits(TOKENS), expected)
    model.adapters["code"].save(tmp_path / "kept")
    again = load(tmp_path / "base", lora=tmp_path / "kept")
    np.testing.assert_array_equal(again.logits(TOKENS), expected)
    model.delete_adapter("code")
    assert [*model.adapters] == ["dora"]


def test_an_adapter_of_merged_weights_names_no_other_base(tmp_path: Path) -> None:
    """The folder that the model was read from has the weights of before."""
    made().save(tmp_path / "base")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    config["_name_or_path"] = "owner/name"
    (tmp_path / "base" / "config.json").write_text(json.dumps(config))
    model = load(tmp_path / "base")
    for name in ("one", "two"):
        model.add_adapter(4, name=name)
        for array in model.adapter.parameters.values():
            array[...] = np.random.default_rng(0).standard_normal(array.shape) / 8
        model.save_adapter(tmp_path / name)
        settings = json.loads((tmp_path / name / "adapter_config.json").read_text())
        assert settings["base_model_name_or_path"] == ("owner/name" if name == "one" else None)
        expected = model.logits(TOKENS)
        if name == "one":
            named = load(tmp_path / "base")
            named.load_adapter(tmp_path / "one", "one")
            named.set_adapter("one")
            named.save_adapter(tmp_path / "again")  # which says where owner/name is
            np.testing.assert_array_equal(load(tmp_path / "again").logits(TOKENS), expected)
            model.merge_adapter()
            model.save(tmp_path / "merged")
    with pytest.raises(ConfigError, match="name the folder of the adapter's base"):
        load(tmp_path / "two")
    actual = load(tmp_path / "merged", lora=tmp_path / "two").logits(TOKENS)
    np.testing.assert_array_equal(actual, expected)


def test_only_calls_change_the_adapters_by_name() -> None:
    model = made()
    with pytest.raises(TypeError):
        model.adapters["chat"] = model.adapters["code"]  # type: ignore[index]
    with pytest.raises(TypeError):
        del model.adapters["chat"]  # type: ignore[attr-defined]
    model.set_adapter("chat")
    model.delete_adapter("chat")
    assert model.adapter is None
    assert [*model.adapters] == ["code", "dora"]
    with pytest.raises(ConfigError, match="delete_adapter: no adapter is named 'chat'"):
        model.delete_adapter("chat")


def test_every_row_needs_a_name() -> None:
    rows = made().by_rows(["chat", None])
    with pytest.raises(ShapeError, match="2 adapters are named for 5 rows; name one, or None"):
        rows.logits(TOKENS)
    with pytest.raises(ShapeError, match="2 adapters are named for 3 packed texts"):
        rows.loss(TOKENS[:1], LABELS[:1], offsets=np.array([0, 2, 4, 7]))


@pytest.mark.parametrize("rows", [["dora", "dora"], ["chat", "dora"], [None, "dora"]])
@pytest.mark.parametrize("packed", [False, True])
def test_dropout_of_a_rank_draws_by_numbers_of_tokens(rows: list[str | None], packed: bool) -> None:
    """A rank that holds a later part of a batch drops for an adapter what its own batch drops."""
    model, alone = made(), made()
    places = [number for number, name in enumerate(rows) if name == "dora"]
    alone.set_adapter("dora")
    model = model.by_rows(rows)

    def gradients(part: Transformer, own: list[int], first: int) -> dict[str, np.ndarray]:
        part.first_token = first
        batch = {"tokens": TOKENS[own], "labels": LABELS[own]}
        if packed:
            batch = {name: each.reshape(1, -1) for name, each in batch.items()}
            batch["offsets"] = np.arange(len(own) + 1) * TOKENS.shape[1]
        return part.loss_and_gradients(**batch, seed=3, count=10)[1]

    actual = gradients(model, [*range(len(rows))], 100)
    expected, others = (gradients(alone, places, first) for first in (100, 0))
    for name, gradient in expected.items():
        np.testing.assert_allclose(actual[f"{name}@dora"], gradient, atol=2e-5)
    assert any(np.abs(others[name] - each).max() > 1e-3 for name, each in expected.items())
