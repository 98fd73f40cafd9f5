"""Read and write checkpoint folders: config.json, generation_config.json, safetensors files.

The name, shape and dtype of every tensor are checked before any is used.  Pickles are never
opened, because they can run code.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from ...core.dtypes import FLOATS, Array
from ...errors import ConfigError
from ...files import of_library, path_of, read_json, regular, replacing_files
from ...machine import format_bytes
from ...ops.quantized.weight import Quantized
from ...placement import to_numpy
from ..configs import draft_heads
from ..configs.config import POOLER, Config
from ..configs.heads import OWN, Choice
from ..configs.names import HEAD, TABLE, parameter_name
from ..configs.text_configs import text_config
from ..gguf.finding import find_gguf_tensors
from ..gguf.opening import source_of
from ..gguf.reading import opened_gguf
from .expert_files import Place, in_file
from .expert_homes import DTYPES, ExpertHomes
from .foreign import Part, WeightParts
from .gptq import with_zeros
from .lazy_parameter import StoredTensor
from .other_weights import is_of_activations, method_of, part_in, stored_weight
from .quantized_weights import KEY, inverse_scales, part_of, tensors_of
from .tensor_file import check_parts, digests_in

MODULE = "_Dense"  # end of the folder of a Dense module
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
FLOAT8 = {
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
ROWS = 4096  # rows of tensors that are compared at a time
LONGEST = 500  # characters of a name; the longest names of known families have a fifth of it
HEADER = 1 << 23  # most bytes for names, shapes and offsets of a file's tensors

Layout = dict[str, list[str]]  # file -> names of the parameters in it
Quantizeds = dict[str, tuple[type[Quantized], dict[str, tuple[str, str]]]]  # class and parts


def find_tensors(
    folder: Path, config: Config, choice: Choice = OWN
) -> tuple[dict[str, StoredTensor], list[str]]:
    """Return where each parameter of a checkpoint is stored, in the config's order, and all files.

    Parameters of a chosen head may be absent.

    Raises
    ------
    ConfigError
        A file is missing or truncated; a tensor is missing or unexpected, does not have the shape
        that config.json implies, or does not have a float dtype.
    """
    if (source := source_of(folder)) != folder:
        return find_gguf_tensors(source, config, choice), [str(source)]
    homes: dict[str, StoredTensor] = {}
    files, shapes = _weight_files(folder), config.shapes()
    facts = text_config(read_json(folder / "config.json")).get(KEY) or {}
    method = method_of(facts)
    quantized = {} if method else _find_quantized(folder, files, config)
    others: WeightParts = {}
    experts = ExpertHomes(config)
    for file in files:
        _find(folder / file, config, homes, quantized, choice, method, others, experts)
    known = shapes | {HEAD: shapes[TABLE]} | experts.matrices
    facts, note = with_zeros(facts, others, partial(_read, folder))
    weights = {name: stored_weight(facts, name, known[name], each) for name, each in others.items()}
    if note:
        weights = {
            n: home._replace(format=f"{home.format} ({note})") for n, home in weights.items()
        }
    for name in experts.matrices.keys() & weights.keys():
        experts.add_quantized(folder, name, weights.pop(name))
    experts.add_to(folder, homes)
    table = homes.get(TABLE)
    for name, home in weights.items():
        if name in homes:
            part = min(others[name])
            problem = f"tensor {name!r} exists, and also the quantized part {part!r}"
            raise ConfigError(f"{folder}: {problem}; keep one")
        homes[name] = home._replace(dtype=FLOATS[2] if table is None else table.dtype)
    if config.tied and HEAD in homes:
        _check_tied(folder, homes)
    _find_modules(folder, config, homes)
    optional = {*homes, *choice.optional, *config.unused}
    optional |= {each for each in shapes if each.startswith(POOLER)} if choice.optional else set()
    if missing := [name for name in shapes if name not in optional]:
        more = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
        raise ConfigError(
            f"{folder}: tensor {missing[0]!r}{more} missing in {', '.join(files) or INDEX}; copy"
            " the checkpoint again, or correct config.json"
        )
    homes = experts.with_dtypes(homes)
    files = [*files, *(f"{module.path}/{SINGLE}" for module in config.modules)]
    return {name: homes[name] for name in shapes if name in homes}, files


def _find_modules(folder: Path, config: Config, homes: dict[str, StoredTensor]) -> None:
    """Add the parameters of Dense modules, each module in its own file, to ``homes``."""
    for module in config.modules:
        path, shapes = folder / module.path / SINGLE, module.shapes()
        with opened(path) as tensors:
            for stored in tensors.keys():  # noqa: SIM118 -- it is not a dict
                header, name = tensors.get_slice(stored), f"{module.path}.{stored}"
                shape, code = tuple(header.get_shape()), header.get_dtype()
                problem = f"is {code}; it must be {', '.join(DTYPES)}"
                if name not in shapes:
                    problem = "is not part of a Dense module with this config.json"
                elif shape != shapes[name]:
                    problem = f"has shape {shape}; config.json implies {shapes[name]}"
                elif code in DTYPES:
                    file = f"{module.path}/{SINGLE}"
                    homes[name] = StoredTensor(file, stored, shape, DTYPES[code])
                    continue
                raise ConfigError(f"{path}: tensor {stored!r} {problem}")


def file_of_module(name: str) -> tuple[str, str] | None:
    """Return the file and the tensor of a Dense module's parameter; None: another parameter."""
    path, _, stored = name.partition(".")
    return (f"{path}/{SINGLE}", stored) if path.endswith(MODULE) else None


