"""Predictions of a sequence classifier for texts, by the names of its labels."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...core.dtypes import FLOAT32
from ...errors import ConfigError
from ...placement import to_device_of, to_numpy
from ..configs.heads import PROBLEMS, SEQUENCE, require_head
from .chat import Message
from .tokenizer import Tokenizer, check_tokens

REGRESSION, SINGLE, MULTI = PROBLEMS


def label_names(config: Mapping[str, Any], labels: int) -> list[str]:
    """Return the names of the labels in a config.json; without names LABEL_0, LABEL_1, ..."""
    names = config.get("id2label") or {}
    return [str(names.get(str(number), f"LABEL_{number}")) for number in range(labels)]


def predicted(model: Any, texts: Any) -> list[dict[str, float]]:
    """Return the predictions for texts: see ``Transformer.predict``."""
    require_head("predict", model.config, SEQUENCE)
    if isinstance(texts, str) or not isinstance(texts, Sequence):
        raise ConfigError(f"predict({texts!r:.60}): pass a list of texts, such as [text]")
    if model.tokenizer is None:
        cure = "load it from a folder with a tokenizer.json"
        raise ConfigError(f"predict: the model has no tokenizer; {cure}")
    config, labels = model.texts.get("config.json", {}), model.config.labels
    names = label_names(config, labels)
    problem = config.get("problem_type") or (REGRESSION if labels == 1 else SINGLE)
    return [
        dict(zip(names, _numbers(model, problem, _tokens(model, text)), strict=True))
        for text in texts
    ]


def _tokens(model: Any, text: str | Sequence[Message]) -> Any:
    """Return the tokens of a text, or of messages."""
    tokenizer: Tokenizer = model.tokenizer
    chat = not isinstance(text, str)
    written = tokenizer.chat(text, answer=False) if not isinstance(text, str) else text
    tokens = tokenizer.encode(written, special_tokens=not chat)
    if not 0 < len(tokens) <= model.config.positions:
        problem = f"a text has {len(tokens)} tokens, and the model {model.config.positions}"
        raise ConfigError(f"predict: {problem} positions; change this text: {written[:40]!r}")
    check_tokens(tokenizer.backend, [int(tokens.max())], model.config.vocab)
    return to_device_of(tokens[None], model.table)


def _numbers(model: Any, problem: str, tokens: Any) -> list[float]:
    """Return the outputs for one text: probabilities of classes, or the numbers of a regression."""
    z = to_numpy(model.logits(tokens))[0].astype(FLOAT32)
    if problem == SINGLE:
        z = np.exp(z - np.logaddexp.reduce(z))
    elif problem == MULTI:
        z = np.exp(-np.logaddexp(0, -z))
    return [float(each) for each in z]
