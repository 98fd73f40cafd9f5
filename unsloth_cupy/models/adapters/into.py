"""Adapters that are trained through the quantizer of the file they will be merged into.

    y = x Q(W + scale B A)^T        Q: rounds a weight as the file does

The merged file then computes exactly what was trained.  The adapter alone does not: with unrounded
weights the results differ.  adapter_config.json stores these settings under ``merge_into``:

    kind       kind of the file: nf4, q4_0 and so on
    quantize   kind to which ``load`` quantized the base's weights W; or null
    dtype      dtype of matrices that stay dense in a folder
    read       dtype to which ``load`` rounded weights of other formats, such as GPTQ
    base       CRC-32 of some rows of W in float32, to refuse another base; or null
    version    version of these rules

Weights without an adapter are also rounded as in the file.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from ...core.call import in_any_case
from ...core.dtypes import FLOAT32, FLOATS, Array
from ...errors import ConfigError
from ...files import read_json
from ...ops.linear.lora_merge import lora_sum
from ...ops.quantized.blocks import BLOCK
from ...ops.quantized.summed_weight import SUMMED, Reader, SummedWeight, can_sum
from ...ops.quantized.weight import Quantized
from ...placement import to_numpy
from ..configs.config import Config
from ..configs.heads import CAUSAL
from ..configs.names import HEAD, TABLE, is_stack
from ..folders.expert_files import file_tensors, kinds_of_experts
from ..gguf import TYPES
from ..gguf.rounding import block_of, rounded, types_of
from ..quantizer import CHOICES as MADE
from ..quantizer import IN_FOLDERS, KINDS, Quantizer, kind_of
from .adapter import MAGNITUDE, PREFIX, Adapter
from .adapter_base import ADAPTER

MERGE_INTO = "merge_into"  # in adapter_config.json
SHORT = {"q4_k": "q4_k_m", "q5_k": "q5_k_m", "q3_k": "q3_k_m"}  # llama.cpp's names
KINDS_OF_FILES = (*IN_FOLDERS, *(kind for kind in TYPES if kind not in ("f32", "f16", "bf16")))
CHOICES = (*KINDS_OF_FILES, *SHORT)
VERSION = 1
ROWS_OF_BASE = 8


class Into:
    """The quantizer of a file: rounds each weight of a model as the file does.

    Attributes
    ----------
    kind : str
    quantize : str or None
        The kind to which ``load`` quantized the base's weights, if it did.
    dtype : dtype
        The dtype of matrices that stay dense in a folder.
    read : dtype
        The dtype to which ``load`` rounded weights of formats that become dense.
    base : int or None
        The ``sum_of_base`` of the base's weights; None if it is not known.
    names : set of str
        The kind, and its short name.
    active : bool
        Whether layers compute with it now; before ``--merge-from`` training does not use it.
    """

    def __init__(
        self,
        call: str,
        config: Config,
        kind: Any,
        quantize: str | None = None,
        dtype: Any = None,
        read: Any = None,
    ) -> None:
        kind = in_any_case(kind, CHOICES)
        if kind not in CHOICES:
            raise ConfigError(f"{call}: merge_into={kind!r}; choose from {', '.join(CHOICES)}")
        self._call, self.kind = call, SHORT.get(kind, kind)
        self.names = {self.kind, *(each for each in SHORT if SHORT[each] == self.kind)}
        self.quantize, self.active = quantize, True
        self.dtype: np.dtype[Any] = FLOAT32 if dtype is None else dtype
        self.read: np.dtype[Any] = FLOAT32 if read is None else read
        self.base: int | None = None
        self.in_folder = self.kind in IN_FOLDERS
        self._fixed: dict[str, tuple[Any, Any]] = {}  # (weight, rounded as in the file)
        if self.in_folder:
            only_experts = KINDS[self.kind].only_experts
            known = kinds_of_experts(config) if config.experts is not None else MADE
            if self.kind not in known:
                what = "experts" if only_experts or config.experts else "weights"
                problem = f"a folder of a {config.model_type} cannot store {what} in {self.kind}"
                raise ConfigError(f"{call}: {problem}; choose from {', '.join(known)}")
            self._quantizer = Quantizer(call, self.kind)
            for name, shape in config.shapes().items():
                if only_experts and is_stack(name) and shape[-1] % BLOCK:
                    problem = f"rows of {name} have {shape[-1]} values, not whole blocks of {BLOCK}"
                    raise ConfigError(f"{call}: {problem}; leave merge_into out")
        elif config.head != CAUSAL:
            problem = f"a GGUF file holds a language model, and the head is {config.head!r}"
            cure = "choose a kind for folders, such as nf4, or leave merge_into out"
            raise ConfigError(f"{call}: {problem}; {cure}")
        else:
            self._types = types_of(call, config, self.kind)

    def __call__(self, name: str, weight: Any) -> Any:
        """Return a weight rounded as in the file: an array in float32, or a quantized weight."""
        if not self.in_folder:
            kind = self._types.get(name)
            same = kind is not None and kind.name.lower() == kind_of(weight)
            return (
                weight if kind is None or same else rounded(self._call, name, _dense(weight), kind)
            )
        if not self._quantizer.makes(name, weight.shape):
            return _dense(weight).astype(self.dtype).astype(FLOAT32)
        if isinstance(weight, Quantized) and kind_of(weight) == self.kind:
            return weight
        return self._quantizer.maker(_dense(weight))

    def of_sum(self, name: str, weight: Any, a: Array, b: Array, scale: float) -> Any:
        """Return ``weight + scale b a`` rounded as in the file, for the products of a layer.

        If blocks can be rounded separately, the result is a ``SummedWeight``, which products
        compute part by part.  Else it is a whole weight: if rows end within a block, and in
        float64.
        """
        kind, reader, block = self._parts(name, weight)
        if can_sum(kind, weight, block):
            return SummedWeight(weight, a, b, scale, kind, reader, block)
        return self(name, lora_sum(weight, a, b, scale))

    def _parts(self, name: str, weight: Any) -> tuple[str, Reader | None, int | None]:
        """Return a weight's kind in the file and, if no kernel reads it, a reader and its block."""
        if self.in_folder:
            coded = self._quantizer.makes(name, weight.shape)
            return (self.kind, None, None) if coded else (self.dtype.name, partial(self, name), 1)
        if (type_of := self._types.get(name)) is None:
            return "f32", partial(self, name), 1
        kind = type_of.name.lower()
        own = kind in SUMMED
        return (kind, None, None) if own else (kind, partial(self, name), block_of(type_of))

    def check_names(self, call: str, config: Config, plain: Collection[str]) -> None:
        """Raise a ConfigError if a folder stores a quantized weight under another name.

        ``plain`` are the parameters that the folder stores under their own names.
        """
        others = file_tensors(config, plain) if self.in_folder else {}
        for name, shape in config.shapes().items():
            renamed = all(place.renamed for place in others.get(name, {}).values())
            if not renamed and not is_stack(name) and self._quantizer.makes(name, shape):
                problem = f"files store {name} as {min(others[name])}, which is not quantized"
                raise ConfigError(f"{call}: {problem}; leave merge_into out")

    def rounds(self, name: str, weight: Any) -> bool:
        """Return whether the file rounds a weight that has no adapter."""
        if not self.in_folder:
            return name in self._types and self._types[name].name.lower() != kind_of(weight)
        return self._quantizer.makes(name, weight.shape) and kind_of(weight) != self.kind

    def fixed(
        self, parameters: Mapping[str, Any], adapted: Callable[[str], bool]
    ) -> dict[str, Any]:
        """Return the weights without an adapter that the file rounds, rounded as in the file.

        Each is computed once; dense ones keep the dtype of the weight.
        """
        result = {}
        for name, weight in parameters.items():
            before, after = self._fixed.get(name, (None, None))
            if weight is after or adapted(name):
                continue
            if weight is not before:
                if not self.rounds(name, weight):
                    continue
                value = self(name, weight)
                after = value if isinstance(value, Quantized) else value.astype(weight.dtype)
                self._fixed[name] = weight, after
            result[name] = after
        return result

    def settings(self) -> dict[str, Any]:
        """Return the entry of adapter_config.json."""
        dtypes = {"dtype": self.dtype.name, "read": self.read.name}
        facts = {"kind": self.kind, "quantize": self.quantize, **dtypes, "base": self.base}
        return {**facts, "version": VERSION}


