"""GGUF files, read back by the package that llama.cpp's own converter writes them with."""

import errno
import importlib
import json
import re
import shutil
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import click.testing
import numpy as np
import pytest

from unsloth_cupy import models
from unsloth_cupy.cli.commands import group
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.models.gguf import TYPES
from unsloth_cupy.ops.quantized.weight import Quantized

from .exported import IN_LLAMA_CPP, byte_level, make, read, write_tokenizer
from .peers import CONFIGS, LLAMA3, RELATIVES, SIZES

gguf = pytest.importorskip("gguf", reason="needs the extra `gguf`")
KINDS = importlib.import_module("unsloth_cupy.models.gguf._types").KINDS

GOLDEN = Path(__file__).parents[1] / "golden" / "quant"
PLAIN = {  # a model of each family, as llama.cpp computes it
    "llama": CONFIGS["llama biases"],
    "llama3": CONFIGS["llama llama3"],
    "mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 16},
    "qwen2": CONFIGS["qwen2"],
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "gemma": CONFIGS["gemma"],
    "gemma2": CONFIGS["gemma2"],
    "gemma3": CONFIGS["gemma3"],
    "phi3": CONFIGS["phi3"],
    "olmo2": {"model_type": "olmo2", "tie_word_embeddings": True},
    "bitnet": {"model_type": "bitnet", "tie_word_embeddings": True},
}
WIDE = SIZES | {  # blocks of 256 divide its rows, but for those of o_proj
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "head_dim": 8,
}
BLOCKS = {"q8_0": 32, "q4_0": 32, "tq1_0": 256, "tq2_0": 256}
MIXED = {  # types of kinds that have several: of the layers, of the head
    "q6_k": "q6_k q6_k", "q5_k_m": "q5_k q6_k", "q5_k_s": "q5_k q6_k", "q5_1": "q5_1 q6_k",
    "q5_0": "q5_0 q6_k", "q4_k_m": "q4_k q6_k", "q4_k_s": "q4_k q6_k", "q4_1": "q4_1 q6_k",
    "q3_k_l": "q3_k q6_k", "q3_k_m": "q3_k q6_k", "q3_k_s": "q3_k q6_k", "q2_k": "q2_k q6_k",
}  # fmt: skip


def exported(folder: Path, config: Any, kind: str = "f32", **options: Any) -> tuple[Any, ...]:
    model = make(folder / "m", config, **options)
    report = models.export_gguf(model, folder / "m.gguf", kind=kind)
    return model, report, *read(folder / "m.gguf")


def test_the_help_lists_all_types_with_their_bits() -> None:
    said = click.testing.CliRunner().invoke(group, ["export", "--help"]).output
    listed = re.findall(r"\b([a-z]+\d+\w*) ([\d.]+)\+?(?:;|$)", said, re.M)
    assert sorted(name for name, _ in listed) == sorted(TYPES)
    for name, bits in listed:
        numbers, size = gguf.GGML_QUANT_SIZES[KINDS[name].type]
        assert bits == f"{8 * size / numbers + 1e-9:.3g}", name


