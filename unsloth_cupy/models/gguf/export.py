"""Export of a model and its tokenizer to one GGUF file: ``export_gguf``."""

import contextlib
import functools
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.call import check_options, in_any_case, is_integer
from ...core.dtypes import FLOAT32, Array
from ...errors import ConfigError
from ...files import atomic_path, check_room, path_of
from ...machine import format_bytes
from ...ops.common.checks import check_choice
from ...ops.quantized.blocks import Blocks
from ...ops.quantized.weight import Quantized
from ...placement import to_numpy
from ..adapters.adapter import Adapter, module_of
from ..adapters.kept import ENOUGH, Kept
from ..adapters.probe import (
    Probed,
    check_same,
    check_written,
    dense,
    held,
    own_tokens,
    probed,
    wide,
)  # fmt: skip
from ..configs.config import Config
from ..configs.heads import CAUSAL, NONE, OWN, require_head
from ..configs.names import is_stack
from ..configs.reading import token_ids
from ..folders.lazy_parameter import LazyParameter
from ..folders.pooling import pooling_of
from ..folders.stored import stored_model
from ..transformer import Transformer
from ..verifying.receipt import BYTES, KEY, checked, fill_in, in_words, write_receipt
from ..verifying.sides import Side
from ..verifying.verify import Verification
from . import POOLINGS, TYPES
from .finding import find_gguf_tensors
from .packed import TYPES_OF_STACKS
from .reading import AS_STORED, opened_gguf

if TYPE_CHECKING:
    from ._families import Architecture
    from ._tensors import Tensor
    from ._types import Read

KEYS = 1 << 20  # upper bound of the bytes of keys and names, besides tensors and tokens
OTHER_FORMATS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".onnx", ".npz", ".h5")
SHOWN = 3  # most names in a note
PARTS_ELSEWHERE = {"magnitude_vector": "DoRA's norms", "B.bias": "biases"}


@dataclass(frozen=True)
class Export:
    """A report about the file that ``export_gguf`` wrote.

    Attributes
    ----------
    file : Path
    bytes : int
        Size of the file.
    types : dict of str to int
        Number of tensors of each type.
    notes : tuple of str
        Differences between llama.cpp and this model, and tensors whose rows are not whole blocks.
    kept : Kept
        The share of an adapter's change that remains after rounding: ``kept.share`` in all, and
        ``kept.layers`` for each tensor.
    verified : Verification or str or None
        The comparison of the file with the model, or why there is none; None without ``receipt``.
    """

    file: Path
    bytes: int
    types: Mapping[str, int]
    notes: tuple[str, ...]
    kept: Kept
    verified: Verification | str | None = None

    def __str__(self) -> str:
        types = ", ".join(f"{number} {name}" for name, number in self.types.items())
        line = f"{self.file}: {format_bytes(self.bytes)}, tensors: {types}"
        line += f"; {self.kept}" * bool(self.kept.layers)
        last = [] if self.verified is None else [in_words(self.verified)]
        return "\n".join([line, *(f"note: {note}" for note in self.notes), *last])


@dataclass(frozen=True)
class Source:
    """A model to export: its config, functions that read a parameter, the tokenizer's folder."""

    config: Config
    texts: Mapping[str, Mapping[str, Any]]
    read: "Read"  # with the adapter merged
    plain: "Read"  # without the adapter
    adapter: Adapter | None
    folder: Path | None
    name: str
    probed: Probed  # the model with its adapter not merged
    kind: str = "f16"
    exact: bool = True  # whether ``read`` returns weights before rounding
    packed: Mapping[str, str] = field(default_factory=dict)  # types of stacks that stay packed


