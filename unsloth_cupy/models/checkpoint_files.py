"""Checkpoint folders: config.json, generation_config.json and safetensors files, nothing else.

Every tensor's name, shape and dtype is checked before one is used.  Pickles are never opened:
they can run code.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from ..core.dtypes import BFLOAT16, FLOATS, Array
from ..errors import ConfigError
from ..files import path_of, read_json, renewed
from ..ops.quantized.weight import Quantized
from ..placement import to_numpy
from .config import Config
from .quantized_weights import inverse_scales, part_of, tensors_of
from .unread import Home, Unread

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    "F16": np.dtype("float16"),
    "BF16": BFLOAT16,
    "F32": np.dtype("float32"),
    "F64": np.dtype("float64"),
}
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
# Gemma 3 with eyes: its language model goes by other names, and its eyes stay behind.
RENAMED = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
LEFT_OUT = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.|.*rotary_emb\.inv_freq$")

Layout = dict[str, list[str]]  # file -> names of the parameters in it
Quantizeds = dict[str, tuple[type[Quantized], dict[str, tuple[str, str]]]]  # class and parts


def read_tensors(
    folder: Path,
    homes: Mapping[str, Home],
    files: Sequence[str],
    dtype: np.dtype[Any] | None,
    keep: Callable[[str, Unread], Any],
    holds: Callable[[str], bool],
) -> tuple[dict[str, Any], Layout]:
    """Return the parameters that ``find_tensors`` has found, and which file holds which.

    ``keep`` reads what is kept of each one: none waits for the others; those that ``holds`` says no
    to are not read at all.

    Raises
    ------
    ConfigError
        Their dtypes differ, and ``dtype`` chooses none.
    """
    if dtype is None:
        _check_mixture(folder, homes)
    parameters: dict[str, Any] = {}
    layout: Layout = {file: [name for name in homes if homes[name].file == file] for file in files}
    with ExitStack() as stack:
        handles = {file: stack.enter_context(opened(folder / file)) for file in files}
        for name in (name for names in layout.values() for name in names if holds(name)):
            parameters[name] = keep(name, Unread(name, homes[name], handles, dtype))
    return {name: parameters[name] for name in homes if name in parameters}, layout


def find_tensors(folder: Path, config: Config) -> tuple[dict[str, Home], list[str]]:
    """Return where each parameter of a checkpoint is, in the config's order, and all its files.

    Raises
    ------
    ConfigError
        A file is missing or truncated; a tensor is missing, unexpected, of another shape than
        config.json says, or of a dtype that is not a float.
    """
    homes: dict[str, Home] = {}
    files, shapes = _weight_files(folder), config.shapes()
    quantized = _find_quantized(folder, files, shapes)
    for file in files:
        _find(folder / file, config, homes, quantized)
    if missing := [name for name in shapes if name not in homes]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ConfigError(
            f"{folder}: tensor {missing[0]!r}{more} is missing in {', '.join(files)}; copy the"
            " checkpoint again, or correct config.json"
        )
    return {name: homes[name] for name in shapes}, files


def _find_quantized(folder: Path, files: Sequence[str], shapes: Mapping[str, Any]) -> Quantizeds:
    """Return the quantized weights of a checkpoint: their class, and where their parts are."""
    found: Quantizeds = {}
    for file in files:
        with opened(folder / file) as tensors:
            for stored in tensors.keys():  # noqa: SIM118 -- it is not a dict
                part = part_of(_renamed(stored), shapes)
                if part is not None:
                    parts = found.setdefault(part.parameter, (part.kind, {}))[1]
                    parts[part.key] = file, stored
    return found


def _find(path: Path, config: Config, homes: dict[str, Home], quantized: Quantizeds) -> None:
    """Enter every tensor of a file into homes, or raise at the first that does not belong."""
    shapes = config.shapes()
    with opened(path) as tensors:
        for stored in tensors.keys():  # noqa: SIM118 -- it is not a dict
            name = _renamed(stored)
            if LEFT_OUT.match(stored) or (config.tied and name == "lm_head.weight"):
                continue
            part = tensors.get_slice(stored)
            shape, code = tuple(part.get_shape()), part.get_dtype()
            problem = None
            if part_of(name, shapes) is not None:
                continue
            if name not in shapes:
                problem = f"is not part of the {config.model_type} that config.json describes"
            elif name in homes:
                problem = f"is also in {homes[name].file}; keep one"
            elif name in quantized:
                where = path.name, stored, shapes[name], None, *quantized[name]
                homes[name] = Home(*where, config.inverse_scales)
                continue
            elif shape != shapes[name]:
                problem = f"has shape {shape}; config.json asks for {shapes[name]}"
            elif code not in DTYPES:
                problem = f"is {code}; it must be {', '.join(DTYPES)}"
            if problem:
                raise ConfigError(f"{path}: tensor {stored!r} {problem}")
            homes[name] = Home(path.name, stored, shape, DTYPES[code])


def write_folder(
    given: str | PathLike[str],
    texts: Mapping[str, Mapping[str, Any]],
    parameters: Mapping[str, Array],
    layout: Layout,
) -> None:
    """Write a checkpoint, whose first text is its config: a crash leaves the old or the new.

    A folder that exists keeps its other files (a tokenizer).

    Raises
    ------
    ConfigError
        The folder holds weights in other files: together they would be no checkpoint.
    """
    folder = path_of("save", given)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"save: {folder} is a file; pass a folder")
    inverse = inverse_scales(next(iter(texts.values())))
    if len(layout) > 1:
        homes = ((name, file) for file, names in layout.items() for name in names)
        weights = {
            part: file
            for name, file in homes
            for part in tensors_of(name, parameters[name], inverse)
        }
        size = sum(array.nbytes for array in parameters.values())
        index = {"metadata": {"total_size": size}, "weight_map": weights}
        texts = {**texts, INDEX: index}
    with renewed(folder, key=next(iter(texts))) as beside:
        strangers = {p.name for p in folder.glob("*.safetensors*")} - {*layout, *texts}
        if strangers:
            listed = ", ".join(sorted(strangers))
            raise ConfigError(f"save: {folder} already holds {listed}; pass an empty folder")
        for file, names in layout.items():
            parts = [tensors_of(name, parameters[name], inverse) for name in names]
            named = {name: array for part in parts for name, array in part.items()}
            tensors = {name: np.ascontiguousarray(to_numpy(a)) for name, a in named.items()}
            write_tensors(beside / file, tensors)
        for file, values in texts.items():
            (beside / file).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def write_tensors(path: Path, tensors: dict[str, Array]) -> None:
    """Write a safetensors file, or raise a ConfigError: the disk may be full."""
    try:
        safetensors.numpy.save_file(tensors, path, metadata={"format": "pt"})
    except safetensors.SafetensorError as error:
        raise ConfigError(f"{path} cannot be written: {error}; make room on its disk") from None


def _weight_files(folder: Path) -> list[str]:
    """Return the names of the safetensors files of a checkpoint."""
    if (folder / INDEX).exists():
        weights = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weights, dict) or not all(isinstance(f, str) for f in weights.values()):
            raise ConfigError(f"{folder / INDEX}: weight_map must map tensors to file names")
        files = sorted(set(weights.values()))
        for file in files:
            if Path(file).name != file or not file.endswith(".safetensors"):
                raise ConfigError(f"{folder / INDEX}: {file!r} is not a safetensors file beside it")
        return files
    if (folder / SINGLE).exists():
        return [SINGLE]
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    files = [file for file in files if not file.startswith("adapter_")]
    if files:
        return files
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        raise ConfigError(
            f"{folder} holds only {', '.join(pickles)}; pickled weights can run code and are never"
            " read: store them as safetensors (in transformers: model.save_pretrained(folder))"
        )
    raise ConfigError(f"{folder} holds no *.safetensors file; pass the folder of a checkpoint")


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file, or say which one is missing or broken."""
    try:
        stream = safetensors.safe_open(path, framework="np")
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing; download or copy it again") from None
    except (safetensors.SafetensorError, OSError) as error:
        raise ConfigError(f"{path} is truncated or broken ({error}); copy it again") from None
    with stream as tensors:
        yield tensors


def _renamed(stored: str) -> str:
    for prefix, plain in RENAMED:
        if stored.startswith(prefix):
            return plain + stored.removeprefix(prefix)
    return stored


def _check_mixture(folder: Path, homes: Mapping[str, Home]) -> None:
    """Raise unless all tensors have one dtype; norms alone may be float32 beside 16 bits."""
    main = homes["model.embed_tokens.weight"].dtype
    for name, home in homes.items():
        if home.dtype is None:
            continue
        if home.dtype != main and not (name.endswith("norm.weight") and home.dtype == FLOATS[2]):
            raise ConfigError(
                f"{folder / home.file}: tensor {home.stored!r} is {home.dtype} among {main};"
                " choose one for all, as in load(folder, dtype='float32')"
            )
