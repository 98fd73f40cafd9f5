"""llama.cpp makes of our files what our models make: logits, greedy tokens and tokens of texts."""

import importlib
import json
import random
import urllib.request
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from scipy.special import log_softmax
from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers import models as kinds

from unsloth_cupy import models
from unsloth_cupy.models.configs.families import ENCODERS
from unsloth_cupy.models.gguf import TYPES

from .exported import ENDS, IN_LLAMA_CPP, make, read, write_tokenizer
from .peers import CONFIGS, LLAMA3, SIZES

xllamacpp = pytest.importorskip("xllamacpp", reason="needs the extra `peers`", exc_type=ImportError)
pytest.importorskip("gguf", reason="needs the extra `gguf`")
from unsloth_cupy.models.gguf import _words as words  # noqa: E402
from unsloth_cupy.models.gguf._families import ARCHITECTURES  # noqa: E402

from .test_gguf_mixtures import MIXTURES  # noqa: E402
from .test_gguf_tokenizer import SCHEMES, around_added, with_added  # noqa: E402

pytestmark = pytest.mark.slow  # one in seven, each in its turn

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
FAMILIES |= IN_LLAMA_CPP
DENSE = tuple(FAMILIES)
YARN_LESS = {"rope_type": "default", "rope_theta": 1e4}
LONG = MIXTURES["minicpm3 of longrope"]["rope_parameters"]
FAMILIES["ministral"] = {"model_type": "ministral", "sliding_window": None}
FAMILIES |= {f"mixed {name}": config for name, config in MIXTURES.items()}
# what notes say is left out: yarn's columns, and longrope's factors beyond the context
FAMILIES["mixed gpt-oss"] = MIXTURES["gpt-oss"] | {"rope_parameters": YARN_LESS}
FAMILIES["mixed minicpm3 of longrope"] = MIXTURES["minicpm3 of longrope"] | {
    "max_position_embeddings": 512,
    "rope_parameters": LONG | {"original_max_position_embeddings": 256},
}
FAMILIES["mixed glm4_moe_lite"] = MIXTURES["deepseek2"] | {
    **{"model_type": "glm4_moe_lite", "rms_norm_eps": 1e-6, "rope_parameters": YARN_LESS},
}


class Loaded:
    """A file in llama.cpp, with a cache of float32."""

    def __init__(self, file: Path, context: int = 256, adapter: Path | None = None) -> None:
        options = xllamacpp.CommonParams()
        options.model.path = str(file)
        options.n_ctx, options.n_parallel, options.verbosity = context, 1, -1
        options.cpuparams.n_threads = options.cpuparams_batch.n_threads = 1
        options.cache_type_k = options.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        kinds_of_flash = xllamacpp.llama_flash_attn_type  # which rounds to float16
        options.flash_attn_type = kinds_of_flash.LLAMA_FLASH_ATTN_TYPE_DISABLED
        options.warmup = options.fit_params = False
        if adapter is not None:
            options.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(str(adapter), 1.0)]
        self.server = xllamacpp.Server(options)

    def greedy(self, tokens: Any, vocab: int, new: int = NEW) -> tuple[list[int], np.ndarray]:
        """Return tokens that are made, up to one that ends a text, and log-probabilities of all."""
        prompt = [int(token) for token in tokens]
        asked = {"prompt": prompt, "n_predict": new, "logprobs": vocab, "temperature": 0.0}
        steps = self.server.handle_completions(asked)["choices"][0]["logprobs"]["content"]
        result = np.full((len(steps), vocab), np.nan)
        for row, step in zip(result, steps, strict=True):
            for each in step["top_logprobs"]:
                row[each["id"]] = each["logprob"]
        return [step["id"] for step in steps], result

    def log_probs(self, tokens: Any, vocab: int) -> np.ndarray:
        """Return log-probabilities after each token of a text, which is read again for each."""
        rows = [self.greedy(tokens[: n + 1], vocab, 1)[1][0] for n in range(len(tokens))]
        return np.array(rows)

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text, with those around it; special ones are found in it."""
        body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
        where = f"{self.server.listening_address}/tokenize"
        request = urllib.request.Request(where, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            tokens: list[int] = json.load(answer)["tokens"]
        return tokens


def log_probs(model: Any, tokens: Any) -> np.ndarray:
    """Return what ``Loaded.log_probs`` does."""
    return np.asarray(
        log_softmax(np.array(model.logits(np.array(tokens)[None])[0], np.float64), -1)
    )


def room_of(model: Any) -> float:
    """Return how far log-probabilities may be off: ggml rounds its GELU to float16."""
    return 4e-3 if model.config.activation == "gelu_tanh" else 1e-4


def in_float16(factor: Any, gate: Any, approximate: bool) -> Any:
    """Return gelu(gate) / gate, with gate and gelu(gate) rounded to float16, as in ggml's table."""
    rounded = gate.astype(np.float16).astype(gate.dtype)
    value = (factor(rounded, approximate) * rounded).astype(np.float16).astype(gate.dtype)
    return value / np.where(gate == 0, 1, gate)