@check_options
def export_gguf(
    model: Transformer | str | PathLike[str],
    file: str | PathLike[str],
    *,
    kind: str | None = None,
    tokenizer: str | PathLike[str] | None = None,
    base: str | PathLike[str] | None = None,
    stop: int | None = None,
    progress: bool = False,
    receipt: bool = False,
) -> Export:
    """Write a model with its tokenizer to a GGUF file for llama.cpp and its relatives.

    Adapters are merged into the weights.  Vectors and norms are float32.  A tensor whose rows are
    not whole blocks of its type has a type with smaller blocks, or float16, and a note is added.
    With tq1_0 and tq2_0, embedding table and head are float16.  Tensors are read and written one by
    one to a temporary file, which is renamed when it is complete.

    Parameters
    ----------
    model : Transformer or path
        A model; or the folder of a model, an adapter or a run.  From a folder, only one tensor is
        in memory at a time.
    file : path
        A new file, NAME.gguf.
    kind : str
        f32, f16, bf16, q8_0 (8.5 bits per weight), q6_k (6.56), q5_k_m, q5_k_s (5.5 and more), q5_1
        (6), q5_0 (5.5), q4_k_m, q4_k_s (4.5 and more), q4_1 (5), q4_0 (4.5), q3_k_l, q3_k_m, q3_k_s
        (3.44 and more), q2_k (2.63 and more), tq1_0 (1.69) or tq2_0 (2.06).  Kinds with _m, _l or
        _s are llama.cpp's mixtures: some tensors have more bits.  tq1_0 and tq2_0 store -1, 0 or 1
        and a scale per 256 weights, for BitNet models.  None: the kind through which an adapter was
        trained (``merge_into``), otherwise f16.
    tokenizer : path, optional
        The folder of the tokenizer: tokenizer.json and, if they exist, tokenizer_config.json and
        chat_template.jinja.  None: the folder of the model.
    base : path or name, optional
        The base model of an adapter's folder, instead of the one that the adapter names.
    stop : int, optional
        The token that ends an answer in a chat (end of turn).  None: a token in the chat template
        that llama.cpp recognizes, such as ``<|im_end|>``, in addition to those in
        generation_config.json.
    progress : bool
        Whether to show a progress bar on standard error, if it is a terminal.
    receipt : bool
        Whether to compare the file with the model, as ``verify`` does, on two built-in prompts, and
        to store the result in the key unsloth_cupy.verified and in NAME.verified.json.

    Returns
    -------
    report : Export
        Size, types of tensors and notes; it prints as a few lines.

    Raises
    ------
    ConfigError
        The package gguf is missing; GGUF or llama.cpp does not support the family, its settings or
        the tokenizer; the file exists; a weight is not finite or too large for ``kind``; or the
        disk is full.
    """
    call = "export_gguf"
    _check_packages(call)
    from ._families import architecture, warnings_of
    from ._metadata import metadata
    from ._tensors import tensors
    from ._tokenizer import tokenizer as tokenizer_values
    from ._types import KINDS

    path = _new_file(call, file)
    if kind is not None:
        kind = in_any_case(kind, TYPES)
        check_choice(call, "kind", kind, TYPES)
    source = _source(call, model, tokenizer, base, kind)
    kind = source.kind
    require_head(call, source.config, CAUSAL if source.config.causal else NONE)
    if stop is not None and not is_integer(stop, 0):
        raise ConfigError(f"{call}(stop={stop!r}): pass a token, or None")
    known = architecture(call, source.config)
    begin = next(iter(token_ids("bos_token_id", source.texts["config.json"])), None)
    words, notes = tokenizer_values(_tokenizer_folder(source), source.config, begin, stop)
    tensors_of = functools.partial(
        tensors, call, source.config, known, KINDS[kind], packed=source.packed
    )
    tensor_list, kept = tensors_of(source.read), Kept()
    plain = tensors_of(source.plain) if source.adapter else []
    before = {t.name: t.read for t in plain if source.adapter and source.adapter.adds_to(t.stored)}
    notes = [*warnings_of(source.config, known), *notes, *_stand_ins(tensor_list)]
    values = {
        "general.type": "model",
        "general.name": _name(source.name, words["tokenizer.ggml.tokens"]),
        "general.file_type": int(KINDS[kind].file_type),
        **metadata(source.config, known, source.read),
        **words,
        **_pooling(source, known.name),
        **({KEY: " " * BYTES} if receipt else {}),
    }
    rounded = source.adapter is not None and source.adapter.into is not None
    check = None if source.adapter is None else functools.partial(_check_file, source, known)
    results = list[Verification | str]()

    def compared(file: Path) -> None:
        results.append(result := checked(_trained(source), file))
        fill_in(file, result)

    how: Any = {"used": rounded, "check": check, "last": compared if receipt else None}
    _write(call, path, known.name, values, tensor_list, progress, before, kept, **how)
    for result in results:
        write_receipt(path.with_suffix(".verified.json"), result)
    if kept.share < ENOUGH:
        notes.append(f"{kept}; {kind} rounds the rest away; f16 or f32 would preserve more")
    types = Counter(tensor.type.name.lower() for tensor in tensor_list)
    verified = next(iter(results), None)
    return Export(path, path.stat().st_size, dict(types), tuple(notes), kept, verified)


