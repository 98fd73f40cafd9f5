"""Files and folders beside the trained model: planted faults have a stage and a cause."""

import functools
import json
import math
import re
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import numpy as np
import pytest

from unsloth_cupy import models
from unsloth_cupy.cli.commands import group
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.models.gguf import TYPES
from unsloth_cupy.models.verifying import verify
from unsloth_cupy.models.verifying.sides import file_side, folder_side

from .exported import IN_LLAMA_CPP, MERGES, byte_level, make, read, write_tokenizer
from .peers import CONFIGS, LLAMA3

pytest.importorskip("gguf", reason="needs the extra `gguf`")
from .planted import planted
from .test_gguf_mixtures import MIXTURES

KEY = "tokenizer.ggml."
MERGED = ((".", "t"), *MERGES, ("h", "e"))  # words and the order of merges matter
MARKS = ("<|im_start|>", "<|im_end|>", "<think>")
START, END, THINK = range(size := len(byte_level(97, MERGED)["model"]["vocab"]), size + 3)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>[{{ m.role }}]\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>[assistant]\n{% endif %}"
)
PROMPTS = ["the inn.the tin and <think> the end", "etain THE 12 ether?", "in " * 12]
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
WIDE |= {"initializer_range": 0.06}
QWEN3 = {"model_type": "qwen3", "head_dim": 16}
SQUARE = MIXTURES["llama"] | {"hidden_size": 32, "intermediate_size": 32}
FAMILIES: dict[str, dict[str, Any]] = {
    **{name: CONFIGS[name] for name in ("llama", "qwen2", "gemma", "gemma2", "gemma3", "phi3")},
    "llama3": {"model_type": "llama", "rope_parameters": LLAMA3},
    "yarn": CONFIGS["llama yarn"],
    "wide": {"model_type": "llama", **WIDE},
    "qwen3": QWEN3,
    "mixtral": SQUARE,
    "qwen3_moe": MIXTURES["qwen3moe"],
    "granite": IN_LLAMA_CPP["granite"],
    "tied": {"model_type": "llama", "tie_word_embeddings": True},
    "literal": CONFIGS["llama"],
    "own end": QWEN3,
}
TEMPLATES = {
    "literal": TEMPLATE.replace("{{ bos_token }}", "<s>"),
    "own end": TEMPLATE.replace("<|im_end|>", "<think>"),
}


def chat_folder(folder: Path, config: dict[str, Any], template: str = TEMPLATE) -> Path:
    """Make a model with a chat template, whose tokenizer adds <s> before a text."""
    make(folder, config)
    values = byte_level(97, MERGED)
    entry = values["added_tokens"][0]
    for number, text in enumerate(MARKS, len(values["model"]["vocab"])):
        values["added_tokens"].append({**entry, "id": number, "content": text})
    from tokenizers import Tokenizer, processors

    loaded = Tokenizer.from_str(json.dumps(values))
    loaded.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    write_tokenizer(folder, json.loads(loaded.to_str()), **settings)
    return folder


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Path]]:
    """Return a function from a family and a type to the trained folder and its right file."""

    @functools.cache
    def both(family: str, kind: str = "f32") -> tuple[Path, Path]:
        home = tmp_path_factory.mktemp("right") / "m"
        chat_folder(home, FAMILIES[family], TEMPLATES.get(family, TEMPLATE))
        stop = THINK if family == "own end" else None
        models.export_gguf(home, home.with_suffix(".gguf"), kind=kind, stop=stop)
        return home, home.with_suffix(".gguf")

    return both


# ---- right files --------------------------------------------------------------------------------
RIGHT = [
    *(("wide", kind) for kind in TYPES if not kind.startswith("tq")),
    *((family, kind) for family in FAMILIES for kind in ("f32", "q8_0")),
]


@pytest.mark.parametrize(("family", "kind"), RIGHT)
def test_right_files_are_not_accused(family: str, kind: str, right: Any) -> None:
    folder, file = right(family, kind)
    # llama.cpp stops at <|im_end|> of any file: "own end" answers the second prompt with it
    prompts = PROMPTS[::2] if family == "own end" else PROMPTS
    result = models.verify(file, folder, prompts=prompts)
    assert result.same, result
    assert result.difference <= result.bound
    assert (result.stage, result.cause, result.cure) == (None, None, None)
    # a margin of 4 is not much more than needed: bounds are no blank cheque
    assert kind == "f32" or result.difference > result.bound / 40
    assert kind != "f32" or result.difference < 2e-6


@pytest.mark.parametrize("name", MIXTURES)
def test_right_mixtures_and_hybrids_are_not_accused(name: str, tmp_path: Path) -> None:
    make(tmp_path / "m", MIXTURES[name])
    for kind in ("f32", "q8_0"):
        models.export_gguf(tmp_path / "m", tmp_path / f"{kind}.gguf", kind=kind)
        result = models.verify(tmp_path / f"{kind}.gguf", tmp_path / "m", prompts=["the inn", "a"])
        # what a note of the export says
        assert result.same or (name == "gpt-oss" and "yarn" in str(result.cause)), result


# ---- planted faults -----------------------------------------------------------------------------
def tokens_of(values: list[str], old: str, new: str) -> list[str]:
    return [new if text == old else text for text in values]


def pairs(heads: int) -> Callable[[np.ndarray], np.ndarray]:
    """Return the function that orders rotary pairs as another architecture has them."""

    def permuted(array: np.ndarray) -> np.ndarray:
        by_heads = array.reshape(heads, -1, 2, array.shape[-1])
        return by_heads.swapaxes(1, 2).reshape(array.shape)

    return permuted


