"""Log-probabilities of the training data under a reference model, computed before training.

They are stored beside the tokens of the examples, and in the run folder.  A resumed run reads them
from the folder, with equal bits, even if the reference model has changed since.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import models
from ...core.dtypes import Array
from ...errors import ConfigError
from ...files import atomic_path
from ...machine import blas_threads
from ...models.adapters.adapter_base import base_of
from ...models.folders.checkpoint_files import opened, write_tensors
from ...placement import to_numpy
from ..data.text import TrainingData
from ..data.tokenizer import load_tokenizer
from ..data.training_data import Examples, Shape, consecutive, sequential_batches
from ..listener import computing
from ..methods.method import FOLDERS, placed, starts_of
from ..methods.registry import METHODS
from ..methods.taught import is_taught, read_taught
from ..naming import named
from .limit import check_tokens
from .run_folder import RunFolder, model_folder, model_without_weights, words_folder

if TYPE_CHECKING:
    from ...models import Transformer
    from .loop import Loop
    from .ranks import Ranks
    from .settings import Plan

PARTS = ("train", "held_out")


def folder_of(path: Any) -> Path:
    """Return the folder of a model, or of stored predictions."""
    return Path(path) if is_taught(Path(path)) else model_folder(Path(path))


def other_models(plan: "Plan", tokenizer: Any, vocab: int) -> dict[str, Path]:
    """Return the folders of the other models of a plan, by the names of their settings.

    Raises
    ------
    ConfigError
        A folder holds no model, or a model with another vocabulary or too few positions.
    """
    folders = {n: folder_of(v) for n in FOLDERS if (v := getattr(plan, n)) is not None}
    for name, folder in folders.items():
        if name == "teacher" and is_taught(folder):
            continue
        config, shown = model_without_weights(folder).config, named(**{name: getattr(plan, name)})
        ours, theirs = (
            each.get_vocab(with_added_tokens=True)
            for each in (tokenizer, load_tokenizer(words_folder(folder)))
        )
        if ours != theirs:
            word, _ = min(ours.items() ^ theirs.items())
            numbers = [f"token {each[word]}" if word in each else "none" for each in (theirs, ours)]
            problem = f"has another vocabulary: {word!r} is {numbers[0]} there, {numbers[1]} here"
            raise ConfigError(f"{shown} {problem}; give a model with the same tokenizer.json")
        if config.vocab < min(vocab, max(ours.values()) + 1):
            rows = f"has {config.vocab} rows in its table for {len(ours)} tokens"
            raise ConfigError(f"{shown} {rows}; copy it again")
        check_tokens(plan.tokens, config.positions, shown)
    return folders


def frozen(folder: Path, dtype: str | None, device: str | None, **placing: Any) -> "Transformer":
    """Load the model in a folder, in a dtype; for an adapter, with its base model."""
    home = base_of(folder)
    lora = None if home is None else folder
    return models.load(home or folder, lora=lora, dtype=dtype, device=device, **placing)


def with_teacher(
    method: Any,
    others: Mapping[str, Path],
    tokenizer: Any = None,
    dtype: str | None = None,
    device: str | None = None,
) -> Any:
    """Return a method with its other models loaded; without a dtype, only with their configs.

    With stored predictions, no teacher is loaded.
    """

    def read(path: Path) -> Any:
        folder = model_folder(path)
        return frozen(folder, dtype, device) if dtype else model_without_weights(folder).config

    method, folder = method.with_models(read), others.get("teacher")
    if folder is None or method.taught is not None:
        return method
    if is_taught(folder):
        return method.with_taught(
            read_taught(folder, tokenizer, method.loss_options.get("temperature"))
        )
    return dataclasses.replace(method, teacher=read(folder))


def add_taught(method: Any, data: TrainingData, shape: Shape, where: Any) -> TrainingData:
    """Return data with rows of stored predictions, if a method uses stored predictions."""
    taught = getattr(method, "taught", None)
    if taught is None:
        return data
    for part in data.examples:
        part.taught = taught.rows(part, where)
    return data._replace(held_out=sequential_batches(data.examples[1], shape))


def digest_of(parts: Sequence[Examples], origin: Any) -> Array:
    """Return a digest of texts and model, which identifies stored log-probabilities."""
    digest = hashlib.sha256(str(origin).encode())
    for part in parts:
        for data in (part.tokens, part.learned):
            digest.update(data)
    return np.frombuffer(digest.digest(), np.uint8)


def take_stored(run: RunFolder, parts: Sequence[Examples], origin: Any) -> bool:
    """Read log-probabilities from the run folder; return whether they are there."""
    from safetensors import SafetensorError

    if not run.reference.is_file():
        return False
    try:
        with opened(run.reference) as file:
            if file.get_tensor("digest").tobytes() != digest_of(parts, origin).tobytes():
                return False
            stored = [file.get_tensor(name) for name in PARTS]
    except (ConfigError, OSError, SafetensorError):  # it is computed again
        return False
    for part, each in zip(parts, stored, strict=True):
        part.reference = each
    return True


def store(run: RunFolder, parts: Sequence[Examples], origin: Any) -> None:
    """Write log-probabilities into the run folder."""
    arrays: dict[str, Any] = {n: p.reference for n, p in zip(PARTS, parts, strict=True)}
    with atomic_path(run.reference) as partial:
        write_tensors(partial, {**arrays, "digest": digest_of(parts, origin)})


def reference_known(
    run: RunFolder,
    plan: "Plan",
    parts: Sequence[Examples],
    origin: Path | None,
    shape: Shape,
    ranks: "Ranks",
    *,
    goes_on: bool,
) -> bool:
    """Set log-probabilities from the folder of a resumed run, or by a reference model.

    Ranks split the reference model as they split the trained model; it is freed before the trained
    model is loaded.  False: the reference is the model itself before the first step.
    """
    if goes_on and take_stored(run, parts, origin):
        return True
    if origin is None or not (goes_on or plan.reference):
        return False
    placing = ranks.placing | {"parts": None}
    compute(frozen(origin, plan.dtype, ranks.device, **placing), parts, shape, ranks)
    return True


def add_reference(loop: "Loop", origin: Path | None, shape: Shape, *, known: bool) -> None:
    """Add log-probabilities to the data of a loop, and store them."""
    parts = loop.training_data.examples
    if not known:
        compute(loop.model, parts, shape, loop.ranks)
    if loop.ranks.first:
        store(loop.run, parts, origin)
    held_out = sequential_batches(parts[1], shape)
    loop.training_data = loop.training_data._replace(held_out=held_out)


def compute(model: "Transformer", parts: Sequence[Examples], shape: Shape, ranks: "Ranks") -> None:
    """Set the log-probabilities of all examples under a model; data ranks share the work."""
    texts = shape._replace(method=METHODS["sft"])
    with blas_threads(model.config.hidden):
        for part in parts:
            _compute(model, part, texts, ranks)


def _compute(model: "Transformer", part: Examples, texts: Shape, ranks: "Ranks") -> None:
    """Set the log-probabilities of examples under a model."""
    plain, data = METHODS["sft"], ranks.data
    result = np.zeros(part.ends[-1], np.float32)
    places = [*consecutive(part, texts)]
    pieces = ((range(part.ends[last] - part.ends[first]), first, last)
              for first, last in places)  # fmt: skip
    counted = computing(pieces, part.ends[-1], "reference")
    for number, (_, first, last) in enumerate(counted):
        if number % data.size != data.rank:
            continue
        batch = texts.batch_of([part[each] for each in range(first, last)])
        arrays = placed(plain.inputs(batch), model.table)
        log_probs = to_numpy(model.log_probs(**arrays).log_probs).reshape(-1)
        for text, start in zip(range(first, last), starts_of(batch), strict=False):
            begin, stop = part.ends[text], part.ends[text + 1]
            # the logits of a position predict the next token
            result[begin + 1 : stop] = log_probs[start : start + stop - begin - 1]
    together = model.gather is not None or model.expert_ranks is not None
    if together and data.rank >= len(places) % data.size > 0:
        one = placed(plain.inputs(texts.batch_of([part[0]])), model.table)
        model.log_probs(**one)  # other ranks gather weights from here, or send rows
    part.reference = data.all_reduce(result) if data.size > 1 else result
    if (broken := np.flatnonzero(~np.isfinite(part.reference))).size:
        text = int(np.searchsorted(part.ends, broken[0], "right")) - 1
        problem = f"of the reference model is {part.reference[broken[0]]}"
        cure = "give another reference, or copy it again"
        line = f"line {part.lines[text]} of the data"
        raise ConfigError(f"{line}: the log-probability of a token {problem}; {cure}")