@check_options
def export_adapter_gguf(
    model: Transformer | str | PathLike[str],
    file: str | PathLike[str],
    *,
    kind: str = "f16",
    base: str | PathLike[str] | None = None,
) -> Export:
    """Write an adapter to a GGUF file, which llama.cpp adds to the file of its base.

    ``llama-cli -m base.gguf --lora file.gguf`` runs the base with the adapter.  A and B have the
    same order of rows as the file of the base.

    Parameters
    ----------
    model : Transformer or path
        A model with an adapter, or the folder of an adapter or of a run.
    file : path
        A new file, NAME.gguf.
    kind : str
        f32, f16 or bf16.
    base : path or name, optional
        The base model of an adapter's folder, instead of the one that the adapter names.

    Returns
    -------
    report : Export

    Raises
    ------
    ConfigError
        There is no adapter; llama.cpp does not support it (DoRA, biases, tokens, or weights outside
        of the blocks); or as in ``export_gguf``.
    """
    call = "export_adapter_gguf"
    _check_packages(call)
    from ._families import architecture, warnings_of
    from ._tensors import adapter_tensors
    from ._types import KINDS

    path = _new_file(call, file)
    kind = in_any_case(kind, TYPES)
    check_choice(call, "kind", kind, ("f32", "f16", "bf16"))
    source = _source(call, model, None, base)
    adapter, known = source.adapter, architecture(call, source.config)
    if adapter is not None and adapter.into is not None:
        problem = f"this adapter was trained through {adapter.into.kind}"
        problem += f", but llama.cpp would add it to weights that are not {adapter.into.kind}"
        raise ConfigError(f"{call}: {problem}; export_gguf merges it into the weights")
    if adapter is None:
        raise ConfigError(f"{call}: the model has no adapter; export_gguf writes a model")
    require_head(call, source.config, CAUSAL, NONE)
    if adapter.stacks:
        problem = f"adapters of experts, such as {min(adapter.stacks)}, cannot be written alone"
        raise ConfigError(f"{call}: {problem}; export_gguf merges it into the weights")
    parts = {PARTS_ELSEWHERE.get(name.rpartition(".lora_")[2]) for name in adapter.parameters}
    where = {name: " as a whole" * (".layers." in name) for name in adapter.outer}
    parts |= {module_of(n) + (each or " outside of the blocks") for n, each in where.items()}
    if parts := {each for each in parts if each}:
        cure = "export_gguf merges it into the weights"
        raise ConfigError(f"{call}: llama.cpp does not add {min(parts)}; {cure}")
    tensor_list, alpha = adapter_tensors(call, source.config, known, KINDS[kind].type, adapter)
    values = {
        "general.type": "adapter",
        "general.name": source.name,
        "general.file_type": int(KINDS[kind].file_type),
        "adapter.type": "lora",
        "adapter.lora.alpha": alpha,
    }
    _write(call, path, known.name, values, tensor_list, False, {}, Kept())
    types = Counter(tensor.type.name.lower() for tensor in tensor_list)
    notes = tuple(warnings_of(source.config, known))
    return Export(path, path.stat().st_size, dict(types), notes, Kept())