def rolled(array: np.ndarray) -> np.ndarray:
    return np.roll(array, 1, axis=0)


def one_row(array: np.ndarray) -> np.ndarray:
    array[END] = 0
    return array


def types_of(values: list[int]) -> list[int]:
    return [*values[:START], 1, *values[START + 1 :]]


FAULTS: dict[str, tuple[str, str, dict[str, Any], str, str]] = {
    # the text of a prompt
    "no template": ("llama", "f32", {"keys": {"tokenizer.chat_template": None}}, "template",
        "no chat template, so llama.cpp uses ChatML"),
    "another template": ("llama", "q8_0", {"keys": {"tokenizer.chat_template":
        lambda old: old.replace("assistant", "model")}}, "template", "template of the file is not"),
    "broken template": ("qwen2", "f32", {"keys": {"tokenizer.chat_template": "{% for %}"}},
        "template", "cannot be rendered"),
    # tokens
    "two BOS": ("literal", "f32", {"keys": {f"{KEY}bos_token_id": 0}}, "tokens",
        "adds the begin token 0 .*already: two BOS"),
    "no BOS": ("literal", "q8_0", {"keys": {f"{KEY}add_bos_token": True, f"{KEY}bos_token_id": 0,
        "tokenizer.chat_template": lambda old: old.replace("<s>", "<pad>")}}, "template",
        "template of the file is not"),
    "EOS added": ("llama", "q8_0", {"keys": {f"{KEY}add_eos_token": True}}, "tokens",
        "adds the token 2 .* after a text"),
    "another split": ("llama", "f32", {"keys": {f"{KEY}pre": "qwen2"}}, "tokens", "another rule"),
    "another split of words": ("qwen3", "q8_0", {"keys": {f"{KEY}pre": "llama-bpe"}}, "tokens",
        "another rule"),
    "added token is normal": ("llama", "f32", {"keys": {f"{KEY}token_type": types_of}}, "tokens",
        "not an added token"),
    "another text of a token": ("gemma", "f32", {"keys": {f"{KEY}tokens":
        lambda old: tokens_of(old, "<think>", "<thinking>")}}, "tokens",
        f"token {THINK} .*<think>"),
    "merges are missing": ("llama", "f32", {"keys": {f"{KEY}merges": lambda old: old[2:]}},
        "tokens", "merges other pairs"),
    "merges in another order": ("phi3", "f32", {"keys": {f"{KEY}merges": lambda old:
        old[::-1]}}, "tokens", "merges other pairs"),
    # the embedding
    "scaled embedding": ("llama", "f32", {"tensors": {"token_embd.weight": lambda x: 2 * x}},
        "embedding", "token_embd is multiplied by 2"),
    "row of a token": ("llama", "q8_0", {"tensors": {"token_embd.weight": one_row}},
        "embedding", f"row of token {END} .*im_end.* zeros"),
    "rolled rows": ("gemma2", "f32", {"tensors": {"token_embd.weight": rolled}}, "embedding",
        "token_embd is not the trained weight"),
    # rotary positions
    "rope factors": ("llama3", "f32", {"tensors": {"rope_freqs.weight": None}}, "block 0",
        r"rope factors \(llama3\) are missing: the file reads 16 tokens as 64"),
    "rope factors, 8 bits": ("llama3", "q8_0", {"tensors": {"rope_freqs.weight": None}}, "block 0",
        "rope factors"),
    "rope factors, halved": ("llama3", "f32", {"tensors": {"rope_freqs.weight":
        lambda x: np.where(x > 1, x / 2, x)}}, "block 0", "rotary positions"),
    "yarn": ("yarn", "q8_0", {"keys": {"ARCH.rope.scaling.type": None,
        "ARCH.rope.scaling.factor": None, "ARCH.rope.scaling.attn_factor": None}}, "block 0",
        r"rope factors \(yarn\)"),
    "yarn of another factor": ("yarn", "f32", {"keys": {"ARCH.rope.scaling.factor": 8.0}},
        "block 0", "rotary positions is"),
    "rotary base": ("qwen2", "f32", {"keys": {"ARCH.rope.freq_base": 1e6}}, "block 0",
        "rotary base 1e"),
    "rotary base, 8 bits": ("llama", "q8_0", {"keys": {"ARCH.rope.freq_base": 5e5}}, "block 0",
        "rotary base 500000"),
    "local rotary base": ("gemma3", "f32", {"keys": {"ARCH.rope.freq_base_swa": 1e6}}, "block 0",
        "rotary base"),
    # blocks
    "permuted keys": ("llama", "f32", {"tensors": {"blk.1.attn_k.weight": pairs(2)}}, "block 1",
        "blk.1.attn_k is permuted"),
    "permuted queries": ("wide", "q4_k_m", {"tensors": {"blk.0.attn_q.weight": pairs(4)}},
        "block 0", "blk.0.attn_q is permuted"),
    "permuted for another architecture": ("qwen3", "f32", {"tensors": {
        "blk.2.attn_q.weight": pairs(4)}}, "block 2", "blk.2.attn_q is permuted"),
    "gate and up": ("llama", "f32", {"swapped": ("blk.0.ffn_gate.weight", "blk.0.ffn_up.weight")},
        "block 0", "ffn_(gate|up) has the weights of .*swapped"),
    "gate and up, 8 bits": ("qwen2", "q8_0", {"swapped": ("blk.2.ffn_gate.weight",
        "blk.2.ffn_up.weight")}, "block 2", "swapped"),
    "another layer": ("wide", "f16", {"swapped": ("blk.0.attn_v.weight", "blk.1.attn_v.weight")},
        "block 0", "blk.0.attn_v has the weights of block 1"),
    "zeros": ("qwen3", "q8_0", {"tensors": {"blk.1.ffn_down.weight": np.zeros_like}}, "block 1",
        "blk.1.ffn_down contains zeros only"),
    "not a number": ("llama", "f32", {"tensors": {"blk.1.ffn_norm.weight":
        lambda x: np.where(np.arange(len(x)) == 3, np.nan, x)}}, "block 1", "not finite"),
    "norms without their 1": ("gemma", "f32", {"tensors": {"blk.0.attn_norm.weight":
        lambda x: x - 1}}, "block 0", "1 is not added to the norm blk.0.attn_norm"),
    "norms with 2": ("gemma2", "q8_0", {"tensors": {"blk.1.ffn_norm.weight": lambda x: x + 1}},
        "block 1", "1 is twice added"),
    "another weight": ("phi3", "q8_0", {"tensors": {"blk.1.attn_qkv.weight": rolled}}, "block 1",
        "blk.1.attn_qkv is not the trained weight"),
    "epsilon": ("llama", "f32", {"keys": {"ARCH.attention.layer_norm_rms_epsilon": 1e-3}},
        "block 0", "epsilon of norms is 0.001"),
    "epsilon, 4 bits": ("wide", "q4_k_m", {"keys": {"ARCH.attention.layer_norm_rms_epsilon": 1e-4}},
        "block 0", "epsilon of norms is 0.0001"),
    "capped scores": ("gemma2", "f32", {"keys": {"ARCH.attn_logit_softcapping": 50.0}}, "block 0",
        "cap of scores .*50"),
    "window": ("gemma2", "f32", {"keys": {"ARCH.attention.sliding_window": 32}}, "block 0",
        "window of 32 tokens, not 4"),
    "residual factor": ("granite", "q8_0", {"keys": {"ARCH.residual_scale": 1.2}}, "block 0",
        "factor of residual sums"),
    # experts
    "transposed experts": ("mixtral", "f32", {"tensors": {"blk.0.ffn_down_exps.weight":
        lambda x: x.swapaxes(1, 2)}}, "block 0", "ffn_down_exps are transposed"),
    "experts in another order": ("qwen3_moe", "q8_0", {"tensors": {"blk.1.ffn_down_exps.weight":
        lambda x: x[::-1]}}, "block 1", "in another order"),
    "gate and up of experts": ("qwen3_moe", "f32", {"swapped": ("blk.1.ffn_gate_exps.weight",
        "blk.1.ffn_up_exps.weight")}, "block 1", "swapped"),
    "number of experts": ("mixtral", "f32", {"keys": {"ARCH.expert_used_count": 1}}, "block 0",
        "experts: k is 1"),
    # logits
    "no head": ("llama", "f32", {"tensors": {"output.weight": None}}, "logits",
        "no output.weight: its reader uses the embedding"),
    "no head, 8 bits": ("wide", "q8_0", {"tensors": {"output.weight": None}}, "logits",
        "no output.weight"),
    "row of the head": ("qwen3", "q8_0", {"tensors": {"output.weight": one_row}}, "logits",
        f"row of token {END}"),
    "capped logits": ("gemma2", "q8_0", {"keys": {"ARCH.final_logit_softcapping": 30.0}}, "logits",
        "cap of logits"),
    "factor of logits": ("granite", "f32", {"keys": {"ARCH.logit_scale": 1.0}}, "logits",
        "factor of logits"),
    "last norm": ("llama", "q8_0", {"tensors": {"output_norm.weight": lambda x: 1.5 * x}}, "logits",
        "output_norm is multiplied by 1.5"),
    # ends
    "stop token": ("own end", "q8_0", {"keys": {f"{KEY}eot_token_id": None}}, "end",
        f"stop token {THINK} .*think.* is not in the file: answers do not end"),
    "stop token, f32": ("own end", "f32", {"keys": {f"{KEY}eot_token_id": END}}, "end",
        "stop token"),
    "context": ("qwen2", "q8_0", {"keys": {"ARCH.context_length": 32}}, "end",
        "context_length is 32 in the file and 64"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_have_their_stage_and_cause(name: str, right: Any, tmp_path: Path) -> None:
    family, kind, changes, stage, cause = FAULTS[name]
    folder, file = right(family, kind)
    result = models.verify(planted(file, tmp_path / "f.gguf", **changes), folder, prompts=PROMPTS)
    assert not result.same
    assert result.stage == stage, result
    assert re.search(cause, str(result.cause)), result
    assert result.cure
    assert not result.difference or result.difference > result.bound


# ---- answers ------------------------------------------------------------------------------------
def tokens_of_prompt(folder: Path, prompt: str) -> list[int]:
    side = folder_side("test", folder)
    return side.tokens(side.text(prompt, True), True)


def against_the_state(folder: Path, prompt: str, best: int, other: int) -> Callable[..., Any]:
    """Return the change of a head that moves two rows by a step of 8 bits, along the last state.

    Each row is off by less than rounding explains, but all of its errors have one direction.
    """
    model = models.load(folder)
    tokens = np.array([tokens_of_prompt(folder, prompt)])
    state = model.hidden(model.parameters, tokens)[0, -1]
    columns = np.argsort(-np.abs(state))[: int(0.35 * len(state))]

    def changed(head: np.ndarray) -> np.ndarray:
        for row, sign in ((best, -1), (other, 1)):
            step = np.repeat(np.abs(head[row].reshape(-1, 32)).max(axis=1) / 127, 32)
            head[row, columns] += sign * np.sign(state[columns]) * step[columns]
        return head

    return changed


def logits_of(folder: Path, tokens: list[int]) -> np.ndarray:
    return models.load(folder).logits(np.array([tokens]))[0, -1]


@pytest.mark.parametrize("ends", [False, True])
def test_the_first_token_of_an_answer_that_differs(ends: bool, right: Any, tmp_path: Path) -> None:
    folder, file = right("wide")
    prompt = PROMPTS[0]
    tokens = tokens_of_prompt(folder, prompt)
    best, other = np.argsort(-logits_of(folder, tokens))[:2]
    if ends:  # the answer ends with this token
        shutil.copytree(folder, tmp_path / "m")
        folder = tmp_path / "m"
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, int(best)]}))
        keys = {f"{KEY}eot_token_id": int(best)}
    else:
        keys = {}
    edit = against_the_state(folder, prompt, best, other)
    head = "output.weight"
    path = planted(file, tmp_path / "f.gguf", keys, {head: edit}, types={head: "Q8_0"})
    result = models.verify(path, folder, prompts=[prompt])
    assert (result.stage, result.prompt, result.token) == ("answer", 0, len(tokens)), result
    assert result.difference > result.bound
    expected = f"ends with {best} .*goes on with {other}" if ends else f"is {other} .*not {best} "
    assert re.search(expected, str(result.cause)), result
    # without the change, rounding explains what differs
    path = planted(file, tmp_path / "right.gguf", keys, types={head: "Q8_0"})
    result = models.verify(path, folder, prompts=[prompt])
    assert result.same, result