def tensor_files(folder: Path) -> dict[str, str]:
    """Return the file of each tensor of a folder, by name; none if they cannot be read."""
    files: dict[str, str] = {}
    with suppress(ConfigError):
        for file in _weight_files(folder):
            with opened(folder / file) as tensors:
                files |= dict.fromkeys(tensors.keys(), file)
    return files


def tensor_names(folder: Path) -> set[str]:
    """Return the names of the tensors in a folder's files; none if they cannot be read."""
    return {*tensor_files(folder)}


def with_heads_of(folder: Path, config: Config) -> Config:
    """Return a config with the draft heads that a folder's files hold: see ``draft_heads``."""
    if not config.draft and draft_heads.MTP not in config.left_out:
        return config  # files are not opened
    every = tensor_files(folder)
    named = {parameter_name(stored) or "": (stored, file) for stored, file in every.items()}
    config = draft_heads.found(config, named)
    own = {draft_heads.in_memory(config, name): place for name, place in named.items()}
    listed = draft_heads.copies(replace(config, draft_copies=config.draft_tables))
    pairs = ((each, table) for table, names in listed.items() for each in names)
    same = [each for each, table in pairs if _are_equal(folder, own[each], own.get(table))]
    left = tuple(name for name in config.draft_tables if name not in same)
    return replace(config, draft_tables=left, draft_copies=tuple(same))


def _are_equal(folder: Path, first: tuple[str, str], second: tuple[str, str] | None) -> bool:
    """Return whether two tensors, (name, file) each, have equal values."""
    if second is None:
        return False
    with opened(folder / first[1]) as one, opened(folder / second[1]) as other:
        parts = one.get_slice(first[0]), other.get_slice(second[0])
        sizes, codes = zip(*((p.get_shape(), p.get_dtype()) for p in parts), strict=True)
        if sizes[0] != sizes[1] or codes[0] != codes[1]:
            return False
        starts = range(0, sizes[0][0], ROWS)
        slices = (slice(row, min(row + ROWS, sizes[0][0])) for row in starts)
        return all(np.array_equal(*(part[rows] for part in parts)) for rows in slices)


