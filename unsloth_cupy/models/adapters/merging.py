"""Write the model of an adapter's folder with the adapter merged into the weights: ``merge``."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from ...core.arrays import Unwritten
from ...core.call import check_options
from ...core.dtypes import FLOAT32, Array, float_dtype
from ...errors import ConfigError
from ...files import check_room, path_of, read_json, replacing_files
from ...machine import format_bytes
from ...ops.quantized.ternary import Ternary
from ...ops.quantized.weight import Quantized
from ..configs.config_files import GENERATION
from ..configs.heads import LABELS
from ..configs.names import TABLE
from ..folders.checkpoint_files import INDEX, SINGLE
from ..folders.expert_files import Place, file_tensors
from ..folders.expert_homes import plain_names
from ..folders.lazy_parameter import formats_of
from ..folders.quantized_weights import saved_config, stored_kind
from ..folders.stored import StoredModel, stored_model
from ..folders.tensor_file import write_one_by_one
from ..gguf.opening import source_of
from ..text.tokenizer import has_tokenizer
from ..transformer import Transformer
from ..verifying.receipt import checked, in_words, write_receipt
from ..verifying.sides import folder_side
from ..verifying.verify import Verification
from .kept import ENOUGH, Kept
from .probe import check_same, explained, own_tokens, probed

TEMPLATE, SETTINGS = "chat_template.jinja", "tokenizer_config.json"
VOCABULARY = (
    *("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json"),
    "spiece.model",
)
AROUND = (SETTINGS, "special_tokens_map.json", TEMPLATE)


@dataclass(frozen=True)
class Merged:
    """The report of ``merge`` on the folder that it wrote.

    Attributes
    ----------
    folder : Path
    bytes : int
        Size of the weights.
    layers : int
        Number of layers, tables and heads that had an adapter; 0: the model was copied.
    dtype : str
        Dtype of the matrices; of a copy of quantized weights, their kind.
    notes : tuple of str
        Properties of the folder that may surprise a reader.
    kept : Kept
        The share of the adapter's update that rounding preserves, ``kept.share``, and the share in
        each weight, ``kept.layers``.
    verified : Verification or str or None
        The comparison of the folder with the model, or why there is none; None without
        ``receipt``.
    """

    folder: Path
    bytes: int
    layers: int
    dtype: str
    notes: tuple[str, ...]
    kept: Kept
    verified: Verification | str | None = None

    def __str__(self) -> str:
        done = f"adapters of {self.layers} layers merged" if self.layers else "a copy"
        done += f" ({self.kept.share:.1%} of the update)" * bool(self.kept.layers)
        line = f"{self.folder}: {format_bytes(self.bytes)}, {self.dtype}, {done}"
        last = [] if self.verified is None else [in_words(self.verified)]
        return "\n".join([line, *(f"note: {note}" for note in self.notes), *last])


@check_options
def merge(
    folder: str | PathLike[str],
    out: str | PathLike[str],
    *,
    dtype: Any = None,
    base: str | PathLike[str] | None = None,
    progress: bool = False,
    receipt: bool = False,
) -> Merged:
    """Merge an adapter into the weights of its model, and write a Hugging Face folder.

    Each adapted weight W becomes W + scale B A, with scaled rows for DoRA; sums are computed in
    float32 and rounded once.  Quantized weights are dequantized.  If the adapter was trained
    through a quantizer (``merge_into``), the weights are written exactly as training used them.
    The folder contains the weights, config.json, generation_config.json, and the tokenizer with its
    chat template.  Weights are read, merged and written one by one.  The folder is written under a
    temporary name.  Before it is renamed to ``out``, its outputs for a few tokens are compared with
    those of the model with its adapter, with one block in memory at a time.  After a crash, ``out``
    contains either the whole model or nothing.

    Parameters
    ----------
    folder : path
        The folder of an adapter of peft, or of a run.  A model without an adapter is copied, with
        a note.
    out : path
        A folder that does not exist yet, or is empty.
    dtype : dtype or its name, optional
        float16, bfloat16, float32 or float64.  None: each weight has its dtype in the base model's
        file; quantized weights get the dtype of the embedding table, or stay quantized if the
        adapter was trained through their quantizer.
    base : path or name, optional
        The base model, in place of the base model in the adapter's config.
    progress : bool
        Show a progress bar on standard error, if that is a terminal.
    receipt : bool
        Whether to compare the folder with the model, as ``verify`` does, on two built-in prompts,
        and to store the result in verified.json.

    Returns
    -------
    report : Merged
        The size, the number of layers with adapters, and notes; prints as a few lines.

    Raises
    ------
    ConfigError
        A file is missing or broken; ``out`` is not empty; a weight is not finite or too large for
        ``dtype``; the disk is full; or the outputs of the new folder differ by more than rounding
        errors.
    """
    target = _new_folder(out)
    chosen = None if dtype is None else float_dtype("merge", dtype)
    wide = FLOAT32 if chosen is None else np.promote_types(chosen, FLOAT32)
    model = stored_model("merge", folder, base, wide)
    if model.adapter is not None:
        model.adapter.check_merges(model.homes)
    notes, kept = _notes(model), Kept()
    with replacing_files(target, "config.json", "merge") as partial:
        tokenizer_files = {each.name: each for each in _tokenizer_files(model)}
        for name, source in tokenizer_files.items():
            shutil.copyfile(source, partial / name)
        if not has_tokenizer(partial):
            notes.append(f"{model.folder} holds no tokenizer.json: copy one into {target}")
        others = any(home.computed for home in model.homes.values())
        into = None if model.adapter is None else model.adapter.into
        if into is not None and chosen is None:
            size, kind = _write_file_weights(model, into, partial, target, kept)
        elif model.adapter is None and chosen is None and not others:
            size, kind = _copy(model, partial, target), _stored_dtype(model)
        else:
            size, kind = _write(model, chosen, partial, target, progress, kept)
        if model.adapter is not None:
            main = chosen or model.homes[TABLE].dtype or FLOAT32
            before = probed(model, Transformer)
            after = probed(stored_model("merge", partial), Transformer)
            check_same("merge", before, after, explained(main), own_tokens(model.adapter))
        verified = checked(folder_side("merge", folder, base), partial) if receipt else None
        if verified is not None:
            write_receipt(partial / "verified.json", verified)
    layers = 0 if model.adapter is None else len(model.adapter.stored)
    if kept.share < ENOUGH:
        notes.append(f"{kept}; {kind} loses the rest, dtype='float32' preserves it")
    return Merged(target, size, layers, kind, tuple(notes), kept, verified)


def _new_folder(out: Any) -> Path:
    """Return the path of the new folder; raise if it exists and is not an empty folder."""
    path = path_of("merge(out=)", out)
    if path.suffix.lower() == ".gguf":
        cure = "pass a folder, and export that to a GGUF file"
        raise ConfigError(f"merge: {path} is the name of a file; {cure}")
    if path.exists() and not path.is_dir():
        raise ConfigError(f"merge: {path} is a file; name a new folder")
    if path.is_dir() and any(path.iterdir()):
        raise ConfigError(f"merge: {path} is not empty; name a new folder, or remove it first")
    return path


def _notes(model: StoredModel) -> list[str]:
    """Return the notes of the report."""
    notes, formats = [], formats_of(model.homes)
    if model.adapter is None:
        notes.append(f"{source_of(model.path)} holds no adapter: the output is a copy of the model")
    notes += [f"weights are dense here; the base has {formats}"] if formats else []
    own, whole = model.texts["config.json"], read_json(model.folder / "config.json")
    # these keys differ if the adapter's file holds other tables or another head
    others = ("vocab_size", "tie_word_embeddings", "architectures", *LABELS)
    if any(own.get(n) != whole.get(n) for n in own.keys() | whole.keys() if n not in others):
        notes.append("the part that reads images is left out: this is the language model")
    return notes


def _tokenizer_files(model: StoredModel) -> Iterator[Path]:
    """Yield the tokenizer's files: the adapter's, and the base's for those that are missing.

    The vocabulary comes from one folder.  A file of the base does not replace a chat template in
    the adapter's settings.
    """
    words = model.words
    for name in (*VOCABULARY, *AROUND):
        if (words / name).is_file():
            yield words / name
        elif name in AROUND and words != model.folder and (model.folder / name).is_file():
            own = read_json(words / SETTINGS) if (words / SETTINGS).is_file() else {}
            if name != TEMPLATE or not own.get("chat_template"):
                yield model.folder / name


def _copy(model: StoredModel, partial: Path, target: Path) -> int:
    """Copy the config and the weights of a model; return the size of the weights."""
    files = {file for home in model.homes.values() for file in home.files}
    size = sum((model.folder / file).stat().st_size for file in files)
    check_room("merge", target, size, "the model")
    for name in {"config.json": 0, GENERATION: 0, INDEX: 0, **model.texts, **dict.fromkeys(files)}:
        if (model.folder / name).is_file():
            (partial / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(model.folder / name, partial / name)
    return size


def _stored_dtype(model: StoredModel) -> str:
    """Return the kind of the quantized weights in a model's files, or else their dtype."""
    kind = stored_kind(model.texts["config.json"])
    return kind or (model.homes[TABLE].dtype or FLOAT32).name