def check_tokenizer(call: str, folder: Path, config: Config) -> None:
    """Raise a ConfigError if llama.cpp does not support the tokenizer in a folder."""
    from ._tokenizer import tokenizer

    try:
        tokenizer(folder, config, None)
    except ConfigError as error:
        raise ConfigError(f"{call}: {error}") from None


def why_no_file(config: Config) -> str:
    """Return the reason why GGUF cannot describe a model; "" if it can."""
    from ._families import architecture

    try:
        architecture("", config)
    except ConfigError as error:
        return str(error).removeprefix(": ")
    return ""


def _check_packages(call: str) -> None:
    """Raise a ConfigError if a package of the extra "gguf" is missing."""
    try:
        import gguf  # noqa: F401
        import tokenizers  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{call} needs the package {error.name}; install it with"
            " pip install 'unsloth_cupy[gguf]'"
        ) from None


def _new_file(call: str, file: Any) -> Path:
    """Return the path of the new file; raise if it exists, or if its folder or suffix is wrong."""
    path = path_of(f"{call}(file=)", file)
    if path.suffix.lower() in OTHER_FORMATS:
        cure = f"end its name with .gguf: {path.with_suffix('.gguf').name}"
        raise ConfigError(f"{call}: {path} would be a GGUF file with another suffix; {cure}")
    if path.exists():
        raise ConfigError(f"{call}: {path} exists; remove it, or name another file")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{call}: {path.parent} is not a folder; create it first")
    return path


def _source(call: str, model: Any, tokenizer: Any, base: Any, kind: str | None = None) -> Source:
    """Return the source of config, parameters and tokenizer, and the kind of the file.

    If an adapter was trained through this kind, the source returns weights before rounding.
    """
    chosen = None if tokenizer is None else path_of(f"{call}(tokenizer=)", tokenizer)
    if isinstance(model, Transformer):
        if base is not None:
            problem = f"{call}(base={str(base)!r}) is for the folder of an adapter"
            raise ConfigError(f"{problem}; leave it out")
        adapter, arrays = model.adapter, model.parameters
        kind, exact = _kind_of(adapter, kind)
        name = "model" if model.folder is None else model.folder.resolve().name

        def merged(name: str) -> Any:
            array = arrays[name]
            if adapter is None or (isinstance(array, Blocks) and not adapter.adds_to(name)):
                return array
            return adapter.merge(name, array, exact=exact, requantize=not exact)

        reads = _on_host(merged), lambda name: _dense(arrays[name])
        words, whole = chosen or model.folder, held(model, arrays, adapter)
        stacks = _unchanged({n: type(array) for n, array in arrays.items()}, adapter)
        return Source(
            model.config, model.texts, *reads, adapter, words, name, whole, kind, exact, stacks
        )
    stored = stored_model(call, model, base)
    kind, exact = _kind_of(stored.adapter, kind)

    def read(name: str) -> Any:
        kind, adapter = stored.homes[name].kind, stored.adapter
        if (
            kind is not None
            and issubclass(kind, Blocks)
            and not (adapter and adapter.adds_to(name))
        ):
            return stored.read(name)
        return stored.merged(name, exact=exact)

    reads = _on_host(read), lambda name: _dense(stored.read(name))
    name, words = stored.path.resolve().name, chosen or stored.words
    stacks = _unchanged({n: home.kind for n, home in stored.homes.items()}, stored.adapter)
    adapter, whole = stored.adapter, probed(stored, Transformer)
    return Source(
        stored.config, stored.texts, *reads, adapter, words, name, whole, kind, exact, stacks
    )


def _unchanged(kinds: Mapping[str, Any], adapter: Adapter | None) -> dict[str, str]:
    """Return the types of packed stacks of experts that stay packed, by name."""
    stacks = {n: kind for n, kind in kinds.items() if is_stack(n) and kind in TYPES_OF_STACKS}
    added = adapter is not None and adapter.adds_to
    return {n: TYPES_OF_STACKS[kind] for n, kind in stacks.items() if not (added and added(n))}


def _kind_of(adapter: Adapter | None, kind: str | None) -> tuple[str, bool]:
    """Return the kind of the file, and whether weights must be read before rounding."""
    into = None if adapter is None else adapter.into
    if into is None:
        return kind or "f16", True
    own = "f16" if into.in_folder else into.kind
    return kind or own, (kind or own) == into.kind