@pytest.mark.parametrize("family", PLAIN)
def test_names_and_values(family: str, tmp_path: Path) -> None:
    """Each parameter is there, under the name of the package, in llama.cpp's form."""
    model, report, values, dense, types = exported(tmp_path, PLAIN[family])
    config, arch = model.config, values["general.architecture"]
    left = dict(model.parameters)
    number = {name: n for n, name in gguf.MODEL_ARCH_NAMES.items()}[arch]
    assert {strip(name) for name in dense} <= {
        strip(gguf.TENSOR_NAMES[tensor].format(bid=0)) for tensor in gguf.MODEL_TENSORS[number]
    }
    assert {*types.values()} == {"f32"}
    assert report.types == {"f32": len(types)}
    assert report.bytes == (tmp_path / "m.gguf").stat().st_size
    blocks = {f"model.layers.{n}.{ours}": f"blk.{n}.{theirs}" for n in range(config.layers)
              for ours, theirs in NAMES.items()}  # fmt: skip
    if config.norms.after_attention:
        for n in range(config.layers):
            after = f"blk.{n}.post_attention_norm.weight"
            blocks[f"model.layers.{n}.post_attention_layernorm.weight"] = after
    blocks["model.embed_tokens.weight"] = "token_embd.weight"
    blocks |= {"model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
    for name, array in left.items():
        made, expected = dense.pop(blocks[name]), array.astype(np.float32)
        if arch == "llama" and (".q_proj." in name or ".k_proj." in name):
            expected = expected[reordered(len(expected), config.dim)]
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            expected = expected + 1
        if name.endswith({"gemma2": "q_proj.weight", "gemma3": "q_norm.weight"}.get(arch, "none")):
            expected = expected * np.float32((16 / 20) ** 0.5)  # head_dim, query_pre_attn_scalar
        np.testing.assert_array_max_ulp(made, expected, 1 if arch in ("gemma2", "gemma3") else 0)
    if arch == "olmo2":
        np.testing.assert_array_equal(dense.pop("output.weight"), model.table)
    assert {*dense} == ({"rope_freqs.weight"} if family == "llama3" else set())


NAMES = {  # in a block: of Hugging Face, of llama.cpp
    **{f"self_attn.{n}_proj.{part}": f"attn_{n}.{part}" for n in "qkv"
       for part in ("weight", "bias")},
    **{f"self_attn.o_proj.{part}": f"attn_output.{part}" for part in ("weight", "bias")},
    **{f"mlp.{n}_proj.{part}": f"ffn_{n}.{part}" for n in ("gate", "up", "down")
       for part in ("weight", "bias")},
    "self_attn.qkv_proj.weight": "attn_qkv.weight",
    "mlp.gate_up_proj.weight": "ffn_up.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "self_attn.attn_sub_norm.weight": "attn_sub_norm.weight",
    "mlp.ffn_sub_norm.weight": "ffn_sub_norm.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
}  # fmt: skip


def strip(name: str) -> str:
    """Return a name without its block and its ending."""
    parts = name.split(".")
    return parts[2] if parts[0] == "blk" else parts[0]


def reordered(rows: int, dim: int) -> list[int]:
    """Return which row comes where: in a head, 0, dim / 2, 1, dim / 2 + 1, ..."""
    return [
        head + pair + half for head in range(0, rows, dim) for pair in range(dim // 2)
        for half in (0, dim // 2)
    ]  # fmt: skip


def test_rows_of_a_head() -> None:
    assert reordered(8, 4) == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.parametrize("family", PLAIN)
def test_hyperparameters(family: str, tmp_path: Path) -> None:
    model, _, values, _, _ = exported(tmp_path, PLAIN[family])
    config, arch = model.config, values["general.architecture"]
    keys, attention = gguf.Keys.LLM, gguf.Keys.Attention
    expected = {
        keys.VOCAB_SIZE: 97,
        keys.CONTEXT_LENGTH: 64,
        keys.EMBEDDING_LENGTH: 32,
        keys.FEED_FORWARD_LENGTH: 48,
        keys.BLOCK_COUNT: 3,
        attention.HEAD_COUNT: 4,
        attention.HEAD_COUNT_KV: 2,
        attention.KEY_LENGTH: config.dim,
        attention.VALUE_LENGTH: config.dim,
        attention.LAYERNORM_RMS_EPS: np.float32(config.eps),
        gguf.Keys.Rope.DIMENSION_COUNT: config.dim,
        gguf.Keys.Rope.FREQ_BASE: {"llama3": 5e5, "gemma3": 1e6, "bitnet": 5e5}.get(family, 1e4),
    }
    if family in ("gemma2", "gemma3"):
        expected |= {
            attention.SLIDING_WINDOW: 4,
            f"{arch}.attention.sliding_window_pattern": [True, False, True],
            f"{arch}.rope.freq_base_swa": 1e4,
        }
    if family == "gemma2":
        expected |= {keys.ATTN_LOGIT_SOFTCAPPING: 4.0, keys.FINAL_LOGIT_SOFTCAPPING: 6.0}
    if family == "gemma3":
        expected |= {gguf.Keys.Rope.SCALING_TYPE: "linear", gguf.Keys.Rope.SCALING_FACTOR: 8.0}
    if family == "phi3":
        expected[attention.SLIDING_WINDOW] = 0
    actual = {name: value for name, value in values.items() if name.startswith(f"{arch}.")}
    assert actual == {key.format(arch=arch): value for key, value in expected.items()}
    assert values["general.name"] == "m"
    assert values["general.type"] == "model"
    assert values["general.file_type"] == gguf.LlamaFileType.ALL_F32
    assert values["general.quantization_version"] == gguf.GGML_QUANT_VERSION


SCALED = {  # rotary positions, and what a file says of them; keys behind "rope."
    "yarn": (
        {"factor": 4.0, "original_max_position_embeddings": 16},
        {"type": "yarn", "factor": 4.0, "original_context_length": 16, "attn_factor": 1.0},
    ),
    "yarn told": (
        {"factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 1.5,
         "beta_fast": 16.0},
        {"type": "yarn", "factor": 4.0, "original_context_length": 16, "yarn_beta_fast": 16.0,
         "attn_factor": 1.5 / (1 + 0.1 * np.log(4.0))},
    ),
    "linear": ({"factor": 3.0}, {"type": "linear", "factor": 3.0}),
    "dynamic": ({"factor": 2.0}, {}),
    "longrope": (
        {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2.0, 3.0, 4.0, 5.0], "factor": 4.0,
         "original_max_position_embeddings": 16},
        {"type": "longrope", "original_context_length": 16, "attn_factor": np.sqrt(1.5)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCALED)
def test_scalings_of_rotary_positions(name: str, tmp_path: Path) -> None:
    settings, expected = SCALED[name]
    rope = {"rope_type": name.split(maxsplit=1)[0], "rope_theta": 1e4, **settings}
    _, report, values, dense, _ = exported(
        tmp_path, {"model_type": "llama", "rope_parameters": rope}
    )
    start = "llama.rope.scaling."
    actual = {k.removeprefix(start): v for k, v in values.items() if k.startswith(start)}
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        assert actual[key] == (value if isinstance(value, str) else pytest.approx(value, rel=1e-6))
    if name == "longrope":
        np.testing.assert_array_equal(dense["rope_factors_short.weight"], settings["short_factor"])
        np.testing.assert_array_equal(dense["rope_factors_long.weight"], settings["long_factor"])
    said = {"yarn told": "beta_fast", "dynamic": "beyond 64 tokens", "longrope": "above 16 tokens"}
    assert [said[name] in note for note in report.notes] == [True] * (name in said)


def test_rope_factors_of_llama_3(tmp_path: Path) -> None:
    """Long wavelengths are 8 times as long, short ones as they were."""
    dense = exported(tmp_path, PLAIN["llama3"])[3]
    factors = dense["rope_freqs.weight"]
    assert factors.shape == (4,)
    wave = 2 * np.pi * 5e5 ** (np.arange(4) / 4)  # 6.28, 167, 4443, 118142 positions
    smooth = np.clip((16 / wave - 1) / 3, 0, 1)  # low 1, high 4, trained on 16
    np.testing.assert_allclose(factors, 1 / ((1 - smooth) / 8 + smooth), rtol=1e-6)


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind not in MIXED])
def test_types(kind: str, tmp_path: Path) -> None:
    """Vectors stay float32, odd rows become float16, and values are as near as the type allows."""
    config = WIDE | {"num_attention_heads": 31, "num_key_value_heads": 31}
    model, report, values, dense, types = exported(tmp_path, config, kind)
    odd = {"blk.0.attn_output.weight"}  # rows of 248
    tables = {"token_embd.weight", "output.weight"}
    for name, array in dense.items():
        if array.ndim == 1:
            assert types[name] == "f32"
        elif (name in odd and kind in BLOCKS) or (name in tables and kind.startswith("tq")):
            assert types[name] == "f16"
        else:
            assert types[name] == kind
    why = f"because row lengths are not multiples of the {kind} block size"
    note = f"1 tensor is stored as f16, {why} (blk.0.attn_output.weight)"
    assert report.notes == ((note,) if kind in BLOCKS else ())
    number = gguf.LlamaFileType(values["general.file_type"]).name
    assert number == ("ALL_F32" if kind == "f32" else f"MOSTLY_{kind.upper()}")
    weight, made = (
        model.parameters["model.layers.0.mlp.up_proj.weight"],
        dense["blk.0.ffn_up.weight"],
    )
    if kind in BLOCKS:
        blocks = weight.reshape(-1, BLOCKS[kind])
        most = np.abs(blocks).max(axis=1, keepdims=True)
        step = most / {"q8_0": 127, "q4_0": 8}.get(kind, 1)
        # q4_0 has one number less on the side of the smaller ones; a scale is a float16
        room = step / (1 if kind == "q4_0" else 2) + most * 2**-10
        assert (np.abs(made.reshape(blocks.shape) - blocks) <= room).all()
        assert np.abs(made - weight).max() > 0
    else:
        digits = {"f32": 0.0, "f16": 2**-11, "bf16": 2**-8}[kind]
        np.testing.assert_allclose(made, weight, rtol=digits, atol=2**-24)


@pytest.mark.parametrize("kind", MIXED)
@pytest.mark.parametrize("tied", [False, True])
def test_types_of_mixtures(kind: str, tied: bool, tmp_path: Path) -> None:
    """Most matrices have one type, the head another, and rows of 96 one of smaller blocks."""
    heads = {"num_attention_heads": 32, "num_key_value_heads": 32}
    config = WIDE | heads | {"tie_word_embeddings": tied, "intermediate_size": 96}
    model, report, values, dense, types = exported(tmp_path, config, kind)
    layers, head = MIXED[kind].split()
    assert types["blk.0.attn_q.weight"] == types["blk.0.ffn_up.weight"] == layers
    assert types["token_embd.weight"] == (head if tied else layers)
    assert types.get("output.weight", head) == head
    assert types["blk.0.ffn_norm.weight"] == "f32"
    down = types["blk.0.ffn_down.weight"]  # rows of 96 are not whole blocks of 256
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[down.upper()]][0] == 32
    assert report.notes == (() if down == layers else report.notes[:1])
    assert all(note.startswith("1 tensor is stored as") for note in report.notes)
    assert all(f" {down}, because row lengths are" in note for note in report.notes)
    assert sum(report.types.values()) == len(types)
    number = gguf.LlamaFileType(values["general.file_type"]).name
    assert number == f"MOSTLY_{kind.upper()}"
    weight = model.parameters["model.layers.0.mlp.up_proj.weight"]
    error = np.sqrt(np.mean((dense["blk.0.ffn_up.weight"] - weight) ** 2)) / weight.std()
    assert error < 1.4 * 2.0 ** -int(layers[1])


@pytest.mark.parametrize("kind", ["tq1_0", "tq2_0"])
def test_ternary_weights_come_back(kind: str, tmp_path: Path) -> None:
    model = make(tmp_path / "m", WIDE)
    draw = np.random.default_rng(3)
    for name, array in model.parameters.items():
        if "proj" in name:
            array[...] = draw.integers(-1, 2, array.shape) * 0.125  # a power of two is exact
    models.export_gguf(model, tmp_path / "m.gguf", kind=kind)
    _, dense, _ = read(tmp_path / "m.gguf")
    np.testing.assert_array_equal(
        dense["blk.0.ffn_down.weight"], model.parameters["model.layers.0.mlp.down_proj.weight"]
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
def test_a_folder_and_its_model_are_the_same_file(dtype: str, tmp_path: Path) -> None:
    model = make(tmp_path / "m", "llama", dtype=dtype)
    models.export_gguf(model, tmp_path / "a.gguf", kind="bf16")
    models.export_gguf(str(tmp_path / "m"), tmp_path / "b.gguf", kind="bf16")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    exact = model.parameters["model.layers.1.mlp.up_proj.weight"].astype(np.float32)
    made = read(tmp_path / "a.gguf")[1]["blk.1.ffn_up.weight"]
    np.testing.assert_allclose(made, exact, rtol=0 if dtype == "bfloat16" else 2**-8)


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_are_merged(dora: bool, tmp_path: Path) -> None:
    model = make(tmp_path / "m", "llama")
    model.add_adapter(4, dora=dora, base=str(tmp_path / "m"), targets=["q_proj", "down_proj"])
    draw = np.random.default_rng(4)
    for array in model.adapter.parameters.values():
        array[...] += 0.1 * draw.standard_normal(array.shape).astype(np.float32)
    model.save_adapter(tmp_path / "adapter")
    models.export_gguf(model, tmp_path / "model.gguf", kind="f32")
    models.export_gguf(tmp_path / "adapter", tmp_path / "folder.gguf", kind="f32")
    assert model.adapter is not None
    before = model.parameters["model.layers.0.mlp.down_proj.weight"]
    model.merge_adapter()
    after = model.parameters["model.layers.0.mlp.down_proj.weight"]
    assert np.abs(before - after).max() > 0.01
    for name in ("model.gguf", "folder.gguf"):
        dense = read(tmp_path / name)[1]
        np.testing.assert_array_equal(dense["blk.0.ffn_down.weight"], after)
        rotated = model.parameters["model.layers.2.self_attn.q_proj.weight"]
        np.testing.assert_array_equal(dense["blk.2.attn_q.weight"], rotated[reordered(32, 8)])


@pytest.mark.parametrize("init", [None, "pissa"])
def test_an_adapter_alone(init: str | None, tmp_path: Path) -> None:
    """Its products and the base's file are the file of the merged model."""
    model = make(tmp_path / "m", "llama")
    model.add_adapter(4, base=str(tmp_path / "m"), targets=["q_proj", "down_proj"], init=init)
    for name, array in model.adapter.parameters.items():
        if "lora_B" in name:
            array[...] = np.random.default_rng(len(name)).normal(0, 0.1, array.shape)
    model.save_adapter(tmp_path / "adapter")
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    rank = settings["r"]
    patterns = {"q_proj": 3 * settings["lora_alpha"], "layers.0.mlp.down_proj": 0}
    settings |= {"alpha_pattern": patterns}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    model.adapter.scales |= {n: 6.0 for n in model.adapter.scales if n.endswith("q_proj")}
    model.adapter.scales["model.layers.0.mlp.down_proj"] = 0.0  # the first one in a folder
    models.export_gguf(tmp_path / "m", tmp_path / "m.gguf", kind="f32")
    models.export_gguf(model, tmp_path / "merged.gguf", kind="f32")
    base, merged = (read(tmp_path / f"{name}.gguf")[1] for name in ("m", "merged"))
    for source, file in ((model, "a.gguf"), (tmp_path / "adapter", "b.gguf")):
        report = models.export_adapter_gguf(source, tmp_path / file, kind="f32")
        assert report.types == {"f32": 12}
        values, tensors = read(tmp_path / file)[:2]
        assert values["general.type"] == "adapter"
        assert values["general.architecture"] == "llama"
        assert values["adapter.type"] == "lora"
        names = {name.rpartition(".")[0] for name in tensors}
        assert len(names) == 6
        for name in names:
            a, b = (tensors[f"{name}.lora_{part}"] for part in "ab")
            assert len(a) == b.shape[1] == rank
            total = base[name] + values["adapter.lora.alpha"] / rank * b @ a
            np.testing.assert_allclose(total, merged[name], rtol=1e-5, atol=1e-5)
    half = models.export_adapter_gguf(model, tmp_path / "half.gguf")
    assert half.types == {"f16": 12}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"dora": True}, "llama.cpp does not add DoRA's norms; export_gguf merges it"),
        ({"tokens": [3]}, "does not add model.embed_tokens outside of the blocks"),
        ({"targets": ["lm_head", "q_proj"]}, "does not add lm_head outside of the blocks"),
        (None, "export_adapter_gguf: the model has no adapter; export_gguf writes a model"),
    ],
    ids=str,
)
def test_adapters_that_llama_cpp_does_not_add(
    options: dict[str, Any] | None, problem: str, tmp_path: Path
) -> None:
    model = make(tmp_path / "m", "llama")
    if options is not None:
        model.add_adapter(2, **options)
    with pytest.raises(ConfigError, match=problem):
        models.export_adapter_gguf(model, tmp_path / "a.gguf")
    with pytest.raises(ConfigError, match="kind='q4_0'"):
        models.export_adapter_gguf(model, tmp_path / "a.gguf", kind="q4_0")
    with pytest.raises(
        ConfigError, match=r"^export_adapter_gguf\(base='other'\) is for the folder"
    ):
        models.export_adapter_gguf(model, tmp_path / "a.gguf", base="other")
    model.config = replace(model.config, model_type="unknown")
    with pytest.raises(ConfigError, match=r"^export_adapter_gguf: GGUF has no names for a unknown"):
        models.export_adapter_gguf(model, tmp_path / "a.gguf")
    assert not (tmp_path / "a.gguf").exists()