def test_a_later_token_of_an_answer(right: Any, tmp_path: Path) -> None:
    """The file gets the answer of the trained model up to there."""
    folder, file = right("wide")
    tokens = tokens_of_prompt(folder, PROMPTS[2])
    best, other = np.argsort(-logits_of(folder, tokens))[:2]
    edit = against_the_state(folder, PROMPTS[2], best, other)
    path = planted(file, tmp_path / "f.gguf", {}, {"output.weight": edit},
                   types={"output.weight": "Q8_0"})  # fmt: skip
    result = models.verify(path, folder, prompts=PROMPTS[2:])
    assert result.stage == "answer", result
    answer = models.load(folder).generate(np.array([tokens]), max_new_tokens=23)[0]
    assert len(tokens) < result.token < len(answer)
    assert f"not {answer[result.token]} (" in str(result.cause)


def test_ends_of_answers(right: Any, tmp_path: Path) -> None:
    """A token at which only one side stops is a fault where an answer has it."""
    folder, file = right("own end")
    result = models.verify(file, folder, prompts=PROMPTS[1:2])
    assert (result.stage, result.prompt) == ("end", 0), result
    assert f"the reader stops at token {END} " in str(result.cause)
    folder, file = right("wide")
    tokens = tokens_of_prompt(folder, PROMPTS[0])
    answer = models.load(folder).generate(np.array([tokens]), max_new_tokens=8)[0, len(tokens) :]
    place = next(n for n, token in enumerate(answer) if token not in answer[:n] and n > 1)
    shutil.copytree(folder, tmp_path / "m")
    ends = {"eos_token_id": [2, END, int(answer[place])]}
    (tmp_path / "m" / "generation_config.json").write_text(json.dumps(ends))
    result = models.verify(file, tmp_path / "m", prompts=PROMPTS[:1])
    assert (result.stage, result.token) == ("end", len(tokens) + place), result
    assert f"stop token {answer[place]} " in str(result.cause)
    assert "answers do not end" in str(result.cause)


