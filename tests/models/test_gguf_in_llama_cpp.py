"""llama.cpp makes of our files what our models make: logits, greedy tokens and tokens of texts."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers import models as kinds

from unsloth_cupy import models
from unsloth_cupy.models.gguf import TYPES
from unsloth_cupy.models.gguf import _words as words

from .exported import ENDS, IN_LLAMA_CPP, make, read
from .peers import CONFIGS, LLAMA3, SIZES

WHY = "needs llama-cpp-python, which pip builds with a C++ compiler"
llama_cpp = pytest.importorskip("llama_cpp", reason=WHY, exc_type=ImportError)
pytest.importorskip("gguf", reason="needs the extra `gguf`")

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2],
    "long_factor": [1.5, 3.0, 7.0],
    "partial_rotary_factor": 0.75,
}
TOLD = {"attention_factor": 1.3}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
        "original_max_position_embeddings": 16}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    **{name: CONFIGS[name] for name in (
        "llama", "llama biases", "llama one kv head", "llama llama3", "llama linear", "llama yarn",
        "mistral full", "qwen2", "gemma", "gemma2", "gemma3", "phi3", "olmo2",
    )},
    "llama biases llama3": CONFIGS["llama biases"] | {"rope_parameters": LLAMA3},
    "llama yarn told": {"model_type": "llama", "rope_parameters": YARN | TOLD},
    "qwen2 yarn": {"model_type": "qwen2", "tie_word_embeddings": True, "rope_parameters": YARN},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "phi3 longrope": {
        "model_type": "phi3",
        "max_position_embeddings": 512,
        "original_max_position_embeddings": 256,
        "partial_rotary_factor": 0.75,
        "rope_parameters": LONGROPE,
    },
    "olmo2 tied": {"model_type": "olmo2", "tie_word_embeddings": True},
    "bitnet": {"model_type": "bitnet", "hidden_act": "silu", "tie_word_embeddings": True},
}  # fmt: skip
NEW = 12  # tokens that are made


class Loaded:
    """A file in llama.cpp."""

    def __init__(self, file: Path, context: int = 256, **options: Any) -> None:
        quiet = {"verbose": False, "n_threads": 1, "n_ctx": context, "n_batch": 512}
        self.llama = llama_cpp.Llama(
            str(file), logits_all=True, type_k=llama_cpp.GGML_TYPE_F32,
            type_v=llama_cpp.GGML_TYPE_F32, **quiet, **options,
        )  # fmt: skip

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        self.llama.reset()
        self.llama.eval(tokens.tolist())
        return np.array(self.llama.scores[: len(tokens)])

    def greedy(self, tokens: np.ndarray) -> list[int]:
        tokens_so_far = list(tokens)
        while len(tokens_so_far) < len(tokens) + NEW:
            tokens_so_far.append(int(self.logits(np.array(tokens_so_far))[-1].argmax()))
        return tokens_so_far


FAMILIES |= IN_LLAMA_CPP


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_greedy_tokens(name: str, tmp_path: Path) -> None:
    model = make(tmp_path / "m", FAMILIES[name])
    models.export_gguf(model, tmp_path / "m.gguf", kind="f32")
    loaded, tokens = Loaded(tmp_path / "m.gguf"), np.random.default_rng(0).integers(3, 97, (1, 24))
    ours = model.logits(tokens)[0]
    # ggml rounds its GELU to float16
    room = 4e-3 if model.config.activation == "gelu_tanh" else 1e-4
    np.testing.assert_allclose(loaded.logits(tokens[0]), ours, rtol=0, atol=room)
    made = model.generate(tokens[:, :8], max_new_tokens=NEW, stop=())
    top = np.sort(model.logits(made)[0, 7:-1], axis=1)
    assert (top[:, -1] - top[:, -2]).min() > 2 * room, "no two tokens are as likely as each other"
    assert loaded.greedy(tokens[0, :8]) == made[0].tolist()


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "bitnet"])
def test_adapters_alone(name: str, tmp_path: Path) -> None:
    """Beside the file of the base, with a rank and a scale for each kind of layers."""
    model = make(tmp_path / "m", FAMILIES[name])
    models.export_gguf(model, tmp_path / "m.gguf", kind="f32")
    tokens = np.random.default_rng(0).integers(3, 97, (1, 24))
    plain = model.logits(tokens)[0]
    model.add_adapter(3, alpha=5, seed=2)
    for index, (each, array) in enumerate(sorted(model.adapter.parameters.items())):
        if "lora_B" in each:
            array[...] = np.random.default_rng(index).normal(0, 0.03, array.shape)
    model.adapter.scales |= {n: 3.0 for n in model.adapter.scales if n.endswith(("o_proj", "0"))}
    ours = model.logits(tokens)[0]
    room = 4e-3 if model.config.activation == "gelu_tanh" else 1e-4
    assert np.abs(ours - plain).max() > 20 * room
    models.export_adapter_gguf(model, tmp_path / "a.gguf", kind="f32")
    loaded = Loaded(tmp_path / "m.gguf", lora_path=str(tmp_path / "a.gguf"))
    np.testing.assert_allclose(loaded.logits(tokens[0]), ours, rtol=0, atol=room)


@pytest.mark.parametrize(("name", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_as_many_layers_as_the_models_of_27b(name: str, layers: int, tmp_path: Path) -> None:
    """Of those llama.cpp scales scores otherwise."""
    config = CONFIGS[name] | {"num_hidden_layers": layers}
    if "layer_types" in config:
        config["layer_types"] = ["sliding_attention", "full_attention"] * (layers // 2)
    model = make(tmp_path / "m", config)
    models.export_gguf(model, tmp_path / "m.gguf", kind="f32")
    tokens = np.random.default_rng(0).integers(3, 97, (1, 12))
    made = Loaded(tmp_path / "m.gguf").logits(tokens[0])
    room = 1e-2  # GELU is rounded in each layer
    np.testing.assert_allclose(made, model.logits(tokens)[0], rtol=0, atol=room)


def test_long_factors_beyond_the_original_context(tmp_path: Path) -> None:
    model = make(tmp_path / "m", FAMILIES["phi3 longrope"])
    models.export_gguf(model, tmp_path / "m.gguf", kind="f32")
    tokens = np.random.default_rng(0).integers(3, 97, (1, 300))
    made = Loaded(tmp_path / "m.gguf", 512).logits(tokens[0])
    np.testing.assert_allclose(made, model.logits(tokens)[0], rtol=0, atol=3e-4)  # far angles


@pytest.mark.parametrize("name", ["mistral", "qwen2 window"])
def test_windows_that_it_lacks(name: str, tmp_path: Path) -> None:
    """What a note says: answers are the same as far as the window goes, and no further."""
    model = make(tmp_path / "m", CONFIGS[name])
    models.export_gguf(model, tmp_path / "m.gguf", kind="f32")
    tokens = np.random.default_rng(0).integers(3, 97, (1, 12))
    off = np.abs(Loaded(tmp_path / "m.gguf").logits(tokens[0]) - model.logits(tokens)[0]).max(
        axis=1
    )
    assert off[: model.config.window].max() < 1e-4
    assert off[model.config.window :].min() > 1e-2


@pytest.mark.parametrize("kind", TYPES)
def test_types(kind: str, tmp_path: Path) -> None:
    """llama.cpp computes with the numbers that a file was rounded to; it rounds activations too."""
    wide = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
    model = make(tmp_path / "m", SIZES | wide | {"model_type": "llama", "initializer_range": 0.06})
    models.export_gguf(model, tmp_path / "m.gguf", kind=kind)
    dense = read(tmp_path / "m.gguf")[1]
    for name, array in model.parameters.items():
        parts = name.split(".")
        if array.ndim == 2 and parts[-2] in ("gate_proj", "up_proj", "down_proj", "v_proj"):
            made = {"v_proj": "attn_v"}.get(parts[-2], f"ffn_{parts[-2].removesuffix('_proj')}")
            model.parameters[name] = dense[f"blk.{parts[2]}.{made}.weight"]
        elif parts[-2] in ("q_proj", "k_proj"):
            rotated = dense[f"blk.{parts[2]}.attn_{parts[-2][0]}.weight"]
            pairs = rotated.reshape(-1, model.config.dim // 2, 2, 256).swapaxes(1, 2)
            model.parameters[name] = pairs.reshape(rotated.shape)
        elif parts[-2] == "o_proj":
            model.parameters[name] = dense[f"blk.{parts[2]}.attn_output.weight"]
    model.parameters["model.embed_tokens.weight"] = dense["token_embd.weight"]
    model.parameters["lm_head.weight"] = dense["output.weight"]
    tokens = np.random.default_rng(0).integers(3, 97, (1, 16))
    ours, theirs = model.logits(tokens)[0], Loaded(tmp_path / "m.gguf").logits(tokens[0])
    room = {"f32": 1e-4, "f16": 5e-3, "bf16": 2e-2}.get(kind, 6e-2)
    assert np.abs(ours - theirs).max() <= room * np.abs(ours).max()


TEXTS = (
    "I've been 'told he's there, 'RE you sure? 'D you like some tea? We'Ve a'lL",
    "\n \n\n \n\n\n \t \t\t \t\n  \n   \n    \n     \n",
    "3 33 333 3333 33333 3.3 3..3 HelloWorld fooBAR <s> in </s>XMLHttp",
    " a text that begins with a space",
)
POOL = "abcxyzABC 0123456789'\"!?.,:;/\\\n\r\t -_()[]{}\xe4\xd6\xdf\xe9\xa0\u3000\U0001f680"
POOL += "\u4e16\u754c\u65e5\u672c\u041f\u0440\u0438"
LEARNT = (
    " ".join((*TEXTS, "I'LL we'Re 12345 the theatre and the other \xfcber stra\xdfe \u041f\u0440"))
    * 5
)


def texts(ascii_alone: bool) -> list[str]:
    draw = random.Random(0)
    pool = [each for each in POOL if each.isascii() or not ascii_alone]
    return [*TEXTS, *("".join(draw.choices(pool, k=draw.randint(1, 60))) for _ in range(200))]


def check_texts(
    folder: Path, tokenizer: Any, *, whole: bool = False, ascii_alone: bool = False
) -> None:
    """Compare the tokens of texts, with those around them."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    make(folder / "m", {"model_type": "llama", "vocab_size": 600})
    values = json.loads(tokenizer.to_str())
    values["added_tokens"] = values["added_tokens"][: len(ENDS)]
    values["model"]["ignore_merges"] = whole
    (folder / "m" / "tokenizer.json").write_text(json.dumps(values), encoding="utf-8")
    models.export_gguf(folder / "m", folder / "m.gguf")
    ours = Tokenizer.from_str(json.dumps(values))
    theirs = Loaded(folder / "m.gguf", vocab_only=True).llama
    for text in texts(ascii_alone):
        made = theirs.tokenize(text.encode(), add_bos=True, special=True)
        assert made == ours.encode(text).ids, repr(text)