@pytest.mark.parametrize("name", ["llama_nf4_double", "qwen3_nf4"])
def test_quantized_weights_are_written_as_they_are_dequantized(name: str, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / name, tmp_path / "m")
    model = models.load(tmp_path / "m")
    write_tokenizer(tmp_path / "m", byte_level(model.config.vocab))
    models.export_gguf(model, tmp_path / "model.gguf", kind="f32")
    models.export_gguf(tmp_path / "m", tmp_path / "folder.gguf", kind="f32")
    weight = model.parameters["model.layers.1.mlp.down_proj.weight"]
    assert isinstance(weight, Quantized)
    for file in ("model.gguf", "folder.gguf"):
        made = read(tmp_path / file)[1]["blk.1.ffn_down.weight"]
        np.testing.assert_array_equal(made, weight.dequantize("float32"))


def test_an_adapter_of_a_quantized_model(tmp_path: Path) -> None:
    model = make(tmp_path / "m", WIDE)
    models.quantize(model, "nf4", least=0)
    model.add_adapter(4, targets=["down_proj"])
    array = next(
        a for name, a in model.adapter.parameters.items() if name.endswith("lora_B.weight")
    )
    array[...] = 0.1
    models.export_gguf(model, tmp_path / "m.gguf", kind="f32")
    kept = model.parameters["model.layers.0.mlp.up_proj.weight"].dequantize()
    model.merge_adapter()
    dense = read(tmp_path / "m.gguf")[1]
    merged = model.parameters["model.layers.0.mlp.down_proj.weight"]
    np.testing.assert_array_equal(dense["blk.0.ffn_down.weight"], merged)
    np.testing.assert_array_equal(dense["blk.0.ffn_up.weight"], kept)


