"""Folders that other programs quantized: GPTQ, AWQ, FP8 and compressed-tensors, read as dense.

The codes are packed here as the makers document them.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors

from unsloth_cupy import AdamW, models
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.machine import format_bytes
from unsloth_cupy.models.folders.checkpoint_files import opened
from unsloth_cupy.models.folders.lazy_parameter import LazyParameter
from unsloth_cupy.models.folders.stored import stored_model
from unsloth_cupy.parallel import SingleCommunicator

from .exported import make
from .peers import MIXTURES, SIZES

Array = np.ndarray
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}
TOKENS = np.arange(3, 15)[None]
NAMES = {"float8_e4m3fn": "F8_E4M3", "float8_e8m0fnu": "F8_E8M0", "int8": "I8", "int32": "I32",
         "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32"}  # fmt: skip
E4M3 = ml_dtypes.float8_e4m3fn
Made = tuple[Array, dict[str, Array]]  # the dense weight, and the tensors that stand for it


def packed(codes: Array, bits: int) -> Array:
    """Pack codes along the last axis, without gaps, the first in the lowest bits of an int32."""
    each = codes.astype(np.uint64)
    words = np.zeros((*codes.shape[:-1], -(-codes.shape[-1] * bits // 32) + 1), np.uint64)
    for i in range(codes.shape[-1]):
        word, shift = divmod(i * bits, 32)
        value = each[..., i] << np.uint64(shift)
        words[..., word] |= value & np.uint64(0xFFFFFFFF)
        words[..., word + 1] |= value >> np.uint64(32)
    return words[..., :-1].astype(np.uint32).view(np.int32)


def gptq(
    draw: Any, outputs: int, inputs: int, *, bits: int = 4, group: int = 32, older: bool = True,
    order: bool = False, sym: bool = False,
) -> Made:  # fmt: skip
    group = inputs if group == -1 else group
    codes = draw.integers(0, 2**bits, (outputs, inputs))
    places = np.arange(inputs) // group
    places = draw.permutation(places) if order else places
    scales = draw.uniform(0.01, 0.03, (outputs, inputs // group)).astype(np.float16)
    zeros = draw.integers(1, 2**bits, scales.shape)
    zeros = np.full_like(zeros, 2 ** (bits - 1)) if sym else zeros
    dense = (codes - zeros[:, places]) * scales[:, places].astype(np.float32)
    state = {
        "qweight": np.ascontiguousarray(packed(codes, bits).T),
        "qzeros": packed((zeros - older).T, bits),
        "scales": np.ascontiguousarray(scales.T),
        "g_idx": places.astype(np.int32),
    }
    return dense, state


def awq(draw: Any, outputs: int, inputs: int, *, group: int = 32) -> Made:
    codes, places = draw.integers(0, 16, (outputs, inputs)), np.arange(inputs) // group
    scales = draw.uniform(0.01, 0.03, (outputs, inputs // group)).astype(np.float16)
    zeros = draw.integers(0, 16, scales.shape)
    dense = (codes - zeros[:, places]) * scales[:, places].astype(np.float32)

    def ordered(columns: Array) -> Array:
        parts = columns.reshape(len(columns), -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
        return packed(parts.reshape(len(columns), -1), 4)

    state = {"qweight": ordered(codes.T), "qzeros": ordered(zeros.T)}
    return dense, {**state, "scales": np.ascontiguousarray(scales.T)}


def fp8(
    draw: Any, outputs: int, inputs: int, *, grid: tuple[int, ...] = (), key: str = "weight_scale",
    dtype: Any = np.float32,
) -> Made:  # fmt: skip
    """Return a weight with scales of (a block's rows, its columns), or of as many as () says."""
    codes = draw.normal(0, 40, (outputs, inputs)).astype(E4M3)
    shape: Any = grid
    if key == "weight_scale_inv":
        shape = tuple(-(-size // each) for size, each in zip((outputs, inputs), grid, strict=True))
    elif len(grid):
        shape = (outputs, *grid[1:])
    scales = (2.0 ** draw.integers(-9, -6, shape)).astype(dtype)
    wide = np.asarray(scales, np.float32)
    if key == "weight_scale_inv":
        wide = wide.repeat(grid[0], 0).repeat(grid[1], 1)[:outputs, :inputs]
    elif len(grid):
        wide = wide.reshape(outputs, 1)
    extra = {"input_scale": np.float32(0.5).reshape(())} if key == "weight_scale" else {}
    return codes.astype(np.float32) * wide, {"weight": codes, key: scales, **extra}


def compressed(
    draw: Any, outputs: int, inputs: int, *, bits: int = 4, group: int | None = 32,
    zeros: bool = False, pack: bool = True,
) -> Made:  # fmt: skip
    half, width = 2 ** (bits - 1), inputs if group is None else group
    codes = draw.integers(-half, half, (outputs, inputs))
    scales = draw.uniform(0.01, 0.03, (outputs, inputs // width)).astype(ml_dtypes.bfloat16)
    zero = draw.integers(-half, half, scales.shape) * zeros
    places = np.arange(inputs) // width
    dense = (codes - zero[:, places]) * scales[:, places].astype(np.float32)
    if not pack:
        state = {"weight": codes.astype(np.int8), "weight_scale": scales}
        return dense, state | ({"weight_zero_point": zero.astype(np.int8)} if zeros else {})
    state = {"weight_packed": packed(codes + half, bits), "weight_scale": scales}
    state["weight_shape"] = np.array([outputs, inputs])
    if zeros:
        state["weight_zero_point"] = np.ascontiguousarray(packed((zero + half).T, bits).T)
    return dense, state


def group_of(**weights: Any) -> dict[str, Any]:
    """Return config_groups of compressed-tensors."""
    known = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
    whole = {**known, "group_size": 32, "dynamic": False, "observer": "minmax", **weights}
    activations = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}
    scheme = {"targets": ["Linear"], "weights": whole, "input_activations": activations}
    return {"config_groups": {"group_0": {**scheme, "output_activations": None}}}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False,
        "damp_percent": 0.1, "true_sequential": True, "lm_head": False}  # fmt: skip
ROUND = {"data_type": "int", "iters": 200, "lr": 0.005, "low_gpu_mem_usage": True, "act_bits": 16,
         "autoround_version": "0.12.3", "enable_quanted_input": True, "seqlen": 2048,
         "super_bits": None}  # fmt: skip
AUTO = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, **ROUND,
        "packing_format": "auto_round:auto_gptq", "block_name_to_quantize": "model.layers",
        "extra_config": {"lm_head": {"bits": 16, "data_type": "fp"}}}  # fmt: skip
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True,
       "modules_to_not_convert": None}  # fmt: skip
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
CT = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
      "quantization_status": "compressed", "kv_cache_scheme": None,
      "sparsity_config": {"format": "dense", "global_sparsity": 0.1}, **group_of()}  # fmt: skip