def check(model: Any, loaded: Loaded, prompt: int = 8, new: int = NEW, room: float = 0.0) -> None:
    """Compare log-probabilities and the tokens that are most likely."""
    tokens = np.random.default_rng(0).integers(3, 97, prompt)
    made, actual = loaded.greedy(tokens, model.config.vocab, new)
    with pytest.MonkeyPatch.context() as patch:
        if model.config.layer_inputs[1]:  # a norm divides by the length of a gated vector
            module: Any = importlib.import_module("unsloth_cupy.ops.activations.geglu")
            patch.setattr(module, "_factor", partial(in_float16, module._factor))
        expected = log_probs(model, [*tokens, *made])[prompt - 1 : -1]
    room = room or room_of(model)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=room)
    chosen = np.take_along_axis(expected, np.array(made)[:, None], 1)[:, 0]
    assert (chosen >= expected.max(1) - 2 * room).all()


def test_every_family_that_is_written_is_compared() -> None:
    apart = {"phimoe", *ENCODERS}  # refused; beside llama.cpp's vectors in test_gguf_encoders
    assert {config["model_type"] for config in FAMILIES.values()} == {*ARCHITECTURES} - apart


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_greedy_tokens(name: str, tmp_path: Path) -> None:
    model = make(tmp_path / "m", FAMILIES[name])
    models.export_gguf(model, tmp_path / "m.gguf", kind="f32")
    check(model, Loaded(tmp_path / "m.gguf"))


@pytest.mark.parametrize("name", [name for name in DENSE if name != "bitnet"])
def test_adapters_alone(name: str, tmp_path: Path) -> None:
    """Beside the file of the base, with a rank and a scale for each kind of layers."""
    model = make(tmp_path / "m", FAMILIES[name])
    models.export_gguf(model, tmp_path / "m.gguf", kind="f32")
    tokens = np.random.default_rng(0).integers(3, 97, 24)
    plain = log_probs(model, tokens)
    model.add_adapter(3, alpha=5, seed=2)
    for index, (each, array) in enumerate(sorted(model.adapter.parameters.items())):
        if "lora_B" in each:
            array[...] = np.random.default_rng(index).normal(0, 0.03, array.shape)
    model.adapter.scales |= {n: 3.0 for n in model.adapter.scales if n.endswith(("o_proj", "0"))}
    assert np.abs(log_probs(model, tokens) - plain).max() > 20 * room_of(model)
    models.export_adapter_gguf(model, tmp_path / "a.gguf", kind="f32")
    check(model, Loaded(tmp_path / "m.gguf", adapter=tmp_path / "a.gguf"))