def _check_tied(folder: Path, homes: dict[str, StoredTensor]) -> None:
    """Use a tied model's head as its table if the table is missing; raise if they differ."""
    head, table = homes[HEAD], homes.setdefault(TABLE, homes[HEAD])
    if head is table or None in (head.dtype, table.dtype) or head.dense or table.dense:
        return
    if not _are_equal(folder, (head.stored, head.file), (table.stored, table.file)):
        problem = f"{head.stored!r} is not equal to {table.stored!r}"
        cure = 'write "tie_word_embeddings": false there'
        raise ConfigError(f"{folder}: {problem}, though config.json ties them; {cure}")


def _read(folder: Path, part: Part) -> Array:
    """Return a tensor of a checkpoint."""
    with opened(folder / part.file) as tensors:
        whole: Array = tensors.get_tensor(part.stored)
        return whole


def _find_quantized(folder: Path, files: Sequence[str], config: Config) -> Quantizeds:
    """Return the class and the places of the tensors of each quantized weight."""
    weights: Quantizeds = {}
    shapes = config.shapes()
    for file in files:
        with opened(folder / file) as tensors:
            for stored in tensors.keys():  # noqa: SIM118 -- it is not a dict
                part = part_of(draft_heads.in_memory(config, parameter_name(stored) or ""), shapes)
                if part is not None:
                    parts = weights.setdefault(part.parameter, (part.kind, {}))[1]
                    parts[part.key] = file, stored
    return weights


def _find(
    path: Path,
    config: Config,
    homes: dict[str, StoredTensor],
    quantized: Quantizeds,
    choice: Choice,
    method: Any,
    others: WeightParts,
    experts: ExpertHomes,
) -> None:
    """Add every tensor of a file to ``homes``; raise at the first that the model does not have.

    A tied model's head is added too: files may hold only the head, or head and table.  Parts of
    weights that other programs quantized are added to ``others``.
    """
    shapes = config.shapes()
    shapes |= {HEAD: shapes[TABLE]}
    matrices = shapes | experts.matrices
    with opened(path) as tensors:
        for stored in tensors.keys():  # noqa: SIM118 -- it is not a dict
            name = draft_heads.in_memory(config, parameter_name(stored) or "")
            # ``with_heads_of`` has compared copies
            unread = choice.unread | {*config.draft_copies}
            if not name or name in unread or re.match(config.left_out or "$", name):
                continue
            is_part = method is None and part_of(name, shapes) is not None
            if (
                is_part
                or is_of_activations(method, name, matrices)
                or (
                    name not in shapes
                    and (
                        name in choice.optional
                        or (method == "gptq" and _is_zero_bias(tensors, stored, name, matrices))
                    )
                )
            ):
                continue
            header = tensors.get_slice(stored)
            shape, code = tuple(header.get_shape()), header.get_dtype()
            if (other := part_in(method, name, code, matrices)) is not None:
                part = Part(path.name, stored, shape, code)
                first = others.setdefault(other[0], {}).setdefault(other[1], part)
                if first is not part:
                    where = f"is also in {first.file}; keep one"
                    raise ConfigError(f"{path}: tensor {stored!r} {where}")
                continue
            if experts.add(path, stored, name, shape, code):
                continue
            problem = None
            if name not in shapes:
                problem = f"is not part of the {config.model_type} that config.json describes"
            elif name in homes:
                problem = f"is also in {homes[name].file}; keep one"
            elif name in quantized:
                location = path.name, stored, shapes[name], None, *quantized[name]
                homes[name] = StoredTensor(*location, config.inverse_scales)
                continue
            elif shape != shapes[name]:
                problem = f"has shape {shape}; config.json implies {shapes[name]}"
            elif code not in DTYPES:
                problem = f"is {code}; it must be {', '.join(DTYPES)}"
            if problem:
                raise ConfigError(f"{path}: tensor {stored!r} {problem}")
            home = StoredTensor(path.name, stored, shape, DTYPES[code], wide=config.widened(name))
            homes[name] = home