BLOCK = {"grid": (32, 48), "key": "weight_scale_inv"}
CASES: dict[str, tuple[dict[str, Any], Callable[..., Made], dict[str, Any]]] = {
    **{f"gptq {bits}": (GPTQ | {"bits": bits}, gptq, {"bits": bits}) for bits in (2, 3, 4, 8)},
    "gptq v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, gptq, {"older": False}),
    "gptq act order": (GPTQ | {"desc_act": True}, gptq, {"order": True}),
    "gptq one group": (GPTQ | {"group_size": -1}, gptq, {"group": -1}),
    "gptq symmetric": (GPTQ | {"sym": True}, gptq, {"sym": True}),
    "gptq by layer": (GPTQ | {"dynamic": {".*": {"bits": 8}}}, gptq, {"bits": 8}),
    "gptq of AutoRound": (GPTQ | ROUND | {"provider": "auto-round"}, gptq, {"sym": True}),
    "auto-round": (AUTO, gptq, {}),
    "auto-round by layer": (AUTO | {"extra_config": {"q": {"bits": 8}}}, gptq, {"bits": 8}),
    "awq": (AWQ, awq, {}),
    "awq older keys": ({"quant_method": "awq", "w_bit": 4, "q_group_size": 32}, awq, {}),
    "fp8 blocks": (FP8 | {"weight_block_size": [32, 48]}, fp8, BLOCK),
    "fp8 blocks e8m0": (
        FP8 | {"weight_block_size": [32, 48], "scale_fmt": "ue8m0"},
        fp8,
        {**BLOCK, "dtype": ml_dtypes.float8_e8m0fnu},
    ),
    "fp8 square": (FP8 | {"weight_block_size": [32, 32]}, fp8, BLOCK | {"grid": (32, 32)}),
    "fp8 tensor": (FP8 | {"ignored_layers": ["lm_head"]}, fp8, {}),
    "fp8 row": ({"quant_method": "fbgemm_fp8"}, fp8, {"grid": (1, 1)}),
    "fp8 channel": (FP8, fp8, {"grid": (1,)}),
    **{
        f"packed {bits} {zeros}": (
            CT | group_of(num_bits=bits, symmetric=not zeros),
            compressed,
            {"bits": bits, "zeros": zeros},
        )
        for bits in (3, 4, 8)
        for zeros in (False, True)
    },
    "packed by row": (CT | group_of(strategy="channel"), compressed, {"group": None}),
    "int8": (
        CT | {"format": "int-quantized"} | group_of(num_bits=8, strategy="channel"),
        compressed,
        {"bits": 8, "group": None, "pack": False, "zeros": True},
    ),
    "naive int4": (
        CT | {"format": "naive-quantized"} | group_of(),
        compressed,
        {"pack": False},
    ),
    "float": (
        CT | {"format": "float-quantized"} | group_of(num_bits=8, type="float", strategy="channel"),
        fp8,
        {"grid": (1, 1)},
    ),
}