@pytest.mark.parametrize(("name", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_as_many_layers_as_the_models_of_27b(name: str, layers: int, tmp_path: Path) -> None:
    """Of those llama.cpp scales scores otherwise."""
    config = CONFIGS[name] | {"num_hidden_layers": layers}
    if "layer_types" in config:
        config["layer_types"] = ["sliding_attention", "full_attention"] * (layers // 2)
    model = make(tmp_path / "m", config)
    models.export_gguf(model, tmp_path / "m.gguf", kind="f32")
    check(model, Loaded(tmp_path / "m.gguf"), new=2, room=1e-2)  # GELU is rounded in each layer


def test_long_factors_beyond_the_original_context(tmp_path: Path) -> None:
    model = make(tmp_path / "m", FAMILIES["phi3 longrope"])
    models.export_gguf(model, tmp_path / "m.gguf", kind="f32")
    check(model, Loaded(tmp_path / "m.gguf", 512), 300, 4, room=3e-4)  # far angles


@pytest.mark.parametrize("name", ["mistral", "qwen2 window"])
def test_windows_that_it_lacks(name: str, tmp_path: Path) -> None:
    """What a note says: answers are the same as far as the window goes, and no further."""
    model = make(tmp_path / "m", CONFIGS[name])
    models.export_gguf(model, tmp_path / "m.gguf", kind="f32")
    tokens = np.random.default_rng(0).integers(3, 97, 12)
    theirs = Loaded(tmp_path / "m.gguf").log_probs(tokens, model.config.vocab)
    off = np.abs(theirs - log_probs(model, tokens)).max(axis=1)
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
    tokens = np.random.default_rng(0).integers(3, 97, 16)
    theirs = Loaded(tmp_path / "m.gguf").log_probs(tokens, model.config.vocab)
    off = np.abs(log_probs(model, tokens) - theirs).max()
    room = {"f32": 1e-4, "f16": 5e-3, "bf16": 2e-2}.get(kind, 6e-2)
    assert off <= room * np.abs(model.logits(tokens[None])).max()


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
    folder: Path,
    tokenizer: Any,
    *,
    whole: bool = False,
    ascii_alone: bool = False,
    config: Any = MappingProxyType({"model_type": "llama"}),
) -> None:
    """Compare the tokens of texts, with those around them, and of the file as it is loaded."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    make(folder / "m", config | {"vocab_size": 600})
    values = json.loads(tokenizer.to_str())
    values["added_tokens"] = values["added_tokens"][: len(ENDS)]
    values["model"]["ignore_merges"] = whole
    (folder / "m" / "tokenizer.json").write_text(json.dumps(values), encoding="utf-8")
    models.export_gguf(folder / "m", folder / "m.gguf")
    ours = Tokenizer.from_str(json.dumps(values))
    theirs, loaded = Loaded(folder / "m.gguf"), models.load(folder / "m.gguf").tokenizer
    for text in texts(ascii_alone):
        assert theirs.tokens(text) == ours.encode(text).ids, repr(text)
        assert loaded.encode(text).tolist() == ours.encode(text).ids, repr(text)


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


@pytest.mark.parametrize("prefix", [False, True, None])
def test_tokens_of_characters(prefix: bool | None, tmp_path: Path) -> None:
    """Merges are complete, as those that come of SentencePiece are; those of Gemma 4 need not."""
    tokens = [*ENDS, *(f"<0x{n:02X}>" for n in range(256)), "\u2581", *"abcdefghinorstu.,'IT"]
    merged = ["th", "in", "re", "the", "\u2581the", "\u2581a", "nd", "and", "\u2581and", "er"]
    vocab = {text: n for n, text in enumerate([*tokens, *merged])}
    merges = [
        (text[:cut], text[cut:]) for text in merged for cut in range(1, len(text))
        if text[:cut] in vocab and text[cut:] in vocab
    ]  # fmt: skip
    if prefix is None:
        merges.remove(("\u2581a", "nd"))  # which llama.cpp's other kind would merge
    tokenizer = Tokenizer(
        kinds.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<pad>", fuse_unk=True)
    )
    steps: list[Any] = [normalizers.Replace(" ", "\u2581")]
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581")] * bool(prefix) + steps
    )
    tokenizer.add_special_tokens([*ENDS])
    config = {"model_type": "llama"} if prefix is not None else FAMILIES["mixed gemma4"]
    check_texts(tmp_path, tokenizer, config=config)
    values, _, _ = read(tmp_path / "m.gguf")
    assert values["tokenizer.ggml.model"] == ("gemma4" if prefix is None else "llama")


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_tokens_beside_added_ones(scheme: str, special: bool, tmp_path: Path) -> None:
    """A tokenizer that is read from a file has the tokens of llama.cpp."""
    make(tmp_path / "m", "llama")
    write_tokenizer(tmp_path / "m", with_added(scheme, special))
    models.export_gguf(tmp_path / "m", tmp_path / "m.gguf")
    ours, theirs = models.load(tmp_path / "m.gguf").tokenizer, Loaded(tmp_path / "m.gguf")
    for texts_of_one in around_added().values():
        for text in (*texts_of_one, "the</s>the", "<s>the"):
            assert ours.encode(text).tolist() == theirs.tokens(text), text