def test_large_models_answer_with_one_token(right: Any) -> None:
    """An answer reads the weights again for each token, so its length has a bound."""
    folder, file = right("llama")
    size = sum(array.size for array in models.load(folder).parameters.values())
    for again, length in ((size, 1), (3 * size, 3)):
        sides = folder_side("test", folder), file_side(file)
        result = verify.compare(*sides, PROMPTS, again=again)
        assert f"answers of {length} token" in result.compared


# ---- memory -------------------------------------------------------------------------------------
@pytest.mark.parametrize("fault", [False, True])
def test_at_most_two_blocks_are_in_memory(
    fault: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unsloth_cupy.models.gguf.reading.AT_ONCE", 1 << 14)
    config = FAMILIES["wide"] | {"num_hidden_layers": 3, "hidden_size": 384}
    folder = chat_folder(tmp_path / "m", config | {"intermediate_size": 1152})
    models.export_gguf(folder, tmp_path / "m.gguf", kind="q8_0")
    file = tmp_path / "m.gguf"
    if fault:
        file = planted(file, tmp_path / "f.gguf", tensors={"blk.2.ffn_down.weight": rolled})
    sizes = models.load(folder).config.shapes().items()
    block = sum(4 * math.prod(size) for name, size in sizes if ".layers.0." in name)
    verify.compare(folder_side("test", folder), file_side(file), ["in"])  # tables and caches
    tracemalloc.start()
    try:
        result = verify.compare(folder_side("test", folder), file_side(file), ["in"])
        peak = tracemalloc.get_traced_memory()[1] / block
    finally:
        tracemalloc.stop()
    assert result.same != fault, result
    # 1.7 were seen; with a fault 2.6, as the search for a cause copies a tensor of the two blocks
    assert peak < (2.8 if fault else 2), peak


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *(("gemma4 of shared keys", kind) for kind in ("f32", "q8_0", "folder")),
        *(("llama", kind) for kind in ("q8_0", "q4_k_m", "folder")),
    ],
)
def test_tables_are_read_some_rows_at_a_time(
    family: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table of all layers' inputs, and one that is embedding table and head, are the largest.

    An adapter that changes neither is merged.
    """
    for module in ("verifying.verify", "gguf.reading"):
        monkeypatch.setattr(f"unsloth_cupy.models.{module}.AT_ONCE", 1 << 14)
    rows = 2**12 if "gemma" in family else 2**13
    config: dict[str, Any] = {"model_type": "llama", "tie_word_embeddings": True}
    if family != "llama":
        sizes = {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": rows}
        config = {**MIXTURES[family], **sizes, "hidden_size": 32}
    else:
        config |= {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    folder = chat_folder(tmp_path / "m", config | {"vocab_size": rows})
    model = models.load(folder)
    model.add_adapter(2, seed=0, targets=["down_proj"])
    model.save_adapter(tmp_path / "a")
    file = folder
    if kind != "folder":
        file = tmp_path / "m.gguf"
        models.export_gguf(folder, file, kind=kind)
    shapes = model.config.shapes()
    largest = max(4 * math.prod(shape) for shape in shapes.values())
    rest = sum(4 * math.prod(shape) for name, shape in shapes.items() if "embed" not in name)
    assert largest > 2 * rest
    own = folder_side("test", folder) if file == folder else file_side(file)
    sides = folder_side("test", tmp_path / "a", folder), own
    verify.compare(*sides, ["in"], again=0)  # the tables of quantized types
    tracemalloc.start()
    try:
        result = verify.compare(*sides, ["in"], again=0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert result.same, result
    assert peak < 0.4 * largest, (peak, largest)  # 0.07 and 0.33 were seen


@pytest.mark.parametrize(
    ("name", "tensor", "stage"),
    [
        ("gemma4", "blk.1.layer_output_scale.weight", "block 1"),
        ("gemma4 of shared keys", "per_layer_token_embd.weight", "embedding"),
        ("gemma4 of shared keys", "per_layer_model_proj.weight", "embedding"),
        ("gemma4 of shared keys", "blk.4.inp_gate.weight", "block 4"),
        ("gemma4 of experts", "blk.1.ffn_down_exps.scale", "block 1"),
        ("gemma4 of experts", "blk.0.ffn_gate_inp.scale", "block 0"),
        ("llama4", "blk.1.ffn_gate_inp.weight", "block 1"),
        ("mistral4", "blk.2.ffn_gate_up_exps.weight", "block 2"),
        ("deepseek32", "blk.0.indexer.attn_k.weight", "block 0"),
        ("glm-dsa", "blk.2.indexer.k_norm.bias", "block 2"),
    ],
)
def test_planted_faults_in_tensors_of_few_families(
    name: str, tensor: str, stage: str, tmp_path: Path
) -> None:
    make(tmp_path / "m", MIXTURES[name])
    models.export_gguf(tmp_path / "m", tmp_path / "m.gguf", kind="q8_0")
    right, wrong = tmp_path / "m.gguf", tmp_path / "f.gguf"
    planted(right, wrong, tensors={tensor: lambda array: np.roll(array, 1) + 0.1})
    assert models.verify(right, tmp_path / "m", prompts=PROMPTS).same
    result = models.verify(wrong, tmp_path / "m", prompts=PROMPTS)
    assert (result.same, result.stage) == (False, stage), result


def test_the_epsilon_of_latent_norms_is_that_of_llama_cpp(tmp_path: Path) -> None:
    make(tmp_path / "m", MIXTURES["minicpm3"] | {"rms_norm_eps": 1e-3})
    models.export_gguf(tmp_path / "m", tmp_path / "m.gguf", kind="f32")
    result = models.verify(tmp_path / "m.gguf", tmp_path / "m", prompts=["the inn"])
    assert (result.stage, result.same) == ("block 0", False)
    assert "epsilon of 0.001 in llama.cpp, and 1e-06" in str(result.cause)


def test_windows_that_llama_cpp_lacks_differ_beyond_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("unsloth_cupy.models.verifying.verify.ANSWER", 1)
    make(tmp_path / "m", CONFIGS["mistral"])
    models.export_gguf(tmp_path / "m", tmp_path / "m.gguf", kind="f32")
    within = models.verify(tmp_path / "m.gguf", tmp_path / "m", prompts=["the"])
    assert within.same, within
    result = models.verify(tmp_path / "m.gguf", tmp_path / "m", prompts=["the", "etaoin etaoin"])
    assert (result.stage, result.prompt, result.token) == ("block 0", 1, 5)
    assert "the reader has no window" in str(result.cause)


# ---- adapters and folders -----------------------------------------------------------------------
@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Make a base, another checkpoint of it, an adapter, and the merged model."""
    home = tmp_path_factory.mktemp("adapted")
    base = chat_folder(home / "base", CONFIGS["llama"])
    other = shutil.copytree(base, home / "other")
    model = models.load(base)
    for index, array in enumerate(model.parameters.values()):
        draw = np.random.default_rng(index)
        array[...] += 0.3 * array.std() * draw.standard_normal(array.shape, np.float32)
    model.save(other)
    model = models.load(base)
    model.add_adapter(rank=4, alpha=8, seed=3)
    for index, (name, array) in enumerate(sorted(model.adapter.parameters.items())):
        if "lora_B" in name:
            array[...] = np.random.default_rng(index).normal(0, 0.1, array.shape)
    model.save_adapter(home / "adapter")
    models.merge(home / "adapter", home / "merged", base=base)
    models.export_gguf(home / "adapter", home / "right.gguf", kind="q8_0", base=base)
    models.export_gguf(base, home / "plain.gguf", kind="q8_0")
    models.export_gguf(home / "adapter", home / "base.gguf", kind="q8_0", base=other)
    twice = shutil.copytree(home / "adapter", home / "twice")
    values = json.loads((twice / "adapter_config.json").read_text())
    (twice / "adapter_config.json").write_text(json.dumps(values | {"lora_alpha": 16}))
    models.export_gguf(twice, home / "twice.gguf", kind="q8_0", base=base)
    return {path.name: path for path in home.iterdir()}


@pytest.mark.parametrize("name", ["right.gguf", "merged", "adapter"])
def test_right_files_of_an_adapter(name: str, adapted: dict[str, Path]) -> None:
    result = models.verify(adapted[name], adapted["adapter"], prompts=PROMPTS, base=adapted["base"])
    assert result.same, result
    assert name != "adapter" or result.exact


@pytest.mark.parametrize(
    ("name", "stage", "cause"),
    [
        ("plain.gguf", "block 0", "the base without the adapter"),
        ("base", "block 0", "the base without the adapter"),
        ("twice.gguf", "block 0", "adapter is merged 2 times: its scale"),
        ("twice", "block 0", "adapter is merged 2 times: its scale"),
        ("base.gguf", "embedding", "the base that was merged is another checkpoint"),
        ("other", "embedding", "another checkpoint"),
    ],
)
def test_wrong_files_of_an_adapter(
    name: str, stage: str, cause: str, adapted: dict[str, Path]
) -> None:
    result = models.verify(adapted[name], adapted["adapter"], prompts=PROMPTS, base=adapted["base"])
    assert (result.same, result.stage) == (False, stage), result
    assert cause in str(result.cause)


def changed(folder: Path, out: Path, file: str, **values: Any) -> Path:
    """Copy a folder with other values in one of its JSON files."""
    shutil.copytree(folder, out)
    path = out / file
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | values))
    return out


