"""What a model says of tokens it has not learned: loss, perplexity, accuracy and entropy.

loss          mean of -log p(token), in nats
perplexity    exp(loss)
accuracy      share of the tokens that the model finds likeliest; of equal ones the lowest
entropy       mean of -sum p log p over the vocabulary, in nats
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import models
from ..errors import ConfigError
from ..files import path_of
from ..machine import blas_threads
from ..models.adapter_base import base_of
from ..models.folder import on_device
from ..models.tokenizer import check_tokens
from ..placement import to_device_of
from .chat import Chat
from .data import found
from .limit import tokens_of
from .listener import announce
from .metrics import Watch, perplexity
from .naming import named
from .records import Records
from .records import split as split_records
from .run_folder import model_folder, words_folder
from .text import Batch, Text, held_out_rows, resplit
from .tokenizer import encode, load_tokenizer
from .training_data import Shape, from_records

if TYPE_CHECKING:
    from ..models import Transformer


def read(data: Any, method: str = "sft") -> Text | Records:
    """Return the text of a file, or what was read from one before."""
    return data if isinstance(data, Text | Records) else found(data, (), "evaluate", method).read()


def whole(data: Text | Records) -> Text | Records:
    """Return data all of which is held out."""
    if isinstance(data, Text):
        with data.opened() as file:
            return data._replace(held_out=file.read().decode("utf-8-sig"), note="")
    everything = _all(data)
    return data._replace(train=everything, held_out=everything)


def held_out_of(data: Text | Records, evaluate: Any) -> tuple[Text | Records, dict[str, Any]]:
    """Return data with another held-out part, and what the settings of a run keep of it.

    ``evaluate`` is a share of the data, or a file, which leaves all of the data to be learned.

    Raises
    ------
    ConfigError
        The file holds running text and the data does not, or the other way round.
    """
    if evaluate is None:
        return data, {}
    if isinstance(evaluate, float):
        if isinstance(data, Text):
            return resplit(data, evaluate), {"eval": evaluate}
        return split_records(data, evaluate), {"eval": evaluate}
    other = read(evaluate, data.method if isinstance(data, Records) else "sft")
    facts = {"eval": other.path and str(other.path.resolve()), "eval_sha256": other.digest}
    if isinstance(data, Text) and isinstance(other, Text):
        return data._replace(held_out=_text(whole(other)), cut=data.size, note=""), facts
    if isinstance(data, Records) and isinstance(other, Records):
        return data._replace(train=_all(data), held_out=_all(other)), facts
    lines, text = (data.path, other.path) if isinstance(data, Records) else (other.path, data.path)
    raise ConfigError(
        f"{named(eval=other.path)} does not fit {named(text=data.path)}: {lines} has lines, and"
        f" {text} is running text; give two of a kind"
    )


def _text(data: Text | Records) -> str:
    """Return the held-out part of a text."""
    return data.held_out if isinstance(data, Text) else ""


def _all(records: Records) -> list[Any]:
    """Return all records of a file, in its order."""
    return sorted([*records.train, *records.held_out], key=lambda record: record.line)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What a model says of one source, or of all.

    Attributes
    ----------
    source : str
        A file, or "all".
    tokens : int
        Labels: tokens that are learned in training.
    loss, entropy : float
        In nats per token.
    perplexity : float
        exp(loss).
    token_accuracy : float
        Share of the labels that the model finds likeliest.
    """

    source: str
    tokens: int
    loss: float
    perplexity: float
    token_accuracy: float
    entropy: float


def evaluate(
    model: Any,
    data: Any,
    *,
    tokens: int | None = None,
    batch: int = 4,
    device: str | None = None,
    quantize: str | None = None,
    base: Any = None,
) -> list[Evaluation]:
    """Return what a model says of each source, and, of several, of all of them together.

    Parameters
    ----------
    model : path or Transformer
        The folder of a model, an adapter or a run; or a model that was loaded from one.
    data : path or sequence of paths
        UTF-8 text, or .jsonl lines, of which the prompts do not count.
    tokens : int, optional
        Tokens in a row; None: 2048, or all positions of the model if fewer.
    batch : int
        Rows computed at a time.
    device, quantize, base
        As in ``models.load``, if model is a folder; ``base`` replaces the base of an adapter.

    Raises
    ------
    ConfigError
        A file is missing or invalid, or does not fit the model.
    """
    several = isinstance(data, Sequence) and not isinstance(data, str | bytes)
    paths = [path_of("evaluate: data", each) for each in (data if several else [data])]
    if not paths:
        raise ConfigError("evaluate(data=[]): name at least one file")
    given = isinstance(model, models.Transformer)
    source = model.folder if given else model_folder(path_of("evaluate: model", model))
    if source is None:
        cure = "load it from its folder"
        raise ConfigError(f"evaluate: the model has no folder, and no tokenizer; {cure}")
    words = words_folder(source, base)
    tokenizer, chat = load_tokenizer(words), Chat(words)
    with on_device("evaluate", device):
        if not given:
            home = base_of(source, base)
            lora = None if home is None else source
            model = models.load(home or source, lora=lora, quantize=quantize, device=device)
            if model.origin:
                announce(model.origin)
        config = model.config
        length = tokens_of(tokens, config.positions)
        pad = config.pad_token
        pad = pad if pad is not None and pad < config.vocab else 0
        result, sums = list[Evaluation](), np.zeros(4)
        with blas_threads(config.hidden):
            for path in paths:
                held = whole(read(path))
                shape = Shape(batch, length, isinstance(held, Records), pad)
                if isinstance(held, Records):
                    of_source = from_records(held, tokenizer, config, shape, 0, chat).held_out
                else:
                    of_source = rows_of(held.held_out, tokenizer, config, shape)
                own = sum((_sums(model, each) for each in of_source), np.zeros(4))
                result.append(_evaluation(str(path), own))
                sums += own
    return [*result, _evaluation("all", sums)] if len(result) > 1 else result


def rows_of(text: str, tokenizer: Any, config: Any, shape: Shape) -> list[Batch]:
    """Return the batches of a text in which each token but the first is a label."""
    encoded = encode(tokenizer, text)
    check_tokens(tokenizer, [int(encoded.max(initial=0))], config.vocab)
    return held_out_rows(encoded, batch=shape.batch, length=shape.length)


def _sums(model: "Transformer", batch: Batch) -> Any:
    """Return labels, loss, right tokens and entropy, summed over a batch."""
    named_arrays = {"tokens": batch.tokens, "labels": batch.labels, "offsets": batch.offsets}
    placed = {n: a if a is None else to_device_of(a, model.table) for n, a in named_arrays.items()}
    watch = Watch(model)
    loss = float(watch.view.loss(**placed, count=1))
    return np.array([batch.label_count, loss, *watch.counts(placed)])


def _evaluation(source: str, sums: Any) -> Evaluation:
    """Return means of sums."""
    count, loss, right, entropy = (float(each) for each in sums)
    loss, right, entropy = (each / max(count, 1) for each in (loss, right, entropy))
    return Evaluation(source, int(count), loss, perplexity(loss), right, entropy)
