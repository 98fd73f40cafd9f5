"""Heads of a model: their names in config.json, their logits, and embeddings without a head.

    causal_lm                   logits of every next token, from lm_head or the embedding table
    sequence_classification     score.weight x; x is the hidden state of the rightmost real token
    token_classification        score.weight x + score.bias; x is the hidden state of each token
    none                        no head: the model returns embeddings

In config.json, the end of the class name is the head, as in LlamaForSequenceClassification.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ...core.arrays import zeroed
from ...core.call import is_integer
from ...core.dtypes import FLOAT32, Array
from ...errors import ConfigError
from ...ops.common.gemm import gemm
from ...ops.linear.embedding import embedding
from ...ops.linear.linear import linear
from ...placement import to_device_of
from ...training.tape import Gradients, add_up
from ...training.variable import Var
from .config import Config
from .names import HEAD, SCORE, SCORE_BIAS

CAUSAL, SEQUENCE, TOKEN, NONE = HEADS = (
    *("causal_lm", "sequence_classification", "token_classification", "none"),
)
CLASSIFIERS = SEQUENCE, TOKEN
ENDS = {  # suffixes of class names in config.json
    "ForCausalLM": CAUSAL,
    "ForConditionalGeneration": CAUSAL,
    "ForSequenceClassification": SEQUENCE,
    "ForTokenClassification": TOKEN,
    "Model": NONE,
}
LABELS = ("id2label", "label2id", "num_labels", "problem_type")  # keys of classifiers
PROBLEMS = ("regression", "single_label_classification", "multi_label_classification")
OF_ENCODERS = ("dense.weight", "dense.bias", "norm.weight", "norm.bias")
POOLINGS = ("mean", "last", "cls")


# ---- config.json --------------------------------------------------------------------------------
def head_of(values: Mapping[str, Any]) -> str:
    """Return the head that a config.json names; by default that of a language model.

    Raises
    ------
    ConfigError
        The class has an unknown head.
    """
    named = values.get("architectures") or ["ForCausalLM"]
    first = str(named[0] if isinstance(named, list) else named)
    known_head = next((head for end, head in ENDS.items() if first.endswith(end)), None)
    if known_head is None:
        cure = f"choose a head: load(folder, head=), one of {', '.join(HEADS)}"
        raise ConfigError(f"config: architectures is {first}, whose head is unknown; {cure}")
    return known_head


def labels_of(values: Mapping[str, Any], head: str) -> int:
    """Return the number of outputs of a classifier; 0 for other heads."""
    if head not in CLASSIFIERS:
        return 0
    names = values.get("id2label")
    count = len(names) if isinstance(names, Mapping) else values.get("num_labels")
    count = 2 if count is None else count  # transformers' default
    if not is_integer(count, 1):
        raise ConfigError(f"config: num_labels is {count!r}; it must be an integer, 1 or more")
    problem = values.get("problem_type")
    if problem not in (None, *PROBLEMS):
        raise ConfigError(f"config: problem_type is {problem!r}; choose from {', '.join(PROBLEMS)}")
    return int(count)


def class_of(values: Mapping[str, Any], head: str) -> str:
    """Return the name of the model's class in transformers with this head."""
    named, kind = values.get("architectures"), str(values.get("model_type"))
    first = str(named[0]) if isinstance(named, list) and named else ""
    end = next((end for end in ENDS if first.endswith(end)), "")
    prefix = first.removesuffix(end) if end else "".join(w.capitalize() for w in kind.split("_"))
    prefix = prefix.removesuffix("Text") + "Text" * (kind.endswith("_text") and head != CAUSAL)
    return prefix + next(end for end, name in ENDS.items() if name == head)


class Choice(NamedTuple):
    """A config.json with a chosen head, and the parameters that the choice affects."""

    values: Mapping[str, Any]
    unread: frozenset[str] = frozenset()  # parameters that are not read from the file
    optional: frozenset[str] = frozenset()  # parameters that are new if the file does not have them