def _dense(weight: Any) -> Array:
    """Return a weight in float32."""
    if isinstance(weight, Quantized):
        return weight.dequantize(FLOAT32)
    dense: Array = weight.astype(FLOAT32, copy=False)
    return dense


def train_through(call: str, adapter: Adapter, into: Into) -> None:
    """Make an adapter compute with the weights of the file that it will be merged into.

    Raises
    ------
    ConfigError
        The adapter has DoRA, or trains tables that a GGUF file rounds.
    """
    if any(name.endswith(MAGNITUDE) for name in adapter.parameters):
        problem = "DoRA normalizes rows before they are rounded"
        raise ConfigError(f"{call}: {problem}; leave dora out, or merge_into")
    if adapter.outer and not into.in_folder:
        what = "rows of embed_tokens" if adapter.tokens else adapter.outer[0].removeprefix(PREFIX)
        problem = f"the adapter trains {what}, and a GGUF file rounds tables"
        cure = "choose a kind for folders, such as nf4, which leaves tables dense"
        raise ConfigError(f"{call}: {problem}; {cure}")
    adapter.into = into
    adapter.settings[MERGE_INTO] = into.settings()


def through_listed(path: str, config: Config, adapter: Adapter) -> Adapter:
    """Return an adapter, with the quantizer that its adapter_config.json names, if any.

    Raises
    ------
    ConfigError
        The entry has another version, or is broken.
    """
    facts = adapter.settings.get(MERGE_INTO)
    if facts is None:
        return adapter
    dtypes = {dtype.name: dtype for dtype in FLOATS}
    facts = {"read": FLOAT32.name, **facts} if isinstance(facts, Mapping) else {}
    known = dtypes.keys() >= {facts.get("dtype"), facts.get("read")}
    if not known or facts.get("quantize") not in (None, *MADE):
        wrong = adapter.settings[MERGE_INTO]
        raise ConfigError(f"{path}: {MERGE_INTO} is {wrong!r}; copy the adapter again")
    if facts.get("version") != VERSION:
        problem = f"{MERGE_INTO} has the version {facts.get('version')!r}, not {VERSION}"
        raise ConfigError(f"{path}: {problem}; install the version that trained it")
    own = facts["quantize"], dtypes[facts["dtype"]], dtypes[facts["read"]]
    into = Into(path, config, facts.get("kind"), *own)
    into.base = facts.get("base")
    train_through(path, adapter, into)
    return adapter


