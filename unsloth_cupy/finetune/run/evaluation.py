"""Evaluation of a model on texts: loss, perplexity, accuracy and entropy.

loss          mean of -log p(token), in nats
perplexity    exp(loss)
accuracy      fraction of labels that are the most likely token (of ties, the lowest id)
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
from ...models.folders.pooling import pooling_of
from ...models.text.tokenizer import check_tokens
from ...ops.common.checks import check_choice
from ...placement import to_numpy
from ..data.chat import Chat
from ..data.iterables import is_rows
from ..data.records import Records
from ..data.records import split as split_records
from ..data.rows import KINDS, listing
from ..data.sources import find_data
from ..data.text import Batch, Text, held_out_rows, resplit
from ..data.tokenizer import encode, load_tokenizer
from ..data.training_data import Shape, from_records
from ..listener import announce
from ..methods.method import placed
from ..methods.registry import METHODS
from ..naming import named
from .limit import tokens_of
from .metrics import Watch, perplexity
from .preparation import device_name, padding
from .run_folder import model_folder, words_folder
from .settings import Settings

if TYPE_CHECKING:
    from ...models import Transformer


def read(data: Any, method: str = "sft") -> Text | Records:
    """Read data from files; return data that are already read."""
    if isinstance(data, Text | Records):
        return data
    return find_data(data, (), "evaluate", method).read(whole=True)


def whole(data: Text | Records) -> Text | Records:
    """Return the same data with all of it as evaluation data."""
    if isinstance(data, Text):
        with data.opened() as file:
            return data._replace(held_out=file.read().decode("utf-8-sig"), note="")
    everything = _all(data)
    return data._replace(train=everything, held_out=everything)


def held_out_of(data: Text | Records, evaluate: Any) -> tuple[Text | Records, dict[str, Any]]:
    """Return data with another evaluation part, and entries of settings.json about it.

    ``evaluate`` is a fraction of the data, or a file; with a file, all data are training data.

    Raises
    ------
    ConfigError
        One of file and data is running text, and the other has rows.
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
        announce(f"evaluation data: {other.note}")
        held_out = [record._replace(line=-record.line) for record in _all(other)]
        return data._replace(train=_all(data), held_out=held_out, evaluated=other), facts
    lines, text = (data.path, other.path) if isinstance(data, Records) else (other.path, data.path)
    raise ConfigError(
        f"{named(eval=other.path)} does not fit {named(text=data.path)}: {lines} has rows, and"
        f" {text} is running text; give two of a kind"
    )


def _text(data: Text | Records) -> str:
    """Return the evaluation part of a text."""
    return data.held_out if isinstance(data, Text) else ""


def _all(records: Records) -> list[Any]:
    """Return all records of a file, in file order."""
    return sorted([*records.train, *records.held_out], key=lambda record: record.line)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """The evaluation of a model on one source, or on all sources.

    Attributes
    ----------
    source : str
        A file, or "all".
    tokens : int
        Number of labels (target tokens).
    loss, entropy : float
        In nats per token.
    perplexity : float
        exp(loss).
    token_accuracy : float
        Fraction of labels that are the most likely token.
    measures : dict of str to float
        For methods other than sft: the number of texts or pairs, and the measures of the method.
        The loss is then the loss of the method, ``tokens`` counts all tokens of the texts, and
        other attributes are None.
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
    """Evaluate a model on each source, and, if there are several, on all sources together.

    Parameters
    ----------
    model : path or Transformer
        The folder of a model, an adapter or a run; or a model that was loaded from a folder.
    data : path, sequence of paths, iterable of mappings, or what read_data returns
        Sources, as ``read_data`` accepts them.  In rows, prompts are not targets.
    tokens : int, optional
        Maximum length of a row in tokens; None: 2048, or all positions of the model if fewer.
    batch : int
        Batch size in rows.
    device : str, optional
        As in ``models.load``, if ``model`` is a folder.
    quantize, base
        As in ``models.load``, if ``model`` is a folder; ``base`` replaces the base of an adapter.
    method : str, optional
        As in ``read_data``, with default options; not a method that compares with another model.
        None: chosen by the head of the model: classify or reward for a sequence classifier, embed
        for a model without a head (with the pooling in the files beside it), else sft.

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
        pad = padding(config)
        name = method_of(model) if method is None else method
        chosen = of_itself(name, model, source)
        result, every = list[Evaluation](), list[Any]()
        with blas_threads(config.hidden):
            for each in sources:
                held = whole(read(each, name))
                path = each if isinstance(each, Path) else held.name
                if isinstance(held, Records):
                    own = chosen.fitted(held, model.texts["config.json"])
                    if own.names and len(own.names) != config.labels:
                        problem = f"has {own.summary or 'pairs'}, but the model has"
                        problem += f" {config.labels} outputs"
                        cure = "pass rows with the labels of the model"
                        raise ConfigError(f"evaluate: {path} {problem}; {cure}")
                    shape = Shape(batch, length, True, pad, own)
                    training_data = from_records(held, tokenizer, config, shape, 0, chat)
                    of_source = training_data.held_out
                    announce(held.note)
                    note = training_data.note.replace("training on", "evaluating on", 1)
                    announce(f"{path}: {note}")
                elif chosen.sums:
                    problem = f"{path} is running text, which only sft reads"
                    cure = (
                        f"pass JSON lines with {KINDS[name][0]}, as finetune {named(method=name)}"
                    )
                    raise ConfigError(f"evaluate: {problem}; {cure} reads them")
                else:
                    own, shape = chosen, Shape(batch, length, False, pad)
                    of_source = rows_of(held.held_out, tokenizer, config, shape)
                parts = [_sums(model, each, own) for each in of_source]
                result.append(_evaluation(str(path), parts, own))
                every += parts
    return [*result, _evaluation("all", every, own)] if len(result) > 1 else result


