"""Stores the predictions of a teacher, to train a student without the teacher in memory.

report = teach("large", "chat.jsonl", "taught", top_k=64)
run = Trainer("small", "chat.jsonl", Settings(method="distill", teacher="taught")).train()
"""

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...core.call import is_integer
from ...core.dtypes import FLOAT32, Array
from ...errors import ConfigError
from ...files import atomic_path, check_room, path_of
from ...machine import blas_threads, device_title, on_device, resolve_device
from ...models.layers.head import logits_of
from ...models.loss import next_labels
from ...models.objective import IGNORE
from ...ops.losses.divergence import log_softmax
from ...placement import to_numpy
from ..data.chat import Chat
from ..data.records import Records
from ..data.sources import find_data
from ..data.text import Batch
from ..data.tokenizer import load_tokenizer
from ..data.training_data import Shape, consecutive, from_records
from ..listener import announce, computing
from ..methods.method import placed
from ..methods.registry import METHODS
from ..methods.taught import FILE, TEXT, digest_of, vocabulary_of
from ..naming import named
from .evaluation import whole
from .metrics import CHUNK
from .preparation import padding, with_tokens
from .reference import frozen
from .run_folder import model_folder, words_folder
from .settings import Settings


class Teaching(NamedTuple):
    """Stored predictions: folder, texts, rows of k tokens, and the probability they cover."""

    folder: Path
    texts: int
    rows: int
    mean_mass: float
    least_mass: float


def teach(
    model: Any,
    data: Any,
    out: Any,
    *,
    top_k: int = 64,
    tokens: int | None = None,
    temperature: float = 1.0,
    batch: int = 4,
    device: str | None = "auto",
    ignore: Collection[str] = (),
) -> Teaching:
    """Store the most likely tokens that a model predicts for each target token of texts.

    Parameters
    ----------
    model : path
        The folder of a model, an adapter or a run.
    data : path, str, or list of these
        Training data, as ``read_data`` accepts them, with their evaluation part.
    out : path
        A new folder.
    top_k : int
        Number of tokens to store per prediction.
    tokens : int, optional
        Maximum length of a row in tokens; None: as in a run.
    temperature : float
        Temperature, which divides the logits.
    batch : int
        Batch size in rows.
    device
        As in ``models.load``.
    ignore : collection of str
        Columns to ignore.

    Raises
    ------
    ConfigError
        A file is missing or invalid, does not fit the model, or the folder exists.
    """
    source, folder = model_folder(path_of("teach: model", model)), path_of("teach: out", out)
    if folder.exists():
        raise ConfigError(f"{named(out=folder)} exists; name a new folder")
    if not (is_integer(top_k, 1) and temperature > 0):
        problem = f"teach(top_k={top_k}, temperature={temperature})"
        raise ConfigError(f"{problem}: give 1 or more tokens, and a temperature above 0")
    records = find_data(data, ignore, "teach").read()
    if not isinstance(records, Records):
        shown = named(text=records.path)
        raise ConfigError(f"{shown} is one running text; give rows, such as a .jsonl file")
    words = words_folder(source)
    tokenizer, chat = load_tokenizer(words), Chat(words)
    device, problem = resolve_device(device)
    for each in filter(None, (problem, f"computing predictions on {device_title(device)}")):
        announce(each)
    with on_device("teach", device):
        teacher = frozen(source, None, device)
        config = teacher.config
        settings = with_tokens(Settings(tokens=tokens), records, tokenizer, chat, config)
        shape = Shape(batch, settings.tokens or 0, True, padding(config))
        announce(records.note)
        every: Any = whole(records)
        examples = from_records(every, tokenizer, config, shape, 0, chat).examples[0]
        most, count = min(top_k, config.vocab), len(examples.labels())
        check_room("teach", folder, count * most * 8, "the predictions")
        masses, starts, row = [np.zeros(0)], dict[bytes, int](), 0
        with atomic_path(folder, "teach") as partial, blas_threads(config.hidden):
            partial.mkdir()
            kinds = {"tokens": np.dtype("<i4"), "log_probs": np.dtype("<f4")}
            files = [
                np.lib.format.open_memmap(partial / f"{name}.npy", "w+", kind, (count, most))
                for name, kind in kinds.items()
            ]
            pieces = ((range(examples.ends[last] - examples.ends[first]), first, last)
                      for first, last in consecutive(examples, shape))  # fmt: skip
            for _, first, last in computing(pieces, examples.ends[-1], "computing predictions"):
                texts = [examples[number] for number in range(first, last)]
                for text in texts:
                    starts.setdefault(digest_of(text), row)
                    row += int((text.labels != IGNORE).sum())
                done = row - sum(int((text.labels != IGNORE).sum()) for text in texts)
                for best, logs in predictions(teacher, shape.batch_of(texts), most, temperature):
                    files[0][done : done + len(best)] = best
                    files[1][done : done + len(best)] = logs
                    masses.append(np.exp(logs.astype(np.float64)).sum(axis=1))
                    done += len(best)
            for file in files:
                file.flush()
            np.save(partial / "texts.npy", np.array([*starts.items()], TEXT))
            facts: dict[str, Any] = {
                "model": str(source.resolve()),
                "vocabulary": vocabulary_of(tokenizer),
            }
            facts |= {"temperature": temperature, "tokens": shape.length, "top_k": most}
            (partial / FILE).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    mass = np.concatenate(masses)
    return Teaching(folder, len(starts), count, float(mass.mean()), float(mass.min()))


def predictions(
    model: Any, batch: Batch, count: int, temperature: float
) -> Iterator[tuple[Array, Array]]:
    """Yield the most likely tokens for the labels of a batch, and their log p, in chunks."""
    arrays = placed(METHODS["sft"].inputs(batch), model.table)
    parameters = model.entered(model.parameters)
    x = model.hidden(parameters, arrays["tokens"], offsets=arrays["offsets"])
    labels = next_labels(arrays["tokens"], arrays["labels"], arrays["offsets"]).reshape(-1)
    rows = x.reshape(-1, model.config.hidden)[labels != IGNORE]
    step = max(1, CHUNK // model.config.vocab)
    for start in range(0, len(rows), step):
        logits = logits_of(model.config, parameters, rows[start : start + step], model.division)
        logs = log_softmax(logits.astype(FLOAT32) / np.float32(temperature))
        best = np.argsort(-logs, axis=-1)[:, :count]
        yield to_numpy(best), to_numpy(np.take_along_axis(logs, best, axis=-1))