def sum_of_base(
    adapter: Adapter, names: Iterable[str], weights: Callable[[str], Any]
) -> int | None:
    """Return the CRC-32 of the first row of some weights that an adapter changes.

    ``weights`` returns a weight of the base by its name.  None: a weight is not in float32, and
    ``load`` may have rounded it.
    """
    result = 0
    for name in sorted({*filter(adapter.adds_to, names)} - {TABLE, HEAD})[:ROWS_OF_BASE]:
        weight = weights(name)
        if weight.dtype != FLOAT32:
            return None
        row = to_numpy(_dense((weight[0] if name in adapter.stacks else weight)[:1]))
        result = crc32(row.astype("<f4").tobytes(), result)
    return result


def check_base(
    call: str,
    adapter: Adapter,
    where: Any,
    names: Iterable[str],
    weights: Callable[[str], Any] | None,
) -> None:
    """Raise a ConfigError if an adapter was trained through a quantizer with another base.

    ``weights``: see ``sum_of_base``; None: ranks divide the weights.
    """
    into = adapter.into
    if into is None or into.base is None or weights is None:
        return
    if sum_of_base(adapter, names, weights) in (None, into.base):
        return
    problem = f"the adapter was trained through {into.kind} with other weights than {where} has"
    raise ConfigError(f"{call}: {problem}; pass its own base, or train it with these weights")


def quantize_of(call: str, adapter: str | PathLike[str], quantize: str | None) -> str | None:
    """Return the kind to which ``load`` quantizes the base of an adapter's folder.

    Raises
    ------
    ConfigError
        The adapter was trained through a quantizer, with base weights of another kind.
    """
    path = Path(adapter, ADAPTER)
    facts = read_json(path).get(MERGE_INTO) if path.is_file() else None
    if not isinstance(facts, Mapping):
        return quantize
    known = facts.get("quantize")
    if quantize not in (None, known):
        problem = f"{path} was trained with {known or 'dense'} weights of its base"
        raise ConfigError(f"{call}(quantize={quantize!r}): {problem}; leave quantize out")
    return None if known is None else str(known)