@pytest.mark.parametrize(
    ("file", "values", "stage", "cause"),
    [
        ("tokenizer_config.json", {"chat_template": None}, "template", "no chat template"),
        ("tokenizer_config.json", {"chat_template": "{{ messages }}"}, "template",
            "is not the one"),
        ("tokenizer_config.json", {"bos_token": "<pad>"}, "template", "reads bos_token"),
        ("tokenizer.json", {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True,
            "trim_offsets": True, "use_regex": True}}, "tokens", "another rule"),
        ("config.json", {"rms_norm_eps": 1e-3}, "block 0", "epsilon of norms is 0.001"),
        ("config.json", {"rope_theta": 5e5, "rope_parameters": None}, "block 0", "rotary base"),
        ("generation_config.json", {"eos_token_id": 1}, "end", f"stop token {END}"),
        ("config.json", {"max_position_embeddings": 48}, "end", "max_position_embeddings is 48"),
    ],
)  # fmt: skip
def test_wrong_folders(file: str, values: Any, stage: str, cause: str, tmp_path: Path) -> None:
    trained = chat_folder(tmp_path / "m", CONFIGS["llama"])
    ends = {"eos_token_id": [2, END]}
    (trained / "generation_config.json").write_text(json.dumps(ends))
    assert models.verify(trained, trained, prompts=PROMPTS).exact
    result = models.verify(
        changed(trained, tmp_path / "x", file, **values), trained, prompts=PROMPTS[:1]
    )
    assert result.stage == stage, result
    assert cause in str(result.cause)