def write(path: Path, tensors: Mapping[str, Array]) -> None:
    """Write a safetensors file with dtypes that NumPy's writer does not know."""
    header, start = {}, 0
    for name, array in tensors.items():
        place = [start, start := start + array.nbytes]
        header[name] = {
            "dtype": NAMES[array.dtype.name],
            "shape": array.shape,
            "data_offsets": place,
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = [np.ascontiguousarray(array).tobytes() for array in tensors.values()]
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data))


def folder(path: Path, case: str) -> dict[str, Array]:
    """Write a model of a case; return all its weights, as they are when dense."""
    facts, maker, options = CASES[case]
    model = make(path, CONFIG, dtype="float16")
    dense, stored = {}, {}
    draw = np.random.default_rng(5)
    for name, array in model.parameters.items():
        if ".layers." not in name or array.ndim != 2:
            dense[name] = stored[name] = array
            continue
        wide, state = maker(draw, *array.shape, **options)
        dense[name] = wide.astype(np.float16)
        stored |= {name.removesuffix("weight") + key: each for key, each in state.items()}
    write(path / "model.safetensors", stored)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": facts}))
    return dense


@pytest.mark.parametrize("case", CASES)
def test_weights_are_dense_as_they_are_read(case: str, tmp_path: Path) -> None:
    dense = folder(tmp_path, case)
    model = models.load(tmp_path)
    for name, array in model.parameters.items():
        assert array.dtype == np.float16
        np.testing.assert_array_equal(array, dense[name], err_msg=name)
    method = str(CASES[case][0]["quant_method"]).replace("auto-round", "gptq")
    assert method in str(model.origin)
    assert "14 " in str(model.origin)
    wide = models.load(tmp_path, dtype="float32")
    assert wide.table.dtype == np.float32
    assert np.abs(wide.logits(TOKENS)).max() > 0.1


def mixture(path: Path, label: str, case: str, dense: tuple[str, ...] = (), shards: int = 1) -> int:
    """Write a mixture of a case, and in ``dense`` as it is when read; routers stay dense.

    Returns the bytes of what is quantized.
    """
    facts, maker, options = CASES[case]
    config = SIZES | MIXTURES[label] | {"hidden_size": 64, "intermediate_size": 96}
    config |= {"moe_intermediate_size": 96} if "moe_intermediate_size" in MIXTURES[label] else {}
    models.create(config, seed=0, dtype="float16").save(path)
    draw, wide, stored = np.random.default_rng(3), dict[str, Array](), dict[str, Array]()
    size = 0
    for name, array in stored_tensors(path / "model.safetensors").items():
        left = name.endswith(("gate.weight", *dense))
        if ".layers." not in name or array.ndim != 2 or left or array.shape[1] % 32:
            wide[name] = stored[name] = array
            continue
        values, state = maker(draw, *array.shape, **options)
        wide[name] = values.astype(np.float16)
        size += sum(each.nbytes for key, each in state.items() if key != "input_scale")
        stored |= {name.removesuffix("weight") + key: each for key, each in state.items()}
    plain = (path / "config.json").read_text()
    (path / "dense").mkdir()
    (path / "dense" / "config.json").write_text(plain)
    write(path / "dense" / "model.safetensors", wide)
    (path / "model.safetensors").unlink()
    for i in range(shards):
        own = {name: stored[name] for name in [*stored][i::shards]}
        write(path / f"model{i or ''}.safetensors", own)
    config = json.loads(plain) | {"quantization_config": facts}
    (path / "config.json").write_text(json.dumps(config))
    return size