OWN = Choice({})  # the folder's own head


def chosen(values: Mapping[str, Any], head: str | None, labels: int | None) -> Choice:
    """Return a config.json whose head is replaced; None: its own head.

    Raises
    ------
    ConfigError
        The head is unknown, or ``labels`` does not fit it.
    """
    if head is None and labels is None:
        return Choice(values)
    if head is None:
        own = head_of(values)
        if own not in CLASSIFIERS:
            problem = f"load(labels={labels!r}): the folder's head is {own}"
            raise ConfigError(f"{problem}; pass head= with it, one of {', '.join(CLASSIFIERS)}")
        head = own
    if head not in HEADS:
        raise ConfigError(f"load(head={head!r}): choose from {', '.join(HEADS)}")
    if labels is not None and (head not in CLASSIFIERS or not is_integer(labels, 1)):
        cure = f"{head} has no labels; leave it out"
        cure = "pass the number of outputs, 1 or more" if head in CLASSIFIERS else cure
        raise ConfigError(f"load(head={head!r}, labels={labels!r}): {cure}")
    try:
        own = head_of(values)
    except ConfigError:
        own = ""  # an unknown head, which is replaced
    known = labels_of(values, own)
    if head == own and labels in (None, known):
        return Choice(values)
    if head in CLASSIFIERS and labels is None:
        problem = f"load(head={head!r}): config.json names {own or 'another head'}"
        raise ConfigError(f"{problem}; pass labels=, the number of outputs of the new head")
    texts = {**values, "architectures": [class_of(values, head)]}
    if known and labels != known:
        texts = {key: value for key, value in texts.items() if key not in LABELS}
    if labels is not None:
        texts["num_labels"] = labels
    scores = frozenset({SCORE, SCORE_BIAS})
    encoders = frozenset({f"head.{each}" for each in OF_ENCODERS})
    return Choice(texts, scores if known or not labels else frozenset(), scores | encoders | {HEAD})


# ---- logits and embeddings ----------------------------------------------------------------------
def require_head(call: str, config: Config, *heads: str) -> None:
    """Raise a ConfigError unless the model has one of these heads."""
    if config.head not in heads:
        best = CAUSAL if config.head == NONE and CAUSAL in heads else heads[0]
        what = f"the head of this model is {config.head!r}"
        if config.head == NONE:
            what += ": its files contain a bare model, whose tensors have no prefix"
        cure = f"load the folder with head={best!r}, or call another method"
        if CAUSAL in heads and config.labels:  # a classifier has no head of a language model
            cure = "pass a language model, or get labels from logits(tokens) or predict(texts)"
        elif CAUSAL in heads:
            other = f"load the folder with head={best!r}, "
            if not config.causal:  # an encoder is not loaded with that head
                what, other = f"this {config.model_type} is an encoder", ""
            cure = f"pass a language model, {other}or get vectors from embeddings(tokens)"
        raise ConfigError(f"{call}: {what}; {cure}")


def sequence_scores(parameters: Mapping[str, Any], x: Any, mask: Any, offsets: Any) -> Any:
    """Return the logits of texts from normalised hidden states: (texts, labels)."""
    places = rightmost(x, mask, offsets)
    return linear(embedding(places, x.reshape(-1, x.shape[-1])), parameters[SCORE])


def rightmost(x: Any, mask: Any, offsets: Any = None) -> Array:
    """Return the index of each text's last real token in x, flattened to (batch * tokens, ...).

    Raises
    ------
    ConfigError
        A row has no real token.  Masks on a GPU are not checked: reading them would make the host
        wait.
    """
    (batch, tokens), like = x.shape[:2], getattr(x, "value", x)
    if offsets is not None:
        last: Array = offsets[1:] - 1
        return last
    starts = to_device_of(np.arange(batch, dtype=np.int64) * tokens, like)
    if mask is None:
        return starts + (tokens - 1)
    real = mask[:, mask.shape[1] - tokens :] != 0
    check_real("logits", real)
    where = np.arange(1, tokens + 1, like=like) * real
    return starts + (where.max(axis=1) - 1)


