"""Tiny models with a tokenizer, for tests that write GGUF files."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from unsloth_cupy import models

from .peers import CONFIGS, RELATIVES, SIZES

ENDS = ("<pad>", "<s>", "</s>")  # the ids that SIZES names
CHARACTERS = "\u0120etaoinshrdlu.,E"  # of the byte-level alphabet; the first is the space
MERGES = (("t", "h"), ("th", "e"), ("\u0120", "the"), ("i", "n"))
FULL = ["full_attention"] * 3
# What llama.cpp has of RELATIVES, by names of its architectures.
IN_LLAMA_CPP: dict[str, dict[str, Any]] = {
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 4},
    "olmo2": {
        "model_type": "olmo3",
        "num_hidden_layers": 4,
        "sliding_window": 5,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 8,
        },
    },
    "olmo": {"model_type": "olmo", "clip_qkv": 0.7},
    "granite": RELATIVES["granite"],
    "command-r": {"model_type": "cohere", "logit_scale": 0.3},
    "cohere2": {
        "model_type": "cohere2",
        "logit_scale": 0.3,
        "sliding_window": 5,
        "num_hidden_layers": 4,
    },
    "glm4": RELATIVES["glm4"],
    "ernie4_5": {"model_type": "ernie4_5", "head_dim": 16},
    "hunyuan-dense": RELATIVES["hunyuan"],
    "seed_oss": {"model_type": "seed_oss", "head_dim": 16},
    "exaone4": {"model_type": "exaone4", "sliding_window": None, "layer_types": FULL},
    "arcee": {"model_type": "arcee"},
    "starcoder2": {"model_type": "starcoder2"},
    "stablelm": {"model_type": "stablelm", "use_qkv_bias": True, "use_parallel_residual": True},
    "nemotron": RELATIVES["nemotron"],
    "mistral3": RELATIVES["ministral3"],
    "apertus": RELATIVES["apertus"],
    "phi2": {"model_type": "phi"},
    "jais2": RELATIVES["jais2"],
}


def byte_level(vocab: int, merges: Sequence[tuple[str, str]] = MERGES) -> dict[str, Any]:
    """Return a tokenizer.json of byte-level BPE, with at most this many tokens."""
    texts = [*ENDS, *CHARACTERS, *map("".join, merges)]
    assert len(texts) <= vocab
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": n, "content": text, "special": True, "single_word": False,
                "lstrip": False, "rstrip": False, "normalized": False,
            }
            for n, text in enumerate(ENDS)
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True,
        },
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True,
        },
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text: n for n, text in enumerate(texts)},
            "merges": [list(pair) for pair in merges],
        },
    }  # fmt: skip


def make(folder: Path, config: dict[str, Any] | str, **options: Any) -> models.Transformer:
    """Save a random model with a tokenizer, and return it loaded by ``load``."""
    named = CONFIGS[config] if isinstance(config, str) else config
    model = models.create(SIZES | named, seed=1, **options)
    draw = np.random.default_rng(2)
    for array in model.parameters.values():
        if array.ndim == 1:  # norms and biases begin as ones and zeros: too easy
            array[...] += (0.3 * draw.standard_normal(array.shape)).astype(array.dtype)
    model.save(folder)
    write_tokenizer(folder, byte_level(model.config.vocab))
    return models.load(folder)


def write_tokenizer(folder: Path, values: dict[str, Any], **settings: Any) -> None:
    """Write tokenizer.json and, if there are settings, tokenizer_config.json."""
    (folder / "tokenizer.json").write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def read(file: Path) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, str]]:
    """Return a file's metadata, its tensors as float32, and the names of their types."""
    import gguf

    reader = gguf.GGUFReader(file)
    values = {name: field.contents() for name, field in reader.fields.items()}
    dense, types = {}, {}
    for tensor in reader.tensors:
        shape = tuple(int(n) for n in reversed(tensor.shape))
        flat = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        dense[tensor.name] = np.array(flat, np.float32).reshape(shape)
        types[tensor.name] = tensor.tensor_type.name.lower()
    return values, dense, types
