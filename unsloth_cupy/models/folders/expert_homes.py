"""Find the experts of a mixture in the files of a checkpoint, in any stored form."""

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ...core.dtypes import BFLOAT16, Array
from ...errors import ConfigError
from ...ops.quantized.mxfp4 import Mxfp4
from ..configs.config import Config
from ..configs.names import TABLE, is_stack, parameter_name
from .expert_files import Place, Stack, places
from .lazy_parameter import LazyParameter, StoredTensor

DTYPES = {
    "F16": np.dtype("float16"),
    "BF16": BFLOAT16,
    "F32": np.dtype("float32"),
    "F64": np.dtype("float64"),
}
CODES = "U8"
QUANTIZED = "codes"  # stands for the dtype of a matrix that another program quantized


def plain_names(homes: Mapping[str, StoredTensor]) -> set[str]:
    """Return the parameters that files store unchanged, under their own names.

    Blocks of draft heads may have another prefix.
    """
    alike = re.compile(r"(mtp|model)\.layers\.\d+\.")

    def same(name: str, stored: str) -> bool:
        ends = alike.split(name)[-1], alike.split(stored)[-1]
        return stored == name or (stored.startswith("mtp.layers.") and ends[0] == ends[1])

    return {n for n, home in homes.items() if home.stack is None and same(n, home.stored)}


class ExpertHomes:
    """Collects tensors of files that are parts, or other forms, of a mixture's parameters."""

    def __init__(self, config: Config) -> None:
        self.known, self.shapes = dict[str, Place](), config.shapes()
        for name, place in places(config).items():
            of_stack = is_stack(place.parameter)
            self.known[(of_stack and parameter_name(name)) or name] = place
        self.widened = config.widened
        self.forms: dict[tuple[str, bool], list[str]] = {}  # (parameter, packed): tensors
        for name, place in self.known.items():
            self.forms.setdefault((place.parameter, place.packed), []).append(name)
        self.tensors: dict[tuple[str, bool], dict[str, tuple[str, str, str]]] = {}
        self.matrices = {  # matrices of single experts, which other programs may quantize
            name: (place.shape[0], place.shape[1])
            for name, place in self.known.items()
            if place.parts > 1 and name.endswith(".weight")
        }
        self.quantized: dict[str, StoredTensor] = {}
        self.rows: dict[str, int] = {}  # number of rows in the tensors of a parameter

    def add(self, path: Path, stored: str, name: str, shape: tuple[int, ...], code: str) -> bool:
        """Add a tensor if it is a known part, and return whether it is; raise if it is wrong."""
        place = self.known.get(name)
        if place is None:
            return False
        tensors = self.tensors.setdefault((place.parameter, place.packed), {})
        expected = place.shape or self.shapes[place.parameter]
        problem = None
        if name in tensors:
            problem = f"is also in {tensors[name][0]}; keep one"
        elif (shape[1:] != expected[1:]) if place.rows is not None else (shape != expected):
            problem = f"has shape {shape}; config.json implies {expected}"
        elif (code != CODES) if place.packed else (code not in DTYPES):
            problem = f"is {code}; it must be {CODES if place.packed else ', '.join(DTYPES)}"
        if problem:
            raise ConfigError(f"{path}: tensor {stored!r} {problem}")
        tensors[name] = path.name, stored, code
        if place.rows is not None:
            self.rows[place.parameter] = self.rows.get(place.parameter, 0) + shape[0]
        return True

    def add_quantized(self, folder: Path, name: str, home: StoredTensor) -> None:
        """Add a matrix of an expert that another program quantized."""
        place = self.known[name]
        tensors = self.tensors.setdefault((place.parameter, place.packed), {})
        if name in tensors:
            problem = f"tensor {tensors[name][1]!r} exists, and also the quantized part"
            raise ConfigError(f"{folder}: {problem} {home.stored!r}; keep one")
        tensors[name] = home.file, home.stored, QUANTIZED
        self.quantized[name] = home

    def add_to(self, folder: Path, homes: dict[str, StoredTensor]) -> None:
        """Add the parameters to ``homes``; raise if a part is missing or another form exists."""
        for (parameter, packed), tensors in self.tensors.items():
            names = self.forms[parameter, packed]
            if missing := [name for name in names if name not in tensors]:
                more = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
                problem = f"tensor {missing[0]!r}{more} missing"
                raise ConfigError(f"{folder}: {problem}; copy the checkpoint again")
            own = [tensors[name] for name in names]
            if parameter in homes:
                problem = f"tensors {own[0][1]!r} and {homes[parameter].stored!r} hold the same"
                raise ConfigError(f"{folder}: {problem} parameter; keep one")
            codes = sorted({code for _, _, code in own} - {QUANTIZED})
            if len(codes) > 1:
                problem = f"tensors of {parameter} have several dtypes"
                raise ConfigError(f"{folder}: {problem}; store it in one")
            file, stored, _ = own[0]
            place, shape = self.known[names[0]], self.shapes[parameter]
            joined = place.rows is not None
            changed = place.parts > 1 or place.in_turns or place.turned or place.row or joined
            if joined and (total := self.rows.pop(parameter, 0)) != shape[0]:
                problem = f"the tensors of {parameter} have {total} rows"
                raise ConfigError(f"{folder}: {problem}; config.json implies {shape[0]}")
            plain = not (changed or packed)
            coded = {i: self.quantized[n] for i, n in enumerate(names) if n in self.quantized}
            parts = {i: partial(_whole, home) for i, home in coded.items()}
            stack = None if plain else Stack(place, tuple((f, s) for f, s, _ in own), parts)
            wide = self.widened(parameter)
            kind = Mxfp4 if packed else None
            home = StoredTensor(
                file, stored, shape, DTYPES.get("".join(codes)), kind, stack=stack, wide=wide
            )
            homes[parameter] = home._replace(
                parts={each[1]: each for one in coded.values() for each in one.parts.values()},
                format=" and ".join(sorted({one.format for one in coded.values()})),
                bytes=sum(one.bytes for one in coded.values()),
            )

    def with_dtypes(self, homes: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """Return ``homes`` with the table's dtype for packed and computed stacks."""
        return {
            name: home._replace(dtype=homes[TABLE].dtype)
            if home.stack is not None and home.dtype is None
            else home
            for name, home in homes.items()
        }


def _whole(home: StoredTensor, files: Mapping[str, Any]) -> Array:
    """Return the dense matrix that is stored as tensors in open files."""
    matrix: Array = LazyParameter(home.stored, home, files).whole()
    return matrix