def check_real(call: str, real: Any) -> None:
    """Raise a ConfigError for a row without a real token."""
    if type(real) is np.ndarray and not real.any(axis=1).all():
        row = int(np.argmin(real.any(axis=1)))
        raise ConfigError(f"{call}: row {row} has no real token; leave the row out")


def pooled(x: Any, mask: Any, offsets: Any, pooling: str, *, unit: bool = True) -> Any:
    """Return one vector for each row of x or packed text, in float32 or wider.

    p = mean of the hidden states at real tokens, or the last or the first hidden state
    y = p / ‖p‖, or p without ``unit``
    """
    if pooling not in POOLINGS:
        choices = " or ".join(map(repr, POOLINGS))
        raise ConfigError(f"embeddings(pooling={pooling!r}): pass {choices}")
    value = getattr(x, "value", x)
    real = tokens_of_texts(value, mask, offsets)
    check_real("embeddings", real)
    if pooling != "mean":
        length = real.shape[1]
        numbers = np.arange(1, length + 1, like=real)
        numbers = (numbers if pooling == "last" else length + 1 - numbers) * real
        real = numbers == numbers.max(axis=1)[:, None]
    wide = np.promote_types(value.dtype, FLOAT32)
    weights = real.astype(value.dtype)
    if offsets is None:
        sums = gemm(weights[:, None], zeroed(value, real), dtype=wide)[:, 0]
    else:
        sums = gemm(weights, value[0], dtype=wide)
    count = real.sum(axis=1)[:, None].astype(wide)
    mean = sums / count
    length = lengths(mean) if unit else np.ones_like(count)
    y = mean / length
    if type(x) is not Var:
        return y
    result = Var(y, x.tape)
    direction = y if unit else np.zeros_like(y)
    values = {"x": value, "y": direction, "real": real, "factor": 1 / (count * length)}
    x.tape.note(PooledRecord(values, {"x": x.index}, {"y": result.index}))
    return result


def lengths(rows: Array) -> Array:
    """Return the Euclidean length of each row: (rows, 1)."""
    result: Array = np.sqrt((rows * rows).sum(axis=1))[:, None].clip(1e-12)  # torch's normalize
    return result


def tokens_of_texts(x: Any, mask: Any, offsets: Any) -> Any:
    """Return which tokens belong to each row or packed text: (texts, tokens) bool."""
    batch, tokens = x.shape[:2]
    if offsets is None:
        return np.ones_like(x, bool, shape=(batch, tokens)) if mask is None else mask != 0
    where = np.arange(tokens, like=x)[None]
    return (where >= offsets[:-1, None]) & (where < offsets[1:, None])


class PooledRecord(NamedTuple):
    """A tape entry of pooled hidden states: y = p / ‖p‖, dp = (dy - y (y · dy)) / ‖p‖.

    Without normalisation, ``values`` has 0 for y and 1 for ‖p‖.
    """

    values: dict[str, Any]
    inputs: dict[str, int]
    outputs: dict[str, int]

    def add_back(self, take: dict[str, Any], inputs: dict[str, int], grads: Gradients) -> None:
        """Add dx: the gradient of the mean, at every token in the mean."""
        dy, index = take["y"], self.inputs["x"]
        x, y, real, factor = (self.values[name] for name in ("x", "y", "real", "factor"))
        dp = (dy - y * (y * dy).sum(axis=1)[:, None]) * factor
        if len(real) == len(x):
            dx = np.where(real[..., None], dp[:, None], 0)
        else:  # packed texts: each token belongs to one text
            dx = gemm(real.T.astype(dp.dtype), dp, dtype=dp.dtype)[None]
        dx = dx.astype(x.dtype, copy=False)
        grads[index] = add_up(grads.get(index), dx)