def _is_zero_bias(tensors: Any, stored: str, name: str, shapes: Mapping[str, Any]) -> bool:
    """Return whether a tensor is the zero bias that AutoGPTQ adds to layers without a bias."""
    layer = name.removesuffix("bias")
    return layer != name and f"{layer}weight" in shapes and not tensors.get_tensor(stored).any()


def write_folder(
    path: str | PathLike[str],
    texts: Mapping[str, Mapping[str, Any]],
    parameters: Mapping[str, Array],
    layout: Layout,
    metadata: Mapping[str, str] = MappingProxyType({}),
    experts: Mapping[str, Mapping[str, Place]] = MappingProxyType({}),
    check: Callable[[Path], None] | None = None,
) -> None:
    """Write a checkpoint atomically: after a crash the folder holds the old or the new one.

    ``texts`` are the JSON files by name; the first is the config.  A folder that exists keeps its
    other files, such as a tokenizer.  ``experts`` are the tensors that each parameter of a mixture
    is written as.  ``check`` may raise for the new files before they replace old ones.

    Raises
    ------
    ConfigError
        The folder holds weights in other files, which would mix with these in one checkpoint.
    """
    folder = path_of("save", path)
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"save: {folder} is a file; pass a folder")
    inverse = inverse_scales(next(iter(texts.values())))

    def tensors_in_file(name: str) -> dict[str, Any]:
        value: Any = parameters[name]
        if (place := file_of_module(name)) is not None:
            return {place[1]: value}
        own = experts.get(name)
        if own is not None and _is_renamed(value, own):
            return tensors_of(next(iter(own)), value, inverse)
        if own is not None and value.ndim == 2 and isinstance(value, Quantized):
            problem = f"the folder stores {name} as {min(own)}, which is not quantized"
            raise ConfigError(f"save: {problem}; save the dense model, and pass quantize to load")
        return tensors_of(name, value, inverse) if own is None else in_file(value, own)

    layout = with_modules(layout)
    if sum("/" not in file for file in layout) > 1:
        pairs = (
            (name, file) for file, names in layout.items() for name in names if "/" not in file
        )
        weights = {
            part: file
            for name, file in pairs
            for part in (
                tensors_in_file(name)
                if name not in experts or _is_renamed(parameters[name], experts[name])
                else experts[name]
            )
        }
        size = sum(array.nbytes for array in parameters.values())
        index = {"metadata": {"total_size": size}, "weight_map": weights}
        texts = {**texts, INDEX: index}
    with replacing_files(folder, next(iter(texts)), "save") as temporary:
        other_files = {p.name for p in folder.glob("*.safetensors*")} - {*layout, *texts}
        if other_files:
            listed = ", ".join(sorted(other_files))
            raise ConfigError(f"save: {folder} already holds {listed}; pass an empty folder")
        for file, names in layout.items():
            parts = [tensors_in_file(name) for name in names]
            named = {name: array for part in parts for name, array in part.items()}
            tensors = {name: np.asarray(to_numpy(a), order="C") for name, a in named.items()}
            (temporary / file).parent.mkdir(exist_ok=True)
            write_tensors(temporary / file, tensors, metadata)
        for file, values in texts.items():
            (temporary / file).parent.mkdir(exist_ok=True)
            (temporary / file).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
        if check is not None:
            check(temporary)


def with_modules(layout: Layout) -> Layout:
    """Return a layout in which the parameters of Dense modules are in files of their own."""
    result: Layout = {file: [] for file in layout}
    for file, names in layout.items():
        for name in names:
            place = file_of_module(name)
            result.setdefault(file if place is None else place[0], []).append(name)
    return {file: names for file, names in result.items() if names}


def _is_renamed(value: Any, own: Mapping[str, Place]) -> bool:
    """Return whether a quantized weight is written as its parts, under another name."""
    return isinstance(value, Quantized) and [each.renamed for each in own.values()] == [True]