EXPERTS = [
    *[("mixtral", "gptq act order"), ("qwen3_moe", "awq"), ("deepseek_v3", "fp8 blocks")],
    *[("qwen3_moe", "fp8 tensor"), ("mixtral", "packed 4 True"), ("deepseek_v3", "int8")],
]


@pytest.mark.parametrize(("label", "case"), EXPERTS)
def test_experts_are_dense_as_they_are_read(label: str, case: str, tmp_path: Path) -> None:
    """Also of a stack in which some matrices are dense, as modules_to_not_convert may say."""
    size = mixture(
        tmp_path, label, case, ("1.mlp.experts.1.up_proj.weight", "experts.2.w1.weight"), 2
    )
    (tmp_path / "model.safetensors").rename(tmp_path / "model0.safetensors")
    model, expected = models.load(tmp_path), models.load(tmp_path / "dense")
    for name, array in expected.parameters.items():
        assert model.parameters[name].dtype == array.dtype
        np.testing.assert_array_equal(model.parameters[name], array, err_msg=name)
    homes = stored_model("test", tmp_path).homes
    count = sum(home.computed for home in homes.values())
    assert f"tensors: {count} {CASES[case][0]['quant_method']}" in str(model.origin)
    assert f"; {format_bytes(size)}, read as float16" in str(model.origin)
    place = homes["model.layers.1.mlp.experts.gate_up_proj"]
    with ExitStack() as stack:
        files = {file: stack.enter_context(opened(tmp_path / file)) for file in place.files}
        some = LazyParameter("", place, files)[1:3, 90:105, 8:40]  # rows of gate and of up
    stored = expected.parameters["model.layers.1.mlp.experts.gate_up_proj"]
    np.testing.assert_array_equal(some, stored[1:3, 90:105, 8:40])
    model = models.load(tmp_path, dtype="float32")
    model.add_adapter(2, seed=1)
    for array in model.trainable.values():
        array[...] = 0.05 * np.random.default_rng(1).standard_normal(array.shape)
    model.save_adapter(tmp_path / "adapter")
    models.merge(tmp_path / "adapter", tmp_path / "merged", base=tmp_path, dtype="float32")
    merged = models.load(tmp_path / "merged")
    np.testing.assert_allclose(merged.logits(TOKENS), model.logits(TOKENS), rtol=1e-4, atol=1e-5)