# ---- files that cannot be read, and the command -------------------------------------------------
def run(*words: object) -> click.testing.Result:
    return click.testing.CliRunner().invoke(group, [str(word) for word in words])


def test_the_command_has_three_ends(right: Any, tmp_path: Path) -> None:
    folder, file = right("llama", "q8_0")
    prompts = tmp_path / "prompts.jsonl"
    rows = ['"the inn"', '{"prompt": "the"}', '[{"role": "user", "content": "in"}]', ""]
    prompts.write_text("\n".join(rows))
    done = run("verify", file, "--against", folder, "--prompts", prompts)
    assert done.exit_code == 0, done.output
    assert re.match(
        r"same: logits differ by .*, and rounding explains up to .*3 prompts", done.output
    )
    wrong = planted(file, tmp_path / "f.gguf", {"ARCH.rope.freq_base": 5e5})
    done = run("verify", wrong, "--against", folder, "--json")
    assert done.exit_code == 1
    values = json.loads(done.output)
    assert (values["same"], values["stage"]) == (False, "block 0")
    assert {"prompt", "token", "difference", "bound", "cause", "cure"} < values.keys()
    done = run("verify", wrong, "--against", folder)
    assert "cause: the file has the rotary base 500000, not 10000" in done.output
    for target, against in ((tmp_path / "none.gguf", folder), (file, tmp_path / "none")):
        done = run("verify", target, "--against", against)
        assert (done.exit_code, done.output.count("\n")) == (2, 1), done.output


