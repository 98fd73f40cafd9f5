"""What a model says of tokens it has not learned: loss, perplexity, accuracy and entropy.

loss          mean of -log p(token), in nats
perplexity    exp(loss)
accuracy      share of the tokens that the model finds likeliest; of equal ones the lowest
entropy       mean of -sum p log p over the vocabulary, in nats
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import models
from ...errors import ConfigError
from ...files import path_of
from ...machine import blas_threads, device_title, on_device, resolve_device
from ...models.adapters.adapter_base import base_of
from ...models.configs.heads import CAUSAL, NONE, SEQUENCE
from ...models.text.tokenizer import check_tokens
from ...ops.common.checks import check_choice
from ...placement import to_numpy
from ..data.chat import Chat
from ..data.iterables import is_rows
from ..data.records import Records
from ..data.records import split as split_records
from ..data.sources import find_data
from ..data.text import Batch, Text, held_out_rows, resplit
from ..data.tokenizer import encode, load_tokenizer
from ..data.training_data import Shape, from_records
from ..listener import announce
from ..methods.embedding_method import pooling_of
from ..methods.method import placed
from ..methods.registry import METHODS
from ..naming import named
from .limit import tokens_of
from .metrics import Watch, perplexity
from .preparation import device_name
from .run_folder import model_folder, words_folder
from .settings import Settings

if TYPE_CHECKING:
    from ...models import Transformer


def read(data: Any, method: str = "sft") -> Text | Records:
    """Return the text of a file, or what was read from one before."""
    if isinstance(data, Text | Records):
        return data
    return find_data(data, (), "evaluate", method).read(whole=True)


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
        announce(f"held out: {other.note}")
        held_out = [record._replace(line=-record.line) for record in _all(other)]
        return data._replace(train=_all(data), held_out=held_out, evaluated=other), facts
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
    measures : dict of str to float
        Of another method than sft, what it measures, and of how many texts or pairs.  The loss is
        then the method's own, ``tokens`` are those of the texts, and all else is None.
    """

    source: str
    tokens: int
    loss: float
    perplexity: float | None = None
    token_accuracy: float | None = None
    entropy: float | None = None
    measures: dict[str, float | None] = dataclasses.field(default_factory=dict)


def evaluate(
    model: Any,
    data: Any,
    *,
    tokens: int | None = None,
    batch: int = 4,
    device: str | None = "auto",
    quantize: str | None = None,
    base: Any = None,
    method: str | None = None,
) -> list[Evaluation]:
    """Return what a model says of each source, and, of several, of all of them together.

    Parameters
    ----------
    model : path or Transformer
        The folder of a model, an adapter or a run; or a model that was loaded from one.
    data : path, sequence of paths, iterable of mappings, or what read_data returns
        Each is a source: all that ``read_data`` takes; of rows, the prompts do not count.
    tokens : int, optional
        Tokens in a row; None: 2048, or all positions of the model if fewer.
    batch : int
        Rows computed at a time.
    device : str, optional
        As in ``models.load``, if model is a folder.
    quantize, base
        Of a folder, as in ``models.load``; ``base`` replaces the base of an adapter.
    method : str, optional
        As in ``read_data``, with its defaults; not one that compares with another model.  None: by
        the model: classify or reward of a sequence classifier, embed of one without a head (with
        the pooling that files beside it name), else sft.

    Raises
    ------
    ConfigError
        A file is missing or invalid, or does not fit the model.
    """
    sources = _sources(data)
    is_model = isinstance(model, models.Transformer)
    source = model.folder if is_model else model_folder(path_of("evaluate: model", model))
    if source is None:
        cure = "load it from its folder"
        raise ConfigError(f"evaluate: the model has no folder, and no tokenizer; {cure}")
    words = words_folder(source, base)
    tokenizer, chat = load_tokenizer(words), Chat(words)
    device, problem = resolve_device(device_name(model) if is_model else device)
    with on_device("evaluate", device):
        if not is_model:
            for each in filter(None, (problem, f"evaluating on {device_title(device)}")):
                announce(each)
            home = base_of(source, base)
            lora = None if home is None else source
            model = models.load(home or source, lora=lora, quantize=quantize, device=device)
            if model.origin:
                announce(model.origin)
        config = model.config
        length = tokens_of(tokens, config.positions)
        pad = config.pad_token
        pad = pad if pad is not None and pad < config.vocab else 0
        name = method_of(model) if method is None else method
        learning = of_itself(name, model, source)
        result, every = list[Evaluation](), list[Any]()
        with blas_threads(config.hidden):
            for each in sources:
                held = whole(read(each, name))
                path = each if isinstance(each, Path) else held.name
                if isinstance(held, Records):
                    own = learning.fitted(held, model.texts["config.json"])
                    if own.names and len(own.names) != config.labels:
                        problem = f"has {own.summary or 'pairs'}, the model {config.labels} outputs"
                        raise ConfigError(f"evaluate: {path} {problem}; give the model's own rows")
                    shape = Shape(batch, length, True, pad, own)
                    training_data = from_records(held, tokenizer, config, shape, 0, chat)
                    of_source = training_data.held_out
                    announce(held.note)
                    note = training_data.note.replace("training on", "evaluating on", 1)
                    announce(f"{path}: {note}")
                elif learning.sums:
                    raise ConfigError(f"evaluate: {path} is running text, for sft alone; give rows")
                else:
                    own, shape = learning, Shape(batch, length, False, pad)
                    of_source = rows_of(held.held_out, tokenizer, config, shape)
                parts = [_sums(model, each, own) for each in of_source]
                result.append(_evaluation(str(path), parts, own))
                every += parts
    return [*result, _evaluation("all", every, own)] if len(result) > 1 else result