def test_parts_of_experts_are_named(tmp_path: Path) -> None:
    mixture(tmp_path, "qwen3_moe", "gptq 4")
    file, module = tmp_path / "model.safetensors", "model.layers.1.mlp.experts.2.gate_proj."
    stored = stored_tensors(file)
    write(file, {name: each for name, each in stored.items() if name != f"{module}scales"})
    with pytest.raises(ConfigError, match=r"experts.2.gate_proj.scales is missing, a part of g"):
        models.load(tmp_path)
    write(file, {name: each for name, each in stored.items() if not name.startswith(module)})
    with pytest.raises(
        ConfigError, match=r"tensor '.*experts.2.gate_proj.weight' is missing; copy"
    ):
        models.load(tmp_path)
    write(file, stored | {f"{module}weight": np.zeros((96, 64), np.float16)})
    with pytest.raises(
        ConfigError, match=r"gate_proj.weight' exists, and also the quantized part '.*2.gate_proj.q"
    ):
        models.load(tmp_path)
    write(file, stored | {f"{module}bias": np.zeros(96, np.float16)})  # as AutoGPTQ gives it
    models.load(tmp_path)
    write(file, stored)
    write(tmp_path / "other.safetensors", {f"{module}scales": stored[f"{module}scales"]})
    index = dict.fromkeys(stored, "model.safetensors") | {"more": "other.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    models.load(tmp_path)  # a single file goes before an index, as in transformers
    file.rename(tmp_path / "first.safetensors")
    index = {name: "first.safetensors" for name in stored} | {"more": "other.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(ConfigError, match=r"gate_proj.scales' is also in first.safetensors; keep"):
        models.load(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("label", ["mixtral", "qwen3_moe", "deepseek_v3"])
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers
def test_transformers_reads_the_same_experts(label: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="a peer")
    torch = pytest.importorskip("torch", reason="a peer")
    mixture(tmp_path, label, "fp8 square")
    dequantized = transformers.FineGrainedFP8Config(dequantize=True, weight_block_size=(32, 32))
    peer = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, quantization_config=dequantized
    )
    with torch.no_grad():
        expected = peer(torch.tensor(TOKENS)).logits.numpy()
    actual = models.load(tmp_path, dtype="float32").logits(TOKENS)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=5e-5)


@pytest.mark.parametrize("case", ["gptq act order", "awq", "fp8 blocks", "packed 4 True"])
def test_what_is_done_with_them(case: str, tmp_path: Path) -> None:
    """Training of an adapter, merging and saving, by ranks and quantized again."""
    dense = folder(tmp_path / "m", case)
    model = models.load(tmp_path / "m", dtype="float32")
    plain = model.logits(TOKENS)
    model.add_adapter(4, seed=1)
    optimizer = AdamW(model.trainable, lr=0.01)
    losses = []
    for _ in range(3):
        loss, gradients = model.loss_and_gradients(TOKENS, TOKENS)
        losses.append(float(loss))
        optimizer.step(gradients)
    assert losses[2] < losses[0]
    trained = model.logits(TOKENS)
    model.save_adapter(tmp_path / "adapter")
    report = models.merge(tmp_path / "adapter", tmp_path / "merged", dtype="float32")
    assert any("dense here" in note for note in report.notes)
    merged = models.load(tmp_path / "merged")
    np.testing.assert_allclose(merged.logits(TOKENS), trained, rtol=1e-4, atol=1e-5)
    model.adapter = None
    model.save(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert "quantization_config" not in config
    with safetensors.safe_open(tmp_path / "saved" / "model.safetensors", "np") as file:
        assert {*file.keys()} == {*dense}
    np.testing.assert_array_equal(models.load(tmp_path / "saved").logits(TOKENS), plain)
    alone = models.load(tmp_path / "m", dtype="float32", communicator=SingleCommunicator())
    np.testing.assert_array_equal(alone.logits(TOKENS), plain)
    four = models.load(tmp_path / "m", dtype="float32", quantize="nf4")
    assert type(four.parameters["model.layers.0.mlp.up_proj.weight"]).__name__ == "Nf4"


@pytest.mark.parametrize("dtype", [None, "float32"])
@pytest.mark.parametrize(("case", "kind"), [("gptq act order", "nf4"), ("awq", "q4_0")])
def test_adapters_through_quantizers(
    case: str, kind: str, dtype: str | None, tmp_path: Path
) -> None:
    """The file is rounded from the weights that were used, which depend on the dtype."""
    folder(tmp_path / "m", case)
    model = models.load(tmp_path / "m", dtype=dtype)
    model.add_adapter(4, base=str(tmp_path / "m"), merge_into=kind)
    draw = np.random.default_rng(1)
    for array in model.trainable.values():
        array[...] = 0.05 * draw.standard_normal(array.shape)
    model.save_adapter(tmp_path / "adapter")
    if kind == "nf4":
        out = models.merge(tmp_path / "adapter", tmp_path / "out").folder
    else:
        out = tmp_path / "m.gguf"
        models.export_gguf(tmp_path / "adapter", out, tokenizer=tmp_path / "m")
    expected, held = model.settled().parameters, model.table.dtype.name
    for name, weight in models.load(out, dtype=dtype).parameters.items():
        actual, wanted = (
            each.dequantize(held) if hasattr(each, "dequantize") else each.astype(held)
            for each in (weight, expected[name])
        )
        np.testing.assert_array_equal(actual, wanted, err_msg=name)


def changed(path: Path, **facts: Any) -> None:
    """Change the quantization_config of a folder."""
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] |= facts
    (path / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("case", "facts", "problem"),
    [
        (
            "gptq 4",
            {"strange": 3},
            r"quantization_config of gptq: strange=3 is not supported",
        ),
        (
            "gptq 4",
            {"checkpoint_format": "marlin"},
            r"checkpoint_format=marlin is not supported; it",
        ),
        ("gptq 4", {"bits": 5}, r"bits=5 is not supported; it must be 2 or 3 or 4 or 8"),
        ("gptq 4", {"bits": 8}, r"96 codes of 8 bits do not fill 12 int32, as quantization_config"),
        (
            "gptq 4",
            {"group_size": 64},
            r"down_proj.weight has 3 scales along 96 columns",
        ),
        ("gptq 4", {"format": "gptq_v2", "checkpoint_format": "gptq"}, r"format differ"),
        (
            "auto-round",
            {"packing_format": "auto_round:exllamav2"},
            r"packing_format=auto_round:exl",
        ),
        ("auto-round", {"packing_format": None}, r"packing_format is missing; it must be auto_r"),
        ("auto-round", {"act_bits": 8}, r"act_bits=8 is not supported; it must be 16 or 32"),
        ("auto-round", {"super_bits": 6}, r"super_bits=6 is not supported"),
        ("awq", {"group_size": 48}, r"has 2 scales along 64 columns|3 scales along 96 columns"),
        ("awq", {"backend": "llm-awq"}, r"backend=llm-awq is not supported"),
        ("fp8 blocks", {"weight_block_size": [32, 32]}, r"has 2 scales along 96 columns"),
        ("fp8 blocks", {"weight_block_size": None}, r"has 2 scales along 64 rows, unlike the"),
        ("packed 4 True", group_of(group_size=16), r"has 3 scales along 96 columns"),
        ("packed 4 True", group_of(num_bits=8), r"96 codes of 8 bits do not fill 12 int32"),
        ("packed 4 True", {"config_groups": None}, r"has 3 scales along 96 columns"),
        ("packed 4 True", {"transform_config": {"a": 1}}, r"transform_config=.* is not supported"),
        ("awq", {"version": "gemv"}, r"version=gemv is not supported; it must be gemm"),
        ("fp8 blocks", {"fmt": "e5m2"}, r"fmt=e5m2 is not supported"),
        ("packed 4 True", {"format": "nvfp4-pack-quantized"}, r"format=nvfp4-pack-quantized is n"),
        (
            "packed 4 True",
            {"sparsity_config": {"format": "sparse-bitmask"}},
            r"config=.*mask'} is n",
        ),
        ("packed 4 True", {"config_groups": [1]}, r"config_groups is \[1\]; it must be an object"),
        ("gptq 4", {"group_size": "all"}, r"group_size is 'all'; it must be an integer"),
        ("fp8 blocks", {"weight_block_size": "32x48"}, r"is 32x48; it must be two integers"),
        ("packed 4 True", group_of(strategy="odd"), r"weights of group_0: strategy=odd is not"),
        ("packed 4 True", {"config_groups": {"g": {"weights": None}}}, r"without its weights"),
        ("float", group_of(type="float", num_bits=4), r"weights of group_0 are floats of 4 bits"),
        (
            "gptq 4",
            {"quant_method": "aqlm"},
            r"has quant_method aqlm, which is not bitsandbytes or bitnet or gptq",
        ),
    ],
)
def test_what_is_not_understood_is_refused(
    case: str, facts: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    folder(tmp_path, case)
    changed(tmp_path, **facts)
    with pytest.raises(ConfigError, match=problem):
        models.load(tmp_path)


@pytest.mark.parametrize("bits", [3, 8])
@pytest.mark.parametrize("named", [None, "gptq", "gptq_v2"])
@pytest.mark.parametrize("older", [False, True])
@pytest.mark.parametrize("zero", ["symmetric", "other"])
def test_zeros_that_contradict_symmetric_codes(
    zero: str, older: bool, named: str | None, bits: int, tmp_path: Path
) -> None:
    """Codes are centred at the true zero, whatever config.json names; the origin says it."""
    half, stated = 1 << (bits - 1), named != "gptq_v2"
    case = f"gptq {bits}"
    model = make(tmp_path, CONFIG | {"hidden_size": 128, "intermediate_size": 512})
    draw, dense, stored = np.random.default_rng(1), dict[str, Array](), dict[str, Array]()
    true = half if zero == "symmetric" or older != stated else half + (1 if stated else -1)
    zeros = true - older
    for name, array in model.parameters.items():
        dense[name] = stored[name] = array
        if ".layers." in name and array.ndim == 2:
            spread = half / 3
            codes = np.clip(np.rint(draw.normal(true, spread, array.shape)), 0, 2 * half - 1)
            codes[:, ::2] = np.clip(2 * true - codes[:, 1::2], 0, 2 * half - 1)
            scale = np.float32(0.5**8)
            groups = (array.shape[1] // 32, array.shape[0])
            parts = {
                "qweight": np.ascontiguousarray(packed(codes.astype(int), bits).T),
                "qzeros": packed(np.full(groups, zeros), bits),
                "scales": np.full(groups, scale),
            }
            del stored[name]
            stored |= {name.removesuffix("weight") + key: each for key, each in parts.items()}
            dense[name] = (codes - true).astype(np.float32) * scale
    write(tmp_path / "model.safetensors", stored)
    facts = CASES[case][0] | {"sym": True} | ({"checkpoint_format": named} if named else {})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": facts}))
    actual = models.load(tmp_path)
    for name, array in actual.parameters.items():
        np.testing.assert_array_equal(array, dense[name], err_msg=name)
    contradicts = zeros == (half if stated else half - 1)
    taken = "gptq" if older else "gptq_v2"
    assert (f"zeros are {zeros}, and codes" in str(actual.origin)) == contradicts
    assert (f": read as {taken})" in str(actual.origin)) == contradicts


@pytest.mark.parametrize("case", [case for case in CASES if "e8m0" not in case])
def test_scales_that_are_not_finite_are_refused(case: str, tmp_path: Path) -> None:
    folder(tmp_path, case)
    file = tmp_path / "model.safetensors"
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    names = [name for name in header if name.endswith(("scales", "weight_scale", "scale_inv"))]
    first = 8 + size + header[names[-1]]["data_offsets"][1]
    nan = {"F16": b"\xff\xff", "BF16": b"\xff\xff", "F32": b"\xff\xff\xff\xff"}
    number = nan[header[names[-1]]["dtype"]]
    file.write_bytes(data[: first - len(number)] + number + data[first:])
    with pytest.raises(ConfigError, match=rf"{names[-1]} holds a number that is not finite; copy"):
        models.load(tmp_path)


def test_the_shape_of_packed_codes_is_compared(tmp_path: Path) -> None:
    folder(tmp_path, "packed 4 True")
    file, name = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj.weight_shape"
    write(file, stored_tensors(file) | {name: np.array([96, 60])})
    with pytest.raises(ConfigError, match=r"weight_shape is \(96, 60\); config.json implies"):
        models.load(tmp_path)


@pytest.mark.parametrize("case", ["float", "fp8 tensor", "gptq 4", "awq", "packed 4 True"])
def test_scales_of_a_cache_are_left_out_and_named(case: str, tmp_path: Path) -> None:
    dense = folder(tmp_path, case)
    file, layer = tmp_path / "model.safetensors", "model.layers.0.self_attn."
    text = file.read_bytes()
    size = int.from_bytes(text[:8], "little")
    header, end = json.loads(text[8 : 8 + size]), len(text) - 8 - size
    for name in ("k_scale", "v_scale", "k_proj.k_scale", "v_proj.v_scale", "attn.q_scale"):
        header[layer + name] = {"dtype": "F32", "shape": [1], "data_offsets": [end, end + 4]}
        text, end = text + np.float32(0.5).tobytes(), end + 4
    new = json.dumps(header).encode()
    new += b" " * (-len(new) % 8)
    file.write_bytes(len(new).to_bytes(8, "little") + new + text[8 + size :])
    if case == "float":
        changed(tmp_path, kv_cache_scheme={"num_bits": 8, "type": "float", "dynamic": False})
    with pytest.warns(UserWarning, match=r"[kqv]_scale and other scales of a quantized cache"):
        actual = models.load(tmp_path)
    for name, array in actual.parameters.items():
        np.testing.assert_array_equal(array, dense[name], err_msg=name)


def test_missing_parts_are_named(tmp_path: Path) -> None:
    folder(tmp_path, "gptq 4")
    file = tmp_path / "model.safetensors"
    stored = stored_tensors(file)
    name = "model.layers.1.mlp.up_proj.qzeros"
    write(file, {key: array for key, array in stored.items() if key != name})
    with pytest.raises(ConfigError, match=r"layers.1.mlp.up_proj.qzeros is missing, a part of"):
        models.load(tmp_path)
    weight = stored["model.layers.0.self_attn.q_proj.scales"]
    write(file, stored | {"model.layers.1.mlp.up_proj.weight": np.zeros((96, 64), np.float16)})
    with pytest.raises(ConfigError, match=r"up_proj.weight' exists, and also the .* part 'g_idx'"):
        models.load(tmp_path)
    write(file, stored | {"model.layers.0.self_attn.q_proj.scales": weight[:, :32]})
    with pytest.raises(ConfigError, match=r"q_proj.scales' is \(2, 32\), not \(2, 64\)"):
        models.load(tmp_path)
    order = "model.layers.0.self_attn.q_proj.g_idx"
    write(file, stored | {order: np.zeros(64, np.int32)})
    with pytest.raises(ConfigError, match=r"q_proj.weight: g_idx does not assign .* to each group"):
        models.load(tmp_path)
    write(file, stored | {order: np.zeros(32, np.int32)})
    with pytest.raises(ConfigError, match=r"q_proj.g_idx' is \(32,\), not \(64,\)"):
        models.load(tmp_path)
    codes = "model.layers.0.self_attn.q_proj.qweight"
    write(file, stored | {codes: stored[codes].view(np.float32)})
    with pytest.raises(ConfigError, match=r"q_proj.qweight' is F32; it must be I32"):
        models.load(tmp_path)


def stored_tensors(file: Path) -> dict[str, Array]:
    """Return the tensors of a safetensors file that has none in float8."""
    with safetensors.safe_open(file, "np") as tensors:
        return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118


def test_a_bias_of_zeros_is_none(tmp_path: Path) -> None:
    dense = folder(tmp_path, "gptq 4")
    file = tmp_path / "model.safetensors"
    bias = {"model.layers.1.mlp.up_proj.bias": np.zeros(96, np.float16)}
    write(file, stored_tensors(file) | bias)
    assert {*models.load(tmp_path).parameters} == {*dense}
    bias["model.layers.1.mlp.up_proj.bias"][3] = 1
    write(file, stored_tensors(file) | bias)
    with pytest.raises(ConfigError, match=r"up_proj.bias' is not part of the llama that config"):
        models.load(tmp_path)


def test_scales_of_activations_are_not_read(tmp_path: Path) -> None:
    """They may also lie beside a weight that is dense, as one that config_groups ignores."""
    dense = folder(tmp_path, "int8")
    file, module = tmp_path / "model.safetensors", "model.layers.1.mlp.up_proj."
    stored = {n: a for n, a in stored_tensors(file).items() if not n.startswith(module)}
    scale = np.float32(0.5).reshape(())
    stored |= {f"{module}input_scale": scale, "model.layers.0.mlp.up_proj.input_scale": scale}
    write(file, stored | {f"{module}weight": dense[f"{module}weight"]})
    for name, array in models.load(tmp_path).parameters.items():
        np.testing.assert_array_equal(array, dense[name], err_msg=name)
    write(file, stored)
    with pytest.raises(
        ConfigError, match=r"tensor '.*1.mlp.up_proj.weight' is missing in model.sa"
    ):
        models.load(tmp_path)


def test_zero_points_that_are_not_packed(tmp_path: Path) -> None:
    """Those of compressed-tensors before 0.9 are numbers in 8 bits, one for each group."""
    dense = folder(tmp_path, "packed 4 True")
    file = tmp_path / "model.safetensors"
    stored = stored_tensors(file)
    for name, zero in stored.items():
        if name.endswith("zero_point"):
            nibbles = zero.view(np.uint32)[:, None] >> np.arange(0, 32, 4, dtype=np.uint32)[:, None]
            codes = (nibbles & 15).reshape(-1, zero.shape[1]).astype(np.int8)
            stored[name] = codes - np.int8(8)
    write(file, stored)
    for name, array in models.load(tmp_path).parameters.items():
        np.testing.assert_array_equal(array, dense[name], err_msg=name)


def test_a_last_group_may_be_smaller(tmp_path: Path) -> None:
    dense = folder(tmp_path, "packed by row")
    file = tmp_path / "model.safetensors"
    stored, name = stored_tensors(file), "model.layers.0.mlp.down_proj.weight"
    scales = stored[f"{name}_scale"]
    stored[f"{name}_scale"] = np.concatenate([scales, scales * ml_dtypes.bfloat16(2)], 1)
    write(file, stored)
    changed(tmp_path, **group_of(group_size=64))
    expected = np.concatenate([dense[name][:, :64], dense[name][:, 64:] * 2], 1)
    np.testing.assert_array_equal(models.load(tmp_path).parameters[name], expected)


@pytest.mark.parametrize("rows", [3, 32])
def test_scales_of_parts_of_rows_are_refused(rows: int, tmp_path: Path) -> None:
    folder(tmp_path, "packed by row")
    file = tmp_path / "model.safetensors"
    stored, name = stored_tensors(file), "model.layers.0.mlp.up_proj.weight_scale"
    write(file, stored | {name: stored[name][:rows]})
    with pytest.raises(ConfigError, match=rf"up_proj.weight has {rows} scales along 96 rows"):
        models.load(tmp_path)