def test_broken_and_hostile_files_are_one_line(right: Any, tmp_path: Path) -> None:
    folder, file = right("llama")
    data = file.read_bytes()
    broken = {
        "empty": b"",
        "text": b"GGUF is no text",
        "version": data[:4] + (99).to_bytes(4, "little") + data[8:],
        "count": data[:8] + (1 << 60).to_bytes(8, "little") + data[16:],
        "keys": data[:16] + (1 << 60).to_bytes(8, "little") + data[24:],
        **{f"cut at {n}": data[:n] for n in (10, 100, 1000, len(data) - 1000)},
    }
    paths = []
    for name, content in broken.items():
        paths.append(tmp_path / f"{name}.gguf")
        paths[-1].write_bytes(content)
    wrong = {
        "family": {"general.architecture": None},
        "heads": {"ARCH.attention.head_count": 0},
        "layers": {"ARCH.block_count": 1 << 30},
        "hidden": {"ARCH.embedding_length": 31},
        "base": {"ARCH.rope.freq_base": float("nan")},
        "tokenizer": {f"{KEY}model": "none"},
        "rule": {f"{KEY}pre": "a rule of its own"},
        "tokens": {f"{KEY}tokens": ["a"]},
        "types": {f"{KEY}token_type": [1]},
        "begin": {f"{KEY}bos_token_id": 1 << 30},
    }
    del wrong["family"]
    for name, keys in wrong.items():
        paths.append(planted(file, tmp_path / f"{name}.gguf", keys))
    for path in paths:
        done = run("verify", path, "--against", folder)
        lines = done.output.count("\n")
        named = done.exit_code == 1 and "cause:" in done.output
        assert named or (done.exit_code, lines) == (2, 1), (path, done.output)
        assert isinstance(done.exception, SystemExit)


def test_a_template_that_does_not_end_is_a_cause(right: Any, tmp_path: Path) -> None:
    folder, file = right("llama")
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    path = planted(file, tmp_path / "f.gguf", {"tokenizer.chat_template": loop})
    result = models.verify(path, folder, prompts=PROMPTS[:1])
    assert (result.stage, result.same) == ("template", False)
    assert "cannot be rendered: " in str(result.cause)


@pytest.mark.parametrize(
    ("prompts", "problem"),
    [([], "at least one"), ([""], "prompt 0"), ([[]], "prompt 0"), ([[{"a": 1}]], "prompt 0"),
     (["the " * 99], "99 tokens|positions"), ([3], "prompt 0")],
)  # fmt: skip
def test_wrong_prompts(prompts: Any, problem: str, right: Any) -> None:
    folder, file = right("llama")
    with pytest.raises(ConfigError, match=problem):
        models.verify(file, folder, prompts=prompts)


# ---- Modelfiles ---------------------------------------------------------------------------------
LEGACY = (
    "{{ if .System }}<|im_start|>[system]\n{{ .System }}<|im_end|>\n{{ end }}"
    "{{- if .Prompt }}<|im_start|>[user]\n{{ .Prompt }}<|im_end|>\n{{ end }}"
    "<|im_start|>[assistant]\n{{ .Response }}<|im_end|>\n"
)
MESSAGES = (
    "{{- range $i, $m := .Messages }}{{- $last := eq (len (slice $.Messages $i)) 1 -}}"
    '<|im_start|>[{{ .Role }}]\n{{ $m.Content }}<|im_end|>{{ "\\n" }}'
    '{{- if and $last (ne .Role "assistant") }}<|im_start|>[assistant]\n{{ end }}{{ end }}'
)
TALKS = [
    "the inn",
    [{"role": "user", "content": "the"}, {"role": "assistant", "content": "inn"},
     {"role": "user", "content": "in"}],
    [{"role": "system", "content": "in"}, {"role": "user", "content": "the"}],
]  # fmt: skip


@pytest.fixture(scope="module")
def of_ollama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a model, its file, and the Modelfile that the command writes."""
    home = tmp_path_factory.mktemp("ollama")
    folder = chat_folder(home / "m", CONFIGS["llama"])
    done = run("export", folder, home / "m.gguf", "--type", "q8_0", "--modelfile")
    assert done.exit_code == 0, done.output
    return home


def modelfile(home: Path, template: str, more: str = "") -> Path:
    path = home / "x.Modelfile"
    path.write_text(f'# a comment\nFROM ./m.gguf\ntemplate """{template}"""\n{more}')
    return path


def test_right_modelfiles(of_ollama: Path) -> None:
    paths = [of_ollama / "m.Modelfile"]
    paths += [modelfile(of_ollama, each) for each in (LEGACY, MESSAGES)]
    for path in paths:
        result = models.verify(path, of_ollama / "m", prompts=TALKS)
        assert result.same, result


@pytest.mark.parametrize(
    ("template", "more", "cause"),
    [
        ("<s>" + MESSAGES, "", "TEMPLATE has it already: two BOS"),
        (MESSAGES, 'SYSTEM "in the inn"\n', "SYSTEM of the Modelfile adds a message"),
        (MESSAGES.replace("]\n", "] "), "", "TEMPLATE of the Modelfile writes another text"),
        ("{{ .Prompt }}", "", "TEMPLATE of the Modelfile writes another text"),
        ("{{ if .Prompt }}", "", "cannot be rendered: .*end }} is missing"),
        ("{{ template .Prompt }}", "", "cannot be rendered: .*'template' is unknown"),
        ("{{ if .Prompt }}" * 9999, "", "cannot be rendered: .*nested too deep"),
        ("{{ eq 1 }}) {{ (1 }} {{ 1 ) }}", "", "cannot be rendered"),
        ("{{ slice .Prompt `a` }}", "", "cannot be rendered: .*it fails"),
    ],
)
def test_wrong_modelfiles(template: str, more: str, cause: str, of_ollama: Path) -> None:
    path = modelfile(of_ollama, template, more)
    result = models.verify(path, of_ollama / "m", prompts=["the inn"])
    assert (result.stage, result.same) == ("template", False)
    assert re.search(cause, str(result.cause)), result


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("FROM ./none.gguf\nTEMPLATE x", "which is not a file"),
        ("FROM ./m.gguf", "has no TEMPLATE"),
        ('FROM ./m.gguf\nTEMPLATE """x', "not closed"),
        ("FROM ./m.gguf\nTEMPLATE x\nADAPTER ./a", "ADAPTER is not supported"),
        ("FORM ./m.gguf", "'FORM' is not an instruction of a Modelfile"),
    ],
)
def test_modelfiles_that_cannot_be_read(text: str, problem: str, of_ollama: Path) -> None:
    path = of_ollama / "y.Modelfile"
    path.write_text(text)
    done = run("verify", path, "--against", of_ollama / "m")
    assert done.exit_code == 2
    assert problem in done.output