@pytest.mark.slow
def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    make(tmp_path / "m", WIDE | {"num_hidden_layers": 12, "vocab_size": 1200})
    largest, whole = 4 * 1200 * 256, (tmp_path / "m" / "model.safetensors").stat().st_size
    assert whole > 10 * largest
    models.export_gguf(tmp_path / "m", tmp_path / "first.gguf", kind="q8_0")  # imports
    tracemalloc.start()
    try:
        models.export_gguf(tmp_path / "m", tmp_path / "m.gguf", kind="q8_0")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert largest < peak < 2.5 * largest


@pytest.mark.slow
def test_chunks_of_rows_change_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor is never float32 as a whole, where it is bfloat16."""
    make(tmp_path / "m", WIDE | {"intermediate_size": 16_384}, dtype="bfloat16")
    models.export_gguf(tmp_path / "m", tmp_path / "whole.gguf", kind="q8_0")
    monkeypatch.setattr("unsloth_cupy.models.gguf._types.CHUNK", 3000)
    tracemalloc.start()
    try:
        models.export_gguf(tmp_path / "m", tmp_path / "chunks.gguf", kind="q8_0")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (tmp_path / "whole.gguf").read_bytes() == (tmp_path / "chunks.gguf").read_bytes()
    assert peak < 5 * 16_384 * 256, "2 bytes a number as stored, twice while it is read; not 4 more"


@pytest.mark.parametrize(("kind", "number"), [("q8_0", 5e6), ("q4_0", -4e5)])
def test_scales_are_what_must_fit(kind: str, number: float, tmp_path: Path) -> None:
    """A block of 8 bits holds 127 times the largest float16."""
    model = make(tmp_path / "m", "llama")
    model.parameters["model.layers.2.mlp.up_proj.weight"][3, 5] = number
    models.export_gguf(model, tmp_path / "m.gguf", kind=kind)
    assert read(tmp_path / "m.gguf")[1]["blk.2.ffn_up.weight"][3, 5] == pytest.approx(number, 1e-3)


@pytest.mark.parametrize(("layers", "length"), [(45, 16), (46, 8)])
def test_scores_of_the_gemma_of_27b(layers: int, length: int, tmp_path: Path) -> None:
    """Of 46 layers llama.cpp scales scores by hidden / heads, in place of the length of a head."""
    model, _, _, dense, _ = exported(tmp_path, PLAIN["gemma2"] | {"num_hidden_layers": layers})
    weight = model.parameters["model.layers.9.self_attn.q_proj.weight"]
    np.testing.assert_allclose(dense["blk.9.attn_q.weight"], weight * (length / 20) ** 0.5, 1e-6)


def test_a_tokenizer_of_another_folder(tmp_path: Path) -> None:
    model = make(tmp_path / "m", "llama")
    (tmp_path / "m" / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    for name, source in (("model", model), ("folder", tmp_path / "m")):
        models.export_gguf(source, tmp_path / f"{name}.gguf", tokenizer=tmp_path)
    assert read(tmp_path / "folder.gguf")[0] == read(tmp_path / "model.gguf")[0]


def test_what_llama_cpp_does_otherwise_is_said(tmp_path: Path) -> None:
    for name, words in {
        "mistral": "beyond 5 tokens",
        "qwen2 window": "beyond 4 tokens",
        "phi3 longrope": "beyond 9 tokens",
        "bitnet": "squared ReLU",
    }.items():
        config = CONFIGS[name] | ({"tie_word_embeddings": True} if name == "bitnet" else {})
        make(tmp_path / name, config)
        report = models.export_gguf(tmp_path / name, tmp_path / f"{name}.gguf")
        assert words in report.notes[0]
        assert f"note: {report.notes[0]}" in str(report)
        values = read(tmp_path / f"{name}.gguf")[0]
        window = values.get(f"{values['general.architecture']}.attention.sliding_window")
        assert window == {"mistral": 5, "qwen2 window": 4, "phi3 longrope": 9}.get(name)


@pytest.mark.parametrize("name", IN_LLAMA_CPP)
def test_relatives(name: str, tmp_path: Path) -> None:
    """Each tensor is in the file once, under a name of the architecture; so is each factor."""
    model = make(tmp_path / "m", IN_LLAMA_CPP[name])
    models.export_gguf(model, tmp_path / "m.gguf", kind="f32")
    values, dense, _ = read(tmp_path / "m.gguf")
    assert values["general.architecture"] == name
    stored = [array for key, array in model.parameters.items() if ".act_fn." not in key]
    extra = int(model.config.tied and name == "olmo2") + sum("rope_" in each for each in dense)
    assert len(dense) == len(stored) + extra
    head = values.get(f"{name}.logit_scale", 1.0)
    assert head == pytest.approx(
        1 / model.config.logit_scale if name == "granite" else model.config.logit_scale
    )
    if name == "apertus":
        layers = range(model.config.layers)
        alphas = [model.parameters[f"model.layers.{i}.mlp.act_fn.alpha_n"].item() for i in layers]
        np.testing.assert_allclose(values["xielu.alpha_n"], alphas, rtol=1e-6)
    if name == "nemotron":
        norms = (model.parameters["model.norm.weight"] + 1, model.parameters["model.norm.bias"])
        for part, expected in zip(("weight", "bias"), norms, strict=True):
            np.testing.assert_array_equal(dense[f"output_norm.{part}"], expected)


REFUSED = {
    "computes silu": {"model_type": "llama", "hidden_act": "gelu"},
    "has a head dimension of hidden / heads": {"model_type": "qwen2", "head_dim": 16},
    "no bias in its output": CONFIGS["qwen3"],
    "no head that is separate": {"model_type": "bitnet"},
    "always caps": CONFIGS["gemma2"] | {"attn_logit_softcapping": None},
    "of type llama3": {"model_type": "qwen2", "rope_parameters": LLAMA3},
    "rotates whole heads": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
    },
    "rounds yarn's": {"model_type": "llama", "rope_parameters": {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
        "truncate": False}},
    "of sliding layers": CONFIGS["gemma3"] | {"rope_parameters": {
        name: {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
        for name in ("full_attention", "sliding_attention")}},
    "no names for a glm": RELATIVES["glm"],
    "no norms of single query and key heads": RELATIVES["phi"],
    "rotates all layers but every fourth": RELATIVES["smollm3"] | {"mlp_bias": False},
    "in all layers but every fourth": RELATIVES["cohere2"],
    "has windows only in models with 64 layers": RELATIVES["exaone4"],
    "has biases in its output": {"model_type": "starcoder2", "use_bias": False},
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_what_a_file_cannot_say_is_refused(words: str, tmp_path: Path) -> None:
    make(tmp_path / "m", REFUSED[words])
    with pytest.raises(ConfigError, match=words):
        models.export_gguf(tmp_path / "m", tmp_path / "m.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_family_without_names_is_refused(tmp_path: Path) -> None:
    model = make(tmp_path / "m", "llama")
    model.config = replace(model.config, model_type="rwkv")
    with pytest.raises(
        ConfigError, match="no names for a rwkv; supported families: apertus, arcee"
    ):
        models.export_gguf(model, tmp_path / "m.gguf")


def test_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(tmp_path / "m", "llama")
    (tmp_path / "there.gguf").write_text("mine")
    for source, file, options, words in (
        (model, tmp_path / "m.gguf", {"kind": "q9"}, "kind='q9'; choose from f32, f16, bf16"),
        (model, tmp_path / "there.gguf", {}, "exists; remove it, or name another file"),
        (model, tmp_path / "no" / "m.gguf", {}, "is not a folder; create it first"),
        (model, tmp_path / "m.Safetensors", {}, r"suffix; end its name with .gguf: m\.gguf"),
        (tmp_path / "no", tmp_path / "m.gguf", {}, "no is not a folder; pass one that holds"),
        (3, tmp_path / "m.gguf", {}, "pass a path"),
        (model, 3, {}, "pass a path"),
        (model, tmp_path / "m.gguf", {"tokenizer": tmp_path}, "has no tokenizer.json"),
        (models.create(SIZES | {"model_type": "llama"}, seed=0), tmp_path / "m.gguf", {},
         "was not loaded from a folder"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            models.export_gguf(source, file, **options)
    (tmp_path / "m" / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json; copy it"):
        models.export_gguf(tmp_path / "m", tmp_path / "m.gguf")
    for package in ("gguf", "tokenizers"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            with pytest.raises(ConfigError, match=rf"package {package}; .*unsloth_cupy\[gguf\]"):
                models.export_gguf(model, tmp_path / "m.gguf")
    assert (tmp_path / "there.gguf").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {"m", "there.gguf"}


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (np.nan, "q8_0", "contains numbers that are not finite"),
        (-np.inf, "f32", "contains numbers that are not finite"),
        (-1e5, "f16", "contains 100000, out of range of f16; choose bf16"),
        (1e7, "q8_0", "contains 1e\\+07, out of range of q8_0"),
    ],
)
def test_weights_that_do_not_fit_leave_no_file(
    number: float, kind: str, words: str, tmp_path: Path
) -> None:
    model = make(tmp_path / "m", "llama")
    model.parameters["model.layers.2.mlp.up_proj.weight"][3, 5] = number
    with pytest.raises(ConfigError, match=rf"export_gguf: blk\.2\.ffn_up\.weight {words}"):
        models.export_gguf(model, tmp_path / "m.gguf", kind=kind)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_full_disk_is_said_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(tmp_path / "m", "llama")
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10})())
    with pytest.raises(ConfigError, match=r"^export_gguf: the GGUF file needs .* has only 0.0 MiB"):
        models.export_gguf(model, tmp_path / "m.gguf")


@pytest.mark.parametrize("name", ["export_gguf", "export_adapter_gguf"])
@pytest.mark.parametrize("writer", ["write_tensor_data", "write_kv_data_to_file"])
def test_a_disk_that_fills_up_meanwhile(
    name: str, writer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:  # NumPy's error has no number
        of_numpy = writer == "write_tensor_data"
        raise OSError("512 written") if of_numpy else OSError(errno.ENOSPC, "No space left")

    model = make(tmp_path / "m", "llama")
    model.add_adapter(2)
    monkeypatch.setattr(gguf.GGUFWriter, writer, fail)
    says = rf"^{name}: .*a\.gguf cannot be written: .*; make room on its disk"
    with pytest.raises(ConfigError, match=says):
        getattr(models, name)(model, tmp_path / "a.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("progress", [False, True])
def test_a_bar_on_a_terminal(
    progress: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make(tmp_path / "m", "llama")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    models.export_gguf(tmp_path / "m", tmp_path / "m.gguf", progress=progress)
    assert ("m.gguf: 100%" in capsys.readouterr().err) is progress


def test_a_name_that_llama_cpp_takes_for_another_model_is_left_out(tmp_path: Path) -> None:
    for name in ("my-Phi-3-mini", "phi"):
        make(tmp_path / name, "phi3")
        models.export_gguf(tmp_path / name, tmp_path / f"{name}.gguf")
    assert "general.name" not in read(tmp_path / "my-Phi-3-mini.gguf")[0]
    assert read(tmp_path / "phi.gguf")[0]["general.name"] == "phi"


def test_command(tmp_path: Path) -> None:
    make(tmp_path / "m", "llama")
    write_tokenizer(tmp_path / "m", byte_level(97), chat_template="{{ messages }}")

    def run(*arguments: object) -> click.testing.Result:
        return click.testing.CliRunner().invoke(group, ["export", *map(str, arguments)])

    done = run(tmp_path / "m", tmp_path / "m.gguf", "--type", "Q8_0")
    assert done.exit_code == 0, done.output
    assert done.output.startswith(f"{tmp_path / 'm.gguf'}: ")
    assert "20 q8_0, 3 f16, 7 f32" in done.output
    values, _, types = read(tmp_path / "m.gguf")
    assert types["blk.0.attn_q.weight"] == "q8_0"
    assert values["tokenizer.chat_template"] == "{{ messages }}"
    again = run(tmp_path / "m", tmp_path / "m.gguf")
    assert again.exit_code == 1
    assert "exists; remove it" in again.output
    assert "is not one of 'f32'" in run(tmp_path / "m", tmp_path / "n.gguf", "--type", "q2").output
    (tmp_path / "run").mkdir()
    (tmp_path / "m").rename(tmp_path / "run" / "model")
    (tmp_path / "run" / "settings.json").write_text(json.dumps({}))
    assert run(tmp_path / "run", tmp_path / "n.gguf").exit_code == 0
