"""GGUF files as models: those of ``export_gguf``, and as llama.cpp's converter writes them."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click.testing
import numpy as np
import pytest
from tokenizers import Tokenizer

from unsloth_cupy import models
from unsloth_cupy.cli.commands import group
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.models.gguf import TYPES
from unsloth_cupy.models.gguf.reading import opened_gguf
from unsloth_cupy.ops.quantized.mxfp4 import Mxfp4

from .exported import IN_LLAMA_CPP, byte_level, make, read, write_tokenizer
from .peers import CONFIGS, LLAMA3, SIZES
from .test_gguf import PLAIN, WIDE
from .test_gguf_tokenizer import around, characters, split

gguf = pytest.importorskip("gguf", reason="needs the extra `gguf`")
FAMILIES = PLAIN | {f"llama.cpp's {name}": each for name, each in IN_LLAMA_CPP.items()}
MORE = {
    **{name: CONFIGS[name] for name in ("mistral", "qwen2 window", "phi3 longrope", "llama yarn")},
    **{name: CONFIGS[name] for name in ("llama linear", "gemma gelu", "llama one kv head")},
    "ministral": {
        "model_type": "ministral",
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}
SCALED = ("gemma2", "gemma3")  # the queries of these two configs are stored times a factor
TOKENS = np.arange(3, 15)[None]
TEXT = "the theory in the end, Nine"


def both(folder: Path, config: Any, kind: str = "f32", **options: Any) -> tuple[Any, Any]:
    """Return a model of a folder, and that of the file into which it was exported."""
    model = make(folder / "m", config, **options)
    models.export_gguf(model, folder / "m.gguf", kind=kind)
    return model, models.load(folder / "m.gguf")


def copied(
    source: Path,
    target: Path,
    changes: Mapping[str, Any],
    tensors: Callable[[str], tuple[Any, ...]] | None = None,
    experts: Sequence[int] = (),
    **options: Any,
) -> Path:
    """Copy a file with other values of keys (None: without them) and of tensors.

    These ``experts`` are tensors of their own, as in files of early 2024.
    """
    reader = gguf.GGUFReader(source)
    values = {name: each.contents() for name, each in reader.fields.items()}
    out = gguf.GGUFWriter(target, values["general.architecture"], **options)
    for name, value in (values | changes).items():
        if name.startswith("GGUF.") or name == "general.architecture" or value is None:
            continue
        kinds = {bool: out.add_bool, int: out.add_uint32, float: out.add_float32}
        kinds |= {str: out.add_string, list: out.add_array}
        kinds[type(value)](name, value)
    for each in reader.tensors:
        name, *more = (each.name,) if tensors is None else tensors(each.name)
        data, kind = more or (each.data, each.tensor_type)
        apart = {name.replace("_exps.", f".{n}."): data[n] for n in experts if "_exps." in name}
        for own, part in (apart or {name: data}).items():
            out.add_tensor(own, np.array(part), raw_dtype=kind)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return target


@pytest.mark.parametrize("name", FAMILIES | MORE)
def test_what_was_exported_comes_back(name: str, tmp_path: Path) -> None:
    """All parameters, the config but for what a file does not say, logits, tokens of a text."""
    model, loaded = both(tmp_path, (FAMILIES | MORE)[name])
    actual, expected = loaded.logits(TOKENS), model.logits(TOKENS)
    if name in SCALED:
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6 * np.abs(expected).max())
    else:
        close = 4e-6 if "mistral3" in name else 0  # yarn's factor is float32 in a file
        np.testing.assert_allclose(actual, expected, rtol=0, atol=close * np.abs(expected).max())
        assert loaded.parameters.keys() == model.parameters.keys()
        for key, array in model.parameters.items():
            most = 0 if model.config.norm_offset == 0 else 1.2e-7  # of the sum with 1, in float32
            np.testing.assert_allclose(loaded.parameters[key], array, rtol=0, atol=most)
    np.testing.assert_array_equal(loaded.tokenizer.encode(TEXT), model.tokenizer.encode(TEXT))
    greedy = model.generate(TOKENS, max_new_tokens=6)
    np.testing.assert_array_equal(loaded.generate(TOKENS, max_new_tokens=6), greedy)
    facts = ("layer_types", "window", "tied", "end_tokens", "pad_token", "positions", "eps")
    for fact in facts:
        assert getattr(loaded.config, fact) == getattr(model.config, fact), fact


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("family", ["llama", "gemma", "qwen2", "phi3", "llama.cpp's nemotron"])
def test_sixteen_bits_are_kept(family: str, kind: str, tmp_path: Path) -> None:
    dtype = {"f16": "float16", "bf16": "bfloat16"}[kind]
    model, loaded = both(tmp_path, FAMILIES[family], kind, dtype=dtype)
    np.testing.assert_array_equal(loaded.logits(TOKENS), model.logits(TOKENS))
    assert {each.dtype.name for each in loaded.parameters.values()} == {dtype}
    for key, array in model.parameters.items():
        np.testing.assert_array_equal(loaded.parameters[key], array)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model whose rows all blocks divide."""
    folder = tmp_path_factory.mktemp("wide")
    make(folder, WIDE)
    return folder


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_that_is_written_is_read(kind: str, wide: Path, tmp_path: Path) -> None:
    models.export_gguf(wide, tmp_path / "m.gguf", kind=kind)
    loaded, (_, dense, types) = models.load(tmp_path / "m.gguf"), read(tmp_path / "m.gguf")
    for name, stored in (("mlp.down_proj", "ffn_down"), ("input_layernorm", "attn_norm")):
        actual = loaded.parameters[f"model.layers.0.{name}.weight"]
        dtype, expected = actual.dtype, dense[f"blk.0.{stored}.weight"]
        np.testing.assert_array_equal(actual.astype(dtype), expected.astype(dtype))
    assert loaded.table.dtype == {"f16": "float16", "bf16": "bfloat16"}.get(kind, "float32")
    counted = [f" {types['blk.0.ffn_down.weight']} (", "f32 (", loaded.table.dtype.name]
    assert all(each in str(loaded.origin) for each in counted)
    one = models.load(tmp_path / "m.gguf", dtype="bfloat16")
    assert {each.dtype.name for each in one.parameters.values()} == {"bfloat16"}