def write_tensors(
    path: Path, tensors: dict[str, Array], metadata: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Write a safetensors file; raise a ConfigError if that fails, as on a full disk."""
    try:
        safetensors.numpy.save_file(tensors, path, metadata={"format": "pt", **metadata})
    except safetensors.SafetensorError as error:
        raise ConfigError(f"{path} cannot be written: {error}; make room on its disk") from None


def _weight_files(folder: Path) -> list[str]:
    """Return the names of the safetensors files of a checkpoint.

    As in transformers, a single file has priority over an index, which may be of an earlier save.
    """
    single, values = (folder / SINGLE).exists(), dict[str, Any]()
    if (folder / INDEX).exists():
        with suppress(*(ConfigError,) * single):
            values = read_json(folder / INDEX)
    digests = digests_in(values)
    if single and not digests:
        return [SINGLE]
    if (folder / INDEX).exists():
        weights = values.get("weight_map")
        if not isinstance(weights, dict) or not all(isinstance(f, str) for f in weights.values()):
            raise ConfigError(f"{folder / INDEX}: weight_map must map tensors to file names")
        files = sorted(set(weights.values()))
        for file in files:
            if Path(file).name != file or not file.endswith(".safetensors"):
                problem = "is not the name of a safetensors file in this folder"
                raise ConfigError(f"{folder / INDEX}: {file!r} {problem}")
        if digests:
            check_parts(folder / INDEX, digests, files, opened)
        return files
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
    """Open a safetensors or GGUF file; raise a ConfigError that names a missing or broken one."""
    if path.suffix == ".gguf":
        yield opened_gguf(path)
        return
    try:
        _check_header(regular(path))
        stream = safetensors.safe_open(path, framework="np")
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing; download or copy it again") from None
    except BaseException as error:
        if isinstance(error, ConfigError) or not of_library(error):
            raise
        raise ConfigError(f"{path} is truncated or broken ({error}); copy it again") from None
    with stream as tensors:
        _check_names(path, tensors)
        yield Tensors(path, tensors)


class Tensors:
    """An open safetensors file that also reads float8 tensors, unlike safetensors for NumPy."""

    def __init__(self, path: Path, stream: Any) -> None:
        self._path, self._stream = path, stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def get_tensor(self, name: str) -> Array:
        """Return a whole tensor."""
        dtype = FLOAT8.get(self._stream.get_slice(name).get_dtype())
        if dtype is None:
            whole: Array = self._stream.get_tensor(name)
            return whole
        with self._path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            facts = json.loads(file.read(size))[name]
            first, last = facts["data_offsets"]
            file.seek(8 + size + first)
            return np.frombuffer(file.read(last - first), dtype).reshape(facts["shape"])


def _check_header(path: Path) -> None:
    """Raise a ConfigError for a file whose header is larger than any model's."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
    if HEADER < size <= path.stat().st_size:
        problem = f"a header of {format_bytes(size)} is larger than any model's"
        raise ConfigError(f"{path}: {problem}; copy the file again")


def _check_names(path: Path, tensors: Any) -> None:
    """Raise a ConfigError for the name of a tensor that is longer than any module's."""
    for name in tensors.keys():  # noqa: SIM118 -- it is not a dict
        if len(name) > LONGEST:
            problem = f"the name of a tensor has {len(name):,} characters: {name[:40]!r}..."
            raise ConfigError(f"{path}: {problem}; copy the file again")


def check_mixture(folder: Path, homes: Mapping[str, StoredTensor]) -> None:
    """Raise unless all tensors have one dtype; only norms may be float32 among 16-bit tensors."""
    main = homes[TABLE].dtype
    for name, home in homes.items():
        if home.dtype is None:
            continue
        narrow = not (home.wide or name.endswith("norm.weight"))
        if home.dtype != main and (narrow or home.dtype != FLOATS[2]):
            raise ConfigError(
                f"{folder / home.file}: tensor {home.stored!r} is {home.dtype} among {main};"
                " choose one for all, as in load(folder, dtype='float32')"
            )