def _sources(data: Any) -> list[Any]:
    """Return what is evaluated by itself: paths, rows, or what read_data returned."""
    if is_rows(data) or isinstance(data, Text | Records):
        return [data]
    several = isinstance(data, Sequence) and not isinstance(data, str | bytes)
    if several and not data:
        raise ConfigError("evaluate(data=[]): name at least one file")
    return [path_of("evaluate: data", each) for each in (data if several else [data])]


def method_of(model: "Transformer") -> str:
    """Return the method that a model was trained by, as far as its head tells."""
    if model.head != SEQUENCE:
        return "embed" if model.head == NONE else "sft"
    names = model.texts["config.json"].get("id2label") or {}
    return "reward" if [*names.values()] == ["reward"] else "classify"


def of_itself(name: str, model: "Transformer", folder: Path) -> Any:
    """Return a method whose loss is of a model alone; raise a ConfigError for another."""
    check_choice("evaluate", "method", name, tuple(METHODS))
    learning: Any = METHODS[name]
    if learning.compares or learning.other_models or "teacher" in learning.uses:
        problem = "compares with another model, which training has"
        raise ConfigError(f"evaluate(method={name!r}): it {problem}; choose another method")
    if learning.is_on_policy:
        cure = "finetune measures it on held-out prompts"
        raise ConfigError(f"evaluate(method={name!r}): it needs rewards; {cure}")
    if (head := learning.head or CAUSAL) != model.head:
        problem = f"is of the head {head}, and the model's is {model.head}"
        raise ConfigError(f"evaluate(method={name!r}): it {problem}; choose another method")
    pooling = pooling_of(folder) if name == "embed" else None
    return learning.bound(Settings(method=name, pooling=pooling))


def rows_of(text: str, tokenizer: Any, config: Any, shape: Shape) -> list[Batch]:
    """Return the batches of a text in which each token but the first is a label."""
    encoded = encode(tokenizer, text)
    check_tokens(tokenizer, [int(encoded.max(initial=0))], config.vocab)
    return held_out_rows(encoded, batch=shape.batch, length=shape.length)


def _sums(model: "Transformer", batch: Batch, method: Any) -> Any:
    """Return labels, loss, right tokens and entropy of a batch; or what another method measures."""
    if method.sums:
        sink: list[Any] = []
        arrays = placed(method.inputs(batch), model.table) | method.counts([batch])
        count = arrays["count"]
        loss = float(method(model, **arrays, sink=sink)) * count
        return np.array([count, loss, batch.real, batch.label_count, *to_numpy(sink[0])])
    named_arrays = {"tokens": batch.tokens, "labels": batch.labels, "offsets": batch.offsets}
    arrays = placed(named_arrays, model.table)
    watch = Watch(model)
    loss = float(watch.view.loss(**arrays, count=1))
    return np.array([batch.label_count, loss, *watch.counts(arrays)])


def _evaluation(source: str, parts: Any, method: Any) -> Evaluation:
    """Return means of sums."""
    if method.sums:
        count, loss, tokens, units = sum(part[:4] for part in parts)
        own = {method.unit: int(units)} | method.measures(method.joined([p[4:] for p in parts]))
        return Evaluation(source, int(tokens), float(loss / max(count, 1)), measures=own)
    count, loss, right, entropy = (float(each) for each in sum(parts))
    loss, right, entropy = (each / max(count, 1) for each in (loss, right, entropy))
    return Evaluation(source, int(count), loss, perplexity(loss), right, entropy)