def test_stops_of_a_modelfile(right: Any, tmp_path: Path) -> None:
    folder, file = right("own end", "q8_0")
    planted(file, tmp_path / "m.gguf", {f"{KEY}eot_token_id": None})
    template = MESSAGES.replace("<|im_end|>", "<think>")
    stop = modelfile(tmp_path, template, 'PARAMETER stop "<think>"\n')
    assert models.verify(stop, folder, prompts=PROMPTS[::2]).same
    result = models.verify(modelfile(tmp_path, template), folder, prompts=PROMPTS[::2])
    assert (result.stage, "stop token" in str(result.cause)) == ("end", True)


# ---- receipts -----------------------------------------------------------------------------------
def test_an_export_has_a_receipt(tmp_path: Path) -> None:
    """In one key of the file and in one small file, without prompts; nothing else changes."""
    folder = chat_folder(tmp_path / "m", CONFIGS["llama"])
    report = models.export_gguf(folder, tmp_path / "plain.gguf", kind="q8_0")
    assert (report.verified, [*tmp_path.glob("*.json")]) == (None, [])
    done = run("export", folder, tmp_path / "m.gguf", "--type", "q8_0")
    assert done.exit_code == 0, done.output
    assert "verified: same: logits differ by" in done.output
    values, tensors, types = read(tmp_path / "m.gguf")
    short = json.loads(values.pop("unsloth_cupy.verified"))
    receipt = json.loads((tmp_path / "m.verified.json").read_text())
    assert short == receipt
    assert (receipt["same"], receipt["exact"], receipt["stage"]) == (True, False, None)
    assert receipt["compared"].startswith("2 prompts, ")
    assert "sky" not in json.dumps(receipt)
    plain_values, plain_tensors, plain_types = read(tmp_path / "plain.gguf")
    assert values.pop("GGUF.kv_count") == plain_values.pop("GGUF.kv_count") + 1
    assert (values, types) == (plain_values, plain_types)
    np.testing.assert_equal(tensors, plain_tensors)
    assert models.verify(tmp_path / "m.gguf", folder).same


def test_a_receipt_tells_what_a_reader_lacks(tmp_path: Path) -> None:
    model = make(tmp_path / "m", CONFIGS["mistral"])
    report = models.export_gguf(model, tmp_path / "m.gguf", kind="f32", receipt=True)
    assert report.verified.stage == "block 0"
    assert "not as trained: " in str(report)
    assert "the reader has no window" in str(report)
    values = json.loads(read(tmp_path / "m.gguf")[0]["unsloth_cupy.verified"])
    assert (values["same"], values["stage"]) == (False, "block 0")


def test_equal_bits_of_a_run_through_its_types(tmp_path: Path) -> None:
    chat_folder(tmp_path / "m", FAMILIES["wide"])
    model = models.load(tmp_path / "m")
    model.add_adapter(rank=4, seed=3)
    model.train_through("q8_0")
    for index, (name, array) in enumerate(sorted(model.adapter.parameters.items())):
        if "lora_B" in name:
            array[...] = np.random.default_rng(index).normal(0, 0.05, array.shape)
    report = models.export_gguf(model, tmp_path / "m.gguf", receipt=True)
    assert report.types["q8_0"] > 10
    assert report.verified.same
    assert report.verified.exact, report.verified
    assert "equal bits" in str(report)


def test_a_merge_has_a_receipt(adapted: dict[str, Path], tmp_path: Path) -> None:
    done = run("merge", adapted["adapter"], tmp_path / "out", "--base", adapted["base"])
    assert done.exit_code == 0, done.output
    receipt = json.loads((tmp_path / "out" / "verified.json").read_text())
    assert receipt["same"]
    assert "verified: same" in done.output
    for each in (tmp_path / "base", tmp_path / "none"):
        shutil.copytree(adapted["base"], each)
    (tmp_path / "none" / "tokenizer.json").unlink()
    report = models.merge(tmp_path / "none", tmp_path / "copy", receipt=True)
    assert "not verified: " in str(report)
    receipt = json.loads((tmp_path / "copy" / "verified.json").read_text())
    assert receipt["same"] is None
    assert "tokenizer" in receipt["cause"]


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ("sequence_classification", "is a classifier, without next tokens; compare the labels of"),
        ("none", "is a model without a head, without next tokens; compare the embeddings of both"),
    ],
)
def test_a_model_without_next_tokens_is_refused(head: str, words: str, tmp_path: Path) -> None:
    folder = chat_folder(tmp_path / "m", FAMILIES["llama"])
    labels = 2 if head == "sequence_classification" else None
    models.load(folder, head=head, labels=labels).save(tmp_path / "other")
    with pytest.raises(ConfigError, match=words):
        models.verify(folder, tmp_path / "other")