@pytest.mark.parametrize(
    "kind", ["MXFP4", "NVFP4", "IQ4_NL", "IQ4_XS", "IQ2_XXS", "IQ3_S", "IQ1_M"]
)
def test_types_that_only_others_write(kind: str, wide: Path, tmp_path: Path) -> None:
    models.export_gguf(wide, tmp_path / "m.gguf", kind="f32")
    number = getattr(gguf.GGMLQuantizationType, kind)
    numbers, size = gguf.GGML_QUANT_SIZES[number]
    blocks = np.random.default_rng(0).integers(0, 60, (256, 256 // numbers * size), np.uint8)

    def tensors(name: str) -> tuple[Any, ...]:
        return (name, blocks, number) if name == "blk.0.ffn_down.weight" else (name,)

    loaded = models.load(copied(tmp_path / "m.gguf", tmp_path / "n.gguf", {}, tensors))
    expected = gguf.quants.dequantize(blocks, number)
    assert np.ptp(expected) > 0
    actual = loaded.parameters["model.layers.0.mlp.down_proj.weight"]
    assert isinstance(actual, Mxfp4) == (kind == "MXFP4")
    np.testing.assert_array_equal(actual.astype("float32"), expected)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1", "Q4_K", "Q5_K", "MXFP4"])
def test_scales_that_are_not_finite_are_refused(
    kind: str, value: float, wide: Path, tmp_path: Path
) -> None:
    """A block begins with its scale: of float16, or an exponent that stands for NaN."""
    models.export_gguf(wide, tmp_path / "m.gguf", kind="f32")
    number = getattr(gguf.GGMLQuantizationType, kind)
    numbers, size = gguf.GGML_QUANT_SIZES[number]
    blocks = np.zeros((256, 256 // numbers * size), np.uint8)
    scale = [255] if kind == "MXFP4" else [*np.float16(value).tobytes()]
    blocks[7, size * (256 // numbers - 1) :][: len(scale)] = scale  # the last block of a row
    blocks[7, -1] = 3

    def tensors(name: str) -> tuple[Any, ...]:
        return (name, blocks, number) if name == "blk.0.ffn_down.weight" else (name,)

    file = copied(tmp_path / "m.gguf", tmp_path / "n.gguf", {}, tensors)
    with pytest.raises(ConfigError, match=r"has a scale that is not finite; fetch the file again"):
        models.load(file)


@pytest.mark.slow
def test_transformers_reads_the_same_file(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="a peer")
    transformers = pytest.importorskip("transformers", reason="a peer")
    for name in ("llama", "qwen2", "starcoder2", "nemotron"):
        folder = tmp_path / name
        folder.mkdir()
        _, loaded = both(folder, {"model_type": name, "num_key_value_heads": 2}, "q8_0")
        peer = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file="m.gguf")
        with torch.no_grad():
            expected = peer(torch.tensor(TOKENS)).logits.numpy()
        np.testing.assert_allclose(loaded.logits(TOKENS), expected, rtol=1e-4, atol=1e-5)


def test_positions_as_llama_3_stretches_them_get_their_numbers_back(tmp_path: Path) -> None:
    scaling = {"factor": 32.0, "original_max_position_embeddings": 8192}
    config = {**CONFIGS["llama llama3"], "head_dim": 64, "rope_scaling": LLAMA3 | scaling}
    model, loaded = both(tmp_path, config)
    assert loaded.config.ropes == model.config.ropes
    factors = np.linspace(1, 3, 32, dtype=np.float32)  # of no rule

    def tensors(name: str) -> tuple[Any, ...]:
        kind = gguf.GGMLQuantizationType.F32
        return (name, factors, kind) if name == "rope_freqs.weight" else (name,)

    other = models.load(copied(tmp_path / "m.gguf", tmp_path / "n.gguf", {}, tensors))
    rope = other.config.ropes["full_attention"]
    assert (rope.scaling or {})["rope_type"] == "longrope"
    np.testing.assert_array_equal(np.float32((rope.scaling or {})["short_factor"]), factors)


# ---- files as llama.cpp's own converter writes them ----------------------------------------------
def test_numbers_by_layer_and_periods(tmp_path: Path) -> None:
    model, _ = both(tmp_path, PLAIN["gemma3"])
    layers = model.config.layers
    changes = {
        "gemma3.attention.head_count_kv": [model.config.kv_heads] * layers,
        "gemma3.attention.sliding_window_pattern": 2,
        "gemma3.attention.causal": True,
        "gemma3.rope.scaling.type": "none",
        "tokenizer.ggml.add_bos_token": None,
    }
    loaded = models.load(copied(tmp_path / "m.gguf", tmp_path / "n.gguf", changes))
    slides = [kind == "sliding_attention" for kind in loaded.config.layer_types]
    assert slides == [(layer + 1) % 2 != 0 for layer in range(layers)]
    assert loaded.config.kv_heads == model.config.kv_heads


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"llama.attention.head_count_kv": [2, 4, 2]}, r"head_count_kv differs by layer"),
        ({"llama.expert_count": 8}, r"llama.expert_used_count is missing"),
        ({"llama.rope.scaling.type": "dynamic"}, r"rope.scaling.type is 'dynamic'"),
        ({"llama.attention.value_length": 3}, r"value_length is 3, unlike attention.key_length"),
        ({"llama.block_count": None}, r"llama.block_count is missing"),
        ({"llama.block_count": 2}, r"not part of the llama of its keys"),
        ({"llama.block_count": 4}, r"tensor 'blk.3.attn_q.weight' is missing"),
        ({"llama.feed_forward_length": 8}, r"'blk.0.ffn_gate.weight' is \(48, 32\), not \(8, 32\)"),
        ({"tokenizer.ggml.pre": "bloom"}, r"an unknown rule, 'bloom'; put n.gguf and"),
        ({"tokenizer.ggml.model": "t5"}, r"its tokenizer is 't5', none of gpt2, llama, gemma4"),
    ],
)
def test_what_is_not_understood_is_refused(
    changes: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    both(tmp_path, {"model_type": "llama"})
    with pytest.raises(ConfigError, match=problem):
        models.load(copied(tmp_path / "m.gguf", tmp_path / "n.gguf", changes))


def test_broken_and_strange_files(tmp_path: Path) -> None:
    both(tmp_path, {"model_type": "llama"})
    data = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[:500])
    (tmp_path / "none.gguf").write_bytes(b"no GGUF file")
    for name in ("cut", "none"):
        with pytest.raises(ConfigError, match=rf"{name}.gguf is truncated, broken or no GGUF file"):
            models.load(tmp_path / f"{name}.gguf")
    with pytest.raises(ConfigError, match=r"gone.gguf does not exist; pass a file that exists"):
        models.load(tmp_path / "gone.gguf")
    integers = np.zeros((4, 8), np.int32), gguf.GGMLQuantizationType.I32

    def tensors(name: str) -> tuple[Any, ...]:
        return (name, *integers) if name == "output.weight" else (name,)

    strange = copied(tmp_path / "m.gguf", tmp_path / "n.gguf", {}, tensors)
    with pytest.raises(ConfigError, match=r"does not convert I32, of 'output.weight'; install"):
        models.load(strange)
    other = data.replace(b"llama", b"rwkv7")
    (tmp_path / "other.gguf").write_bytes(other)
    with pytest.raises(
        ConfigError, match=r"its architecture is 'rwkv7', which is none of apertus, arcee"
    ):
        models.load(tmp_path / "other.gguf")


def test_lists_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary has hundreds of thousands of texts; the package reads them one by one."""
    file, texts = tmp_path / "m.gguf", [*map(str, range(3000)), "", "\u00fc \u4f60"]
    out, lists = gguf.GGUFWriter(file, "llama"), {"i": [1, -2], "f": [0.5, 1.5], "b": [True, False]}
    out.add_token_list(texts)
    out.add_token_types([*range(len(texts))])
    out.add_int32("after", -7)
    for name, values in lists.items():
        out.add_array(name, values)
    out.add_tensor("x.weight", np.arange(8, dtype=np.float32).reshape(2, 4))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    expected = {name: each.contents() for name, each in gguf.GGUFReader(file).fields.items()}
    reads, one = [], gguf.GGUFReader._get
    monkeypatch.setattr(gguf.GGUFReader, "_get", lambda *a, **b: [reads.append(a), one(*a, **b)][1])
    opened = opened_gguf(file)
    assert opened.values == expected
    assert [type(each) for each in opened.values["f"]] == [float, float]
    assert len(reads) < 200
    np.testing.assert_array_equal(opened.get_tensor("x.weight")[1], [4, 5, 6, 7])
    data = file.read_bytes()
    place = data.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens") + 8
    for wrong in (data[: place + 8 + 90], data[:place] + b"\xff" * 8 + data[place + 8 :]):
        file.write_bytes(wrong)
        with pytest.raises(ConfigError, match="is truncated, broken or no GGUF file"):
            opened_gguf(file)


def test_parts(tmp_path: Path) -> None:
    model, _ = both(tmp_path, {"model_type": "llama"})
    copied(tmp_path / "m.gguf", tmp_path / "part.gguf", {}, split_max_tensors=12)
    parts = sorted(tmp_path.glob("part-*.gguf"))
    assert len(parts) > 2
    loaded = models.load(parts[1])
    np.testing.assert_array_equal(loaded.logits(TOKENS), model.logits(TOKENS))
    parts[-1].rename(tmp_path / "away")
    with pytest.raises(ConfigError, match=rf"{parts[-1].name} is missing, which is a part of"):
        models.load(parts[0])


def test_a_head_that_is_a_copy_of_the_table_is_tied(tmp_path: Path) -> None:
    model, loaded = both(tmp_path, PLAIN["olmo2"])
    assert model.config.tied
    assert loaded.config.tied
    assert "lm_head.weight" not in loaded.parameters


# ---- tokenizers ----------------------------------------------------------------------------------
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
SPLIT += r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@pytest.mark.parametrize("steps", [None, split(SPLIT)], ids=["gpt2", "llama3"])
@pytest.mark.parametrize("single", ["$A", "<s> $A", "<s> $A </s>"])
def test_byte_level_tokenizers(steps: Any, single: str, tmp_path: Path) -> None:
    values = byte_level(97) | {"post_processor": around(single)}
    if steps:
        values["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
        values["model"]["ignore_merges"] = True
    tool = {"id": len(values["model"]["vocab"]), "content": "<tool>", "special": False,
            "lstrip": False, "rstrip": False,
            "single_word": False, "normalized": False}  # fmt: skip
    values["added_tokens"].append(tool)
    template = "{{ messages[0].content }}</s>"
    loaded = of_words(tmp_path, values, chat_template=template, eos_token="</s>", unk_token="<pad>")
    same(values, loaded, "the inn </s>", "Then, 1234 thine<s> hats\n\n  on", "<tool>there")
    assert loaded.chat([{"role": "user", "content": "hi"}]) == "hi</s>"
    settings = json.loads(loaded.template.files["tokenizer_config.json"])
    assert (settings["bos_token"], settings["unk_token"]) == ("<s>", "<pad>")


def test_tokenizers_over_characters(tmp_path: Path) -> None:
    values = characters() | {"post_processor": around("<s> $A")}
    values["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    loaded = of_words(tmp_path, values, unk_token="<unk>")
    same(values, loaded, "the heat", "that\nthe  eat", "tea</s>the")
    tokens = loaded.encode("that the")
    assert loaded.decode(tokens) == "that the"
    again = models.Tokenizer(
        copied(tmp_path / "m.gguf", tmp_path / "n.gguf", {"tokenizer.ggml.add_bos_token": None})
    )
    np.testing.assert_array_equal(again.encode("that the"), tokens)  # as llama.cpp assumes


def of_words(folder: Path, values: dict[str, Any], **settings: Any) -> models.Tokenizer:
    """Return the tokenizer of an exported model with these words."""
    make(folder / "m", {"model_type": "llama"})
    write_tokenizer(folder / "m", values, **settings)
    models.export_gguf(folder / "m", folder / "m.gguf")
    return models.Tokenizer(folder / "m.gguf")


def same(values: dict[str, Any], loaded: models.Tokenizer, *texts: str) -> None:
    """Compare the tokens of texts, and the texts of tokens."""
    original = Tokenizer.from_str(json.dumps(values))
    for text in texts:
        expected = original.encode(text).ids
        assert loaded.encode(text).tolist() == expected, text
        assert loaded.decode(expected) == original.decode(expected)


def test_a_tokenizer_of_its_own_beside_the_file(tmp_path: Path) -> None:
    model, _ = both(tmp_path, {"model_type": "llama"})
    folder = tmp_path / "both"
    folder.mkdir()
    copied(tmp_path / "m.gguf", folder / "n.gguf", {"tokenizer.ggml.pre": "bloom"})
    with pytest.raises(ConfigError, match="an unknown rule"):
        models.load(folder)
    shutil.copyfile(tmp_path / "m" / "tokenizer.json", folder / "tokenizer.json")
    loaded = models.load(folder)
    np.testing.assert_array_equal(loaded.tokenizer.encode(TEXT), model.tokenizer.encode(TEXT))
    copied(tmp_path / "m.gguf", folder / "o.gguf", {})
    with pytest.raises(ConfigError, match=r"contains 2 models \(n.gguf, o.gguf\); pass one"):
        models.load(folder)


def test_the_whole_tokenizer_of_a_file_goes_first(tmp_path: Path) -> None:
    both(tmp_path, {"model_type": "llama"})
    values = byte_level(97, [("t", "h")])
    changes = {"tokenizer.huggingface.json": json.dumps(values)}
    tokenizer = models.Tokenizer(copied(tmp_path / "m.gguf", tmp_path / "n.gguf", changes))
    assert (
        tokenizer.encode("the").tolist() == Tokenizer.from_str(json.dumps(values)).encode("the").ids
    )


# ---- what is done with it ------------------------------------------------------------------------
def test_adapters_merges_and_saves(tmp_path: Path) -> None:
    _, loaded = both(tmp_path, {"model_type": "llama"}, "q8_0")
    loaded.add_adapter(2, seed=3)
    for name, array in loaded.adapter.parameters.items():
        array[...] = np.random.default_rng(len(name)).normal(0, 0.1, array.shape)
    expected = loaded.logits(TOKENS)
    loaded.save_adapter(tmp_path / "adapter")
    named = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert named["base_model_name_or_path"] == str(tmp_path / "m.gguf")
    np.testing.assert_array_equal(models.load(tmp_path / "adapter").logits(TOKENS), expected)
    report = models.merge(tmp_path / "adapter", tmp_path / "merged")
    assert "q8_0" in str(report)
    merged = models.load(tmp_path / "merged")
    np.testing.assert_allclose(merged.logits(TOKENS), expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(merged.tokenizer.encode(TEXT), loaded.tokenizer.encode(TEXT))
    loaded.adapter = None
    loaded.save(tmp_path / "saved")
    again = models.load(tmp_path / "saved")
    assert again.origin is None
    np.testing.assert_array_equal(again.logits(TOKENS), loaded.logits(TOKENS))
    assert (tmp_path / "m.gguf").stat().st_size < 100_000, "the file is as it was"
    copy = models.merge(tmp_path / "m.gguf", tmp_path / "copy")
    assert "m.gguf holds no adapter" in str(copy)
    np.testing.assert_array_equal(models.load(copy.folder).logits(TOKENS), loaded.logits(TOKENS))


@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_adapters_through_quantizers(quantize: str | None, tmp_path: Path) -> None:
    """Beside the packed weights, or beside those that were quantized as they were read."""
    both(tmp_path, {"model_type": "llama"}, "q4_0")
    model = models.load(tmp_path / "m.gguf", quantize=quantize)
    model.add_adapter(2, seed=3, merge_into="q4_0")
    for name, array in model.adapter.parameters.items():
        array[...] = np.random.default_rng(len(name)).normal(0, 0.1, array.shape)
    model.save_adapter(tmp_path / "adapter")
    expected = model.logits(TOKENS)
    models.export_gguf(tmp_path / "adapter", tmp_path / "out.gguf")
    np.testing.assert_array_equal(models.load(tmp_path / "out.gguf").logits(TOKENS), expected)


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize("kind", ["q4_0", "q8_0", "f16"])
def test_what_a_file_keeps_of_an_adapter(kind: str, folder: bool, tmp_path: Path) -> None:
    """Weights of a q4_0 file that are written as q4_0 again snap back to where they were."""
    _, loaded = both(tmp_path, WIDE, "q4_0")
    loaded.add_adapter(2, seed=3, targets=["q_proj", "down_proj"])
    for name, array in loaded.adapter.parameters.items():
        if "lora_B" in name:
            array[...] = np.random.default_rng(len(name)).normal(0, 2e-4, array.shape)
    loaded.save_adapter(tmp_path / "adapter")
    source = tmp_path / "adapter" if folder else loaded
    report = models.export_gguf(source, tmp_path / "again.gguf", kind=kind)
    before, after = (read(tmp_path / f"{name}.gguf")[1] for name in ("m", "again"))
    models.export_gguf(loaded, tmp_path / "exact.gguf", kind="f32")
    exact = read(tmp_path / "exact.gguf")[1]
    names = [n for n in before if "attn_q.weight" in n or "ffn_down.weight" in n]
    assert report.kept.layers.keys() == {*names}
    for name in names:
        change = (exact[name] - before[name]).astype("f8")
        share = ((after[name] - before[name]) * change).sum() / (change**2).sum()
        assert report.kept.layers[name] == pytest.approx(share, abs=1e-4)
    assert (report.kept.share < 0.1) == (kind == "q4_0")
    assert any("q4_0 rounds the rest away" in note for note in report.notes) == (kind == "q4_0")
    assert f"rounding preserves {100 * report.kept.share:.1f} % of the LoRA update" in str(report)


def test_commands_take_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    both(tmp_path, {"model_type": "llama"}, "q8_0")
    Path("text.txt").write_text("the theory in the end is that the inn is thin. " * 60)

    def run(*words: str) -> str:
        result = click.testing.CliRunner().invoke(group, words, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result.output

    assert "q8_0 (" in run("generate", "m.gguf", "the", "--max-new-tokens", "2")
    assert "q8_0 (" in run("evaluate", "m.gguf", "--data", "text.txt", "--tokens", "16")
    assert "m.gguf" in run("plan", "m.gguf", "--lora", "2")
    learn = ["finetune", "m.gguf", "--text", "text.txt", "--tokens", "16", "--lora", "2"]
    assert "q8_0 (" in run(*learn, "--steps", "1", "--out", "run")
    settings = json.loads(Path("run/settings.json").read_text())
    assert settings["model"] == str(tmp_path / "m.gguf")
    assert "run is finished" in run(*learn, "--steps", "1", "--out", "run")
    assert "q4_0" in run("export", "run", "n.gguf", "--type", "q4_0")
    assert "42 f16" in run("export", "run", "lora.gguf", "--adapter")
    run("merge", "run", "merged")
    assert SIZES["vocab_size"] == models.load("merged").config.vocab


def test_a_folder_of_the_user_names_no_file(tmp_path: Path) -> None:
    """Whatever gguf.json says: only folders that this process made of a file have one."""
    make(tmp_path / "other", "llama")
    models.export_gguf(tmp_path / "other", tmp_path / "other.gguf", kind="f32")
    own = models.create(SIZES | CONFIGS["llama"], seed=5)
    own.save(tmp_path / "m")
    for text in (json.dumps({"file": str(tmp_path / "other.gguf")}), "{}", "[]", "{"):
        (tmp_path / "m/gguf.json").write_text(text)
        loaded = models.load(tmp_path / "m")
        np.testing.assert_array_equal(loaded.table, own.table)
    (tmp_path / "m/model.safetensors").unlink()
    with pytest.raises(ConfigError, match="safetensors"):
        models.load(tmp_path / "m")
    (tmp_path / "m/config.json").unlink()
    shutil.copy(tmp_path / "other.gguf", tmp_path / "m")
    expected = models.load(tmp_path / "other")
    np.testing.assert_array_equal(models.load(tmp_path / "m").table, expected.table)


def test_words_without_merges_are_refused(tmp_path: Path) -> None:
    """They would be single bytes; a whole tokenizer.json in the file, or beside it, has merges."""
    make(tmp_path / "m", "llama")
    models.export_gguf(tmp_path / "m", tmp_path / "m.gguf")
    without = {"tokenizer.ggml.merges": None}
    (tmp_path / "beside").mkdir()
    file = copied(tmp_path / "m.gguf", tmp_path / "beside/n.gguf", without)
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.merges is missing"):
        models.load(file)
    whole = (tmp_path / "m/tokenizer.json").read_text()
    changes = without | {"tokenizer.huggingface.json": whole}
    within = copied(tmp_path / "m.gguf", tmp_path / "o.gguf", changes)
    (tmp_path / "beside/tokenizer.json").write_text(whole)
    expected = models.load(tmp_path / "m").tokenizer.encode("in the thin").tolist()
    for path in (within, tmp_path / "beside"):
        assert models.load(path).tokenizer.encode("in the thin").tolist() == expected