def _write(
    model: StoredModel, chosen: Any, partial: Path, target: Path, progress: bool, kept: Kept
) -> tuple[int, str]:
    """Write config and merged weights; return the size of the weights and the dtype of matrices."""
    main = (chosen or model.homes[TABLE].dtype or FLOAT32).name
    layout: dict[str, dict[str, Unwritten]] = {}
    own = (home.file for home in model.homes.values() if not Path(home.file).is_absolute())
    first = next(own, SINGLE)
    experts = file_tensors(model.config, plain_names(model.homes))
    stacks: dict[str, Unwritten] = {}
    whole = lru_cache(maxsize=2)(lambda name: stacks[name].read())  # the two stacks of a layer
    for name, home in model.homes.items():
        if home.kind is Ternary:
            problem = f"merge: {name} is ternary, and its layer also rounds the input"
            raise ConfigError(f"{problem}, so it has no dense form; leave dtype out")
        dtype = chosen or home.dtype or np.dtype(main)
        if dtype in home.wide and home.dtype != dtype:
            dtype = FLOAT32
        read = _rounded(model, name, dtype, kept)
        file = first if Path(home.file).is_absolute() else home.file  # a table from the adapter
        layout.setdefault(file, {})[name] = Unwritten(dtype, home.shape, read)
        if name in experts:
            stacks[name] = layout[file].pop(name)
            parts = experts[name].items()
            layout[file] |= {n: _part(stacks[name], name, whole, place) for n, place in parts}
    size = sum(tensor.bytes for tensors in layout.values() for tensor in tensors.values())
    check_room("merge", target, size, "the model")
    config = saved_config(model.texts["config.json"], {}, main)
    config |= {} if {"dtype", "torch_dtype"} & config.keys() else {"dtype": main}
    texts: dict[str, Mapping[str, Any]] = {**model.texts, "config.json": config}
    if sum("/" not in file for file in layout) > 1:
        weights = {
            name: file for file, tensors in layout.items() for name in tensors if "/" not in file
        }
        texts[INDEX] = {"metadata": {"total_size": size}, "weight_map": weights}
    for name, values in texts.items():
        (partial / name).parent.mkdir(exist_ok=True)
        (partial / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    with ExitStack() as stack:
        written: Callable[[int], object] = id
        if progress and sys.stderr.isatty():
            from tqdm import tqdm

            bar = tqdm(total=size, desc=target.name, unit="B", unit_scale=True, dynamic_ncols=True)
            written = stack.enter_context(bar).update
        for file, tensors in layout.items():
            named = {
                model.homes[name].stored if "/" in file else name: tensors[name] for name in tensors
            }
            (partial / file).parent.mkdir(exist_ok=True)
            write_one_by_one(partial / file, named, written)
    return size, main


def _write_file_weights(
    model: StoredModel, into: Any, partial: Path, target: Path, kept: Kept
) -> tuple[int, str]:
    """Write config and the rounded weights of a trained adapter; return their size and kind.

    Weights are read one by one; all of them are in memory before they are written.
    """
    if not into.in_folder:
        cure = "unsloth-cupy export writes that file, or pass dtype= for a folder of its values"
        raise ConfigError(f"merge: the adapter was trained through {into.kind} of GGUF; {cure}")
    parameters, layout = dict[str, Any](), dict[str, list[str]]()
    own = (home.file for home in model.homes.values() if not Path(home.file).is_absolute())
    first = next(own, SINGLE)
    for name, home in model.homes.items():
        weight = model.read(name)
        if model.adapter is not None:
            weight = model.adapter.merge(name, weight, requantize=True, kept=kept)
        parameters[name] = weight
        file = first if Path(home.file).is_absolute() else home.file
        layout.setdefault(file, []).append(name)
    size = sum(each.nbytes for each in parameters.values())
    check_room("merge", target, size, "the model")
    whole = Transformer(model.config, parameters, model.texts, layout)
    whole.plain = plain_names(model.homes)
    whole.save(partial)
    return size, str(into.kind)


def _part(stack: Unwritten, name: str, whole: Callable[[str], Array], place: Place) -> Unwritten:
    """Return a tensor of the file that is a part, or another form, of a parameter."""
    return Unwritten(stack.dtype, place.shape or stack.shape, lambda: place.of(whole(name)))


def _rounded(
    model: StoredModel, name: str, dtype: "np.dtype[Any]", kept: Kept
) -> Callable[[], Array]:
    """Return a function that reads a parameter, merges its adapter and rounds the result."""
    stored = model.homes[name].dtype

    def read() -> Array:
        wide = np.promote_types(np.promote_types(FLOAT32, stored or FLOAT32), dtype)
        weight = model.merged(name, wide, exact=False)
        weight = weight.dequantize(wide) if isinstance(weight, Quantized) else weight
        with np.errstate(over="ignore"):
            rounded: Array = weight.astype(dtype, copy=False)
        if not np.isfinite(_most(rounded)):
            cure, most = "load a sound checkpoint", _most(weight)
            if np.isfinite(most):
                cure = f"{dtype} does not hold {most:g}; choose bfloat16 or float32"
            raise ConfigError(f"merge: {name} holds numbers that are not finite; {cure}")
        if rounded is not weight and model.adapter is not None and model.adapter.adds_to(name):
            kept.measure(name, model.read(name, wide), weight, rounded.__getitem__)
        return rounded

    return read


def _most(array: Array) -> float:
    """Return the largest magnitude; NaN or infinity if an element is not finite."""
    return max(float(array.max(initial=0)), -float(array.min(initial=0)))