@pytest.mark.parametrize("rule", words.NAMES, ids=words.NAMES.values())
def test_tokens_of_bytes(rule: tuple[str, bool], tmp_path: Path) -> None:
    tokenizer = Tokenizer(kinds.BPE())
    expression, whole = rule
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    if expression == words.DIGITS:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    elif expression != words.GPT2:
        steps = [
            pre_tokenizers.Split(Regex(expression), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=590, special_tokens=[*ENDS], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator([LEARNT], trainer)
    named = words.NAMES[rule]
    check_texts(tmp_path, tokenizer, whole=whole, ascii_alone=named in words.CASED)


@pytest.mark.parametrize("prefix", [False, True])
def test_tokens_of_characters(prefix: bool, tmp_path: Path) -> None:
    """Merges are complete, as those that come of SentencePiece are."""
    tokens = [*ENDS, *(f"<0x{n:02X}>" for n in range(256)), "\u2581", *"abcdefghinorstu.,'IT"]
    merged = ["th", "in", "re", "the", "\u2581the", "\u2581a", "nd", "and", "\u2581and", "er"]
    vocab = {text: n for n, text in enumerate([*tokens, *merged])}
    merges = [
        (text[:cut], text[cut:]) for text in merged for cut in range(1, len(text))
        if text[:cut] in vocab and text[cut:] in vocab
    ]  # fmt: skip
    tokenizer = Tokenizer(
        kinds.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<pad>", fuse_unk=True)
    )
    steps: list[Any] = [normalizers.Replace(" ", "\u2581")]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581")] * prefix + steps)
    tokenizer.add_special_tokens([*ENDS])
    check_texts(tmp_path, tokenizer)