def _sources(data: Any) -> list[Any]:
    """Return the sources of ``data``: paths, rows, or what read_data returned."""
    if is_rows(data) or isinstance(data, Text | Records):
        return [data]
    several = isinstance(data, Sequence) and not isinstance(data, str | bytes)
    if several and not data:
        raise ConfigError("evaluate(data=[]): name at least one file")
    return [path_of("evaluate: data", each) for each in (data if several else [data])]


def method_of(model: "Transformer") -> str:
    """Return the method for the head of a model."""
    if model.head != SEQUENCE:
        return "embed" if model.head == NONE else "sft"
    names = model.texts["config.json"].get("id2label") or {}
    return "reward" if [*names.values()] == ["reward"] else "classify"


def of_itself(name: str, model: "Transformer", folder: Path) -> Any:
    """Return a method that needs no other model; raise a ConfigError for other methods."""
    check_choice("evaluate", "method", name, tuple(METHODS))
    chosen: Any = METHODS[name]
    if not _alone(chosen):
        problem = "compares the model with another one, which only training loads"
        cure = f"measure it in training: finetune {named(method=name)} {named(eval='FILE')}"
        same = [
            n for n, kinds in KINDS.items() if kinds[0] == KINDS[name][0] and _alone(METHODS[n])
        ]
        if same:
            cure += f"; or choose {listing(same)}, which reads the same rows"
        raise ConfigError(f"evaluate: {named(method=name)} {problem}; {cure}")
    if chosen.is_on_policy:
        cure = f"finetune {named(method=name)} {named(eval='FILE')} measures them on its prompts"
        raise ConfigError(f"evaluate: {named(method=name)} needs rewards; {cure}")
    if (head := chosen.head or CAUSAL) != model.head:
        problem = f"needs the head {head}, and the model has {model.head}"
        raise ConfigError(f"evaluate: {named(method=name)} {problem}; choose another method")
    pooling = pooling_of(folder) if name == "embed" else None
    return chosen.bound(Settings(method=name, pooling=pooling))


def _alone(method: Any) -> bool:
    """Return whether a method needs no other model."""
    return not (method.compares or method.other_models or "teacher" in method.uses)


def rows_of(text: str, tokenizer: Any, config: Any, shape: Shape) -> list[Batch]:
    """Return the batches of a text in which each token but the first is a label."""
    encoded = encode(tokenizer, text)
    check_tokens(tokenizer, [int(encoded.max(initial=0))], config.vocab)
    return held_out_rows(encoded, batch=shape.batch, length=shape.length)


def _sums(model: "Transformer", batch: Batch, method: Any) -> Any:
    """Return the sums of a batch: labels, loss, right tokens, entropy; or sums of a method."""
    if method.sums:
        sink: list[Any] = []
        arrays = placed(method.inputs(batch), model.table) | method.counts([batch])
        count = arrays["count"]
        loss = float(method(model, **arrays, sink=sink)) * count
        return np.array([count, loss, batch.real, batch.label_count, *to_numpy(sink[0])])
    arrays = placed(method.inputs(batch), model.table)
    watch = Watch(model)
    loss = float(watch.view.loss(**arrays, count=1))
    return np.array([batch.label_count, loss, *watch.counts(arrays)])


def _evaluation(source: str, parts: Any, method: Any) -> Evaluation:
    """Return the evaluation of a source from the sums of its batches."""
    if method.sums:
        count, loss, tokens, units = sum(part[:4] for part in parts)
        own = {method.unit: int(units)} | method.measures(method.joined([p[4:] for p in parts]))
        return Evaluation(source, int(tokens), float(loss / max(count, 1)), measures=own)
    count, loss, right, entropy = (float(each) for each in sum(parts))
    loss, right, entropy = (each / max(count, 1) for each in (loss, right, entropy))
    return Evaluation(source, int(count), loss, perplexity(loss), right, entropy)