def _on_host(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a function that reads a parameter to host memory, dense or in packed blocks."""
    return lambda name: each if isinstance(each := read(name), Blocks) else _dense(each)


def _dense(array: Any) -> Array:
    """Return a dense parameter in host memory."""
    return to_numpy(array.dequantize(FLOAT32) if isinstance(array, Quantized) else array)


def _tokenizer_folder(source: Source) -> Path:
    """Return the folder of the tokenizer; raise if there is none."""
    if source.folder is None:
        raise ConfigError(
            "export_gguf: this model was not loaded from a folder, and a GGUF file needs a"
            " tokenizer; pass its folder, as in tokenizer='folder'"
        )
    return source.folder


def _pooling(source: Source, name: str) -> dict[str, int]:
    """Return the key of an encoder's pooling, which the files of sentence-transformers name."""
    if source.config.causal:
        return {}
    return {f"{name}.pooling_type": POOLINGS[pooling_of(source.folder) or "mean"]}


def _name(name: str, tokens: Iterable[str]) -> str:
    """Return the name of a model, or "" for a name that looks like Phi-3 without its tokens.

    llama.cpp does not load a file with such a name unless it has Phi-3's special tokens.
    """
    phi3 = re.search("phi-?3", name, re.IGNORECASE)
    return "" if phi3 and not {"</s>", "<unk>", "<s>", "<|endoftext|>"} <= {*tokens} else name


def _stand_ins(tensors: Iterable["Tensor"]) -> Iterator[str]:
    """Yield notes about tensors that have another type, as their rows are not whole blocks."""
    replaced: dict[tuple[str, str], list[str]] = {}
    for tensor in tensors:
        if tensor.type != tensor.target:
            pair = (tensor.target.name.lower(), tensor.type.name.lower())
            replaced.setdefault(pair, []).append(tensor.name)
    for (type_name, chosen), names in replaced.items():
        count = f"{len(names)} tensors are" if len(names) > 1 else "1 tensor is"
        shown = ", ".join(names[:SHOWN]) + (" and others" if len(names) > SHOWN else "")
        why = f"because row lengths are not multiples of the {type_name} block size"
        yield f"{count} stored as {chosen}, {why} ({shown})"


def _write(
    call: str,
    path: Path,
    name: str,
    values: Mapping[str, Any],
    tensors: list["Tensor"],
    progress: bool,
    before: Mapping[str, Callable[[], Array]],
    kept: Kept,
    *,
    used: bool = False,
    check: Callable[[Path, Mapping[str, float]], None] | None = None,
    last: Callable[[Path], None] | None = None,
) -> None:
    """Write keys, then tensor after tensor, to a temporary file that becomes ``path``.

    ``kept`` measures the tensors that an adapter changed, against the old ones that ``before``
    reads; with ``used``, after rounding, as the adapter was trained through this kind.  ``check``
    gets the file and the rounding errors of tensors, and may raise; ``last`` gets the file.
    """
    import gguf
    from tqdm import tqdm

    from ._types import packed, size_of, unpacked

    total = sum(size_of(tensor.shape, tensor.type) for tensor in tensors)
    key_bytes = sum(len(str(value)) for value in values.values())
    check_room(call, path, total + key_bytes + KEYS, "the GGUF file")
    errors: dict[str, float] = {}
    with atomic_path(path, call) as partial:
        with contextlib.closing(gguf.GGUFWriter(partial, name)) as out:
            for key, value in values.items():
                _add(out, key, value)
            out.add_quantization_version(gguf.GGML_QUANT_VERSION)
            for tensor in tensors:
                size = size_of(tensor.shape, tensor.type)
                out.add_tensor_info(tensor.name, tensor.shape, FLOAT32, size, tensor.type)
            out.write_header_to_file()
            out.write_kv_data_to_file()
            out.write_ti_data_to_file()
            shows_bar = progress and sys.stderr.isatty()
            with tqdm(
                total=total, desc=path.name, unit="B", unit_scale=True, disable=not shows_bar,
                dynamic_ncols=True,
            ) as bar:  # fmt: skip
                for tensor in tensors:
                    array = tensor.read()
                    whole = array.dtype.name == "uint8"  # packed blocks of the type
                    data = array if whole else packed(call, tensor.name, array, tensor.type)
                    _put(call, out, data, path)
                    bar.update(data.nbytes)
                    values_of = functools.partial(unpacked, data, tensor.type)
                    if tensor.name in before and tensor.type.name != "F32":
                        exact = values_of(slice(None)) if used else array.reshape(len(data), -1)
                        old = before[tensor.name]().reshape(exact.shape)
                        kept.measure(tensor.name, old, exact, values_of)
                    if check is not None and not whole and tensor.type.name != "F32":
                        off = values_of(slice(None)).reshape(array.shape) - array.astype(FLOAT32)
                        errors[tensor.name] = float(np.linalg.norm(off))
                        del off
                    del array, data, values_of  # free them before the next tensor is read
        if check is not None:
            check(partial, errors)
        if last is not None:
            last(partial)


def _trained(source: Source) -> Side:
    """Return the side of the model that is exported, with the weights of training."""
    adapter, probe = source.adapter, source.probed
    through = adapter is not None and adapter.into is not None

    def read(name: str) -> Array:
        return dense(probe.read(name) if through else source.read(name))

    return Side(
        source.name, source.config, source.texts, read, lambda _: "F32", source.folder,
        adapter=adapter, plain=None if adapter is None else source.plain,
    )  # fmt: skip


def _check_file(
    source: Source, known: "Architecture", file: Path, errors: Mapping[str, float]
) -> None:
    """Compare a file with the model and its adapter, one block in memory at a time.

    The merged weights must give the model's logits for a few tokens, and the weights in the file
    may differ from them by ``errors``, the norms of rounding errors by tensor.  If the adapter was
    trained through the kind of the file, the weights in the file must give the logits.

    Raises
    ------
    ConfigError
        The differences are larger.
    """
    from ._families import factor_of
    from ._parts import has_offset

    adapter, call = source.adapter, "export_gguf"
    homes, opened = find_gguf_tensors(file, source.config, OWN), opened_gguf(file)
    factors = {name: np.asarray(factor_of(source.config, known, name), FLOAT32) for name in homes}

    def written(name: str) -> Any:
        weight = LazyParameter(name, homes[name], {str(file): opened}, FLOAT32).whole()
        if (factors[name] == 1).all():
            return weight
        more = np.float32(has_offset(source.config, name) and source.config.norm_offset)
        return (dense(weight) + more) / factors[name] - more

    own = adapter is not None and adapter.into is not None and source.exact
    read = written if own else lambda name: wide(source.read(name))
    after = source.probed._replace(read=read, adapter=None)
    check_same(call, source.probed, after, own=own_tokens(adapter))
    for name, home in homes.items():
        parts = {home.stored, *(stored for _, stored in home.parts.values())}
        error = math.hypot(*(errors.get(part.removesuffix(AS_STORED), 0.0) for part in parts))
        error /= float(min(1, abs(factors[name]).min()))
        check_written(call, name, source.read(name), written(name), error)


def _put(call: str, out: Any, data: Array, path: Path) -> None:
    """Write the bytes of a tensor; raise a ConfigError if that fails."""
    try:
        out.write_tensor_data(data)
    except OSError as error:  # NumPy reports how much was written, but not the reason
        problem = f"{path} cannot be written: {error.strerror or error}"
        raise ConfigError(f"{call}: {problem}; make room on its disk") from None


def _add(out: Any, key: str, value: Any) -> None:
    """Write a key with the type of its Python value."""
    if isinstance(value, bool):
        out.add_bool(key, value)
    elif isinstance(value, int):
        out.add_uint32(key, value)
    elif isinstance(value, float):
        out.add_float32(key, value)
    elif isinstance(value, str):
        out.add_string(key, value)
    else:
        out.add_array(key, value)
