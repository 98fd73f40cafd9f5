"""Write the whole arrays of a model that ranks divide: one file, or a part for each rank.

    model.safetensors                        at most ONE_FILE bytes: rank 0 writes it
    model-00001-of-00004.safetensors         else each rank writes a part, of whole arrays
    model.safetensors.index.json             the part of each array, and the digest of each part

Arrays are gathered and written one by one, so a rank holds at most one array besides its own.  The
parts do not depend on the grid, and any number of ranks can read them.  A folder with parts is a
model folder of transformers.
"""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ...core.arrays import Unwritten
from ...errors import ConfigError
from ...parallel.communicator import Communicator
from ...parallel.grid import Grid
from ...placement import to_numpy
from ..folders.expert_files import Place
from ..folders.tensor_file import DIGEST, TensorFile
from .division import Division

# Bytes.  Folders of other programs have files of at most 5 GB for a reason that holds here, too: a
# host that reads or writes a file as a whole has room for it.
ONE_FILE = 5 * 10**9


class Entry(NamedTuple):
    """A whole array, and the pipeline stage that holds it."""

    name: str
    stage: int
    dtype: "np.dtype[Any]"
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """The size of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


class Writer(NamedTuple):
    """A rank that writes a file.

    ``same`` is its rank among the ranks with the same slices; ``column`` is equal for the ranks of
    one pipeline.
    """

    rank: int
    stage: int
    same: int
    column: int


class Parts(NamedTuple):
    """The ranks that write the arrays of a divided model.

    Attributes
    ----------
    comm : Communicator
        All ranks.
    grid : Grid
        The groups of ``comm``.
    same : Communicator
        The ranks that hold the same slices of each array.
    division : Division or None
    """

    comm: Communicator
    grid: Grid
    same: Communicator
    division: Division | None

    def entries(self, own: Mapping[str, Unwritten]) -> list[Entry]:
        """Return the arrays of all stages, each name once; all ranks must call it.

        ``own`` are the arrays of which this rank has slices, with their whole shapes.
        """
        pipeline = self.grid.pipeline
        lines = [[n, pipeline.rank, each.dtype.name, [*each.shape]] for n, each in own.items()]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        if pipeline.size > 1:
            text = bytes(pipeline.all_gather(np.frombuffer(text.encode(), np.uint8))).decode()
        entries = dict[str, Entry]()
        for line in text.splitlines():
            name, stage, dtype, shape = json.loads(line)
            # the first and the last stage may share the embedding
            entries.setdefault(name, Entry(name, stage, np.dtype(dtype), tuple(shape)))
        return [*entries.values()]

    def writers(self, folder: Path) -> list[Writer]:
        """Return the ranks that see a folder, in the order of stages; all ranks must call it.

        A part is then written near the ranks that hold its arrays.  Rank 0 has created the folder.
        """
        sees, stage = int(folder.is_dir()), self.grid.pipeline.rank
        own = [sees, self.comm.rank, stage, self.same.rank, self.column]
        rows = self.comm.all_gather(np.array([own])).tolist()
        return sorted((Writer(*row) for sees, *row in rows if sees), key=lambda each: each.stage)

    @property
    def column(self) -> int:
        """The number of this rank's pipeline, equal for all its stages."""
        groups, rank = self.grid, self.comm.rank
        inner = groups.context.size * groups.expert.size * groups.tensor.size
        return rank // (inner * groups.pipeline.size) * inner + rank % inner

    def gathered(self, entry: Entry, own: Mapping[str, Unwritten], writer: Writer) -> Any:
        """Return a whole array on the host of the writer; None on other ranks, which must call it.

        All replicas read their arrays.  The ranks of the writer's copy of the model then gather
        slices, and the pipeline of the writer sends the array if another stage holds it.
        """
        pipeline, array = self.grid.pipeline, None
        if pipeline.rank == entry.stage:
            array = own[entry.name].read()
            if self.division is not None and self.same.rank == writer.same:
                array = self.division.gathered(entry.name, array)
        if self.comm.rank == writer.rank and writer.stage != entry.stage:
            array = pipeline.receive(np.empty(entry.shape, entry.dtype), entry.stage)
        elif pipeline.rank == entry.stage != writer.stage and self.column == writer.column:
            pipeline.send(to_numpy(array), writer.stage)
        return to_numpy(array) if self.comm.rank == writer.rank else None

    def write(
        self,
        folder: Path,
        stem: str,
        entries: Sequence[Entry],
        own: Mapping[str, Unwritten],
        forms: Mapping[str, Mapping[str, Place]] = MappingProxyType({}),
    ) -> dict[str, str]:
        """Write STEM.safetensors, or parts and their index; return the SHA-256 of each part.

        All ranks must call it, and return when all files are on disk.

        Parameters
        ----------
        folder : Path
            The folder as this rank sees it; rank 0 has created it.
        entries : list of Entry
            The result of ``entries``.
        own : {name: Unwritten}
            The arrays of which this rank has slices.
        forms : {name: {stored name: Place}}
            Arrays that are written as other tensors, such as experts.

        Raises
        ------
        ConfigError
            The disk is full, or the folder cannot be written.
        """
        is_one = is_one_file(entries)
        writers = [Writer(0, 0, 0, 0)] if is_one else self.writers(folder)
        parts = divided(entries, len(writers))
        pairs = [pair for pair in zip(writers, parts, strict=True) if pair[1]]
        names = [f"{stem}-{n:05}-of-{len(pairs):05}.safetensors" for n in range(1, len(pairs) + 1)]
        names = [f"{stem}.safetensors"] if is_one else names
        tensors = [tensors_of(part, forms) for _, part in pairs]
        digests = dict[str, str]()
        number = next((n for n, (each, _) in enumerate(pairs) if each.rank == self.comm.rank), None)
        # one array of each part in turn, so that all ranks write at the same time
        turns = [
            (place, part[turn], writer)
            for turn in range(max((len(part) for _, part in pairs), default=0))
            for place, (writer, part) in enumerate(pairs)
            if turn < len(part)
        ]
        path = folder / names[number or 0]
        try:
            with ExitStack() as stack:
                file = None
                if number is not None:
                    file = TensorFile(path, tensors[number], is_part=not is_one)
                    stack.enter_context(file)
                for place, entry, writer in turns:
                    array = self.gathered(entry, own, writer)
                    if file is not None and place == number:
                        for form in forms.get(entry.name, {None: None}).values():
                            file.append(array if form is None else form.of(array))
                    array = None  # released before the next one is gathered
            if file is not None:
                digests[path.name] = file.digest
        except OSError as error:
            problem = f"{path} cannot be written: {error.strerror}"
            raise ConfigError(f"{problem}; make room on its disk") from None
        text = "".join(f"{name} {digest}\n" for name, digest in digests.items())
        every = bytes(self.comm.all_gather(np.frombuffer(text.encode(), np.uint8))).decode()
        if is_one:
            return {}
        digests = dict(sorted(line.split() for line in every.splitlines()))
        if self.comm.rank == 0:
            weights = {name: file for file, own in zip(names, tensors, strict=True) for name in own}
            facts = {"total_size": size_of(entries), DIGEST: digests}
            index = {"metadata": facts, "weight_map": weights}
            path = folder / f"{stem}.safetensors.index.json"
            path.write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        return digests


def is_one_file(entries: Sequence[Entry]) -> bool:
    """Return whether arrays are written as one file."""
    return size_of(entries) <= ONE_FILE


def size_of(entries: Sequence[Entry]) -> int:
    """Return the size of all arrays in bytes."""
    return sum(each.bytes for each in entries)


def divided(entries: Sequence[Entry], count: int) -> list[list[Entry]]:
    """Return consecutive parts of about equal sizes; the largest dtypes of each part are first."""
    parts: list[list[Entry]] = [[] for _ in range(count)]
    total, before = max(1, size_of(entries)), 0
    for each in entries:
        parts[(before + each.bytes // 2) * count // total].append(each)
        before += each.bytes
    return [sorted(part, key=lambda each: -each.dtype.itemsize) for part in parts]


def tensors_of(
    part: Sequence[Entry], forms: Mapping[str, Mapping[str, Place]]
) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Return dtype and shape of the tensors that a part is written as."""
    tensors = dict[str, tuple[Any, tuple[int, ...]]]()
    for each in part:
        shapes = {name: form.shape or each.shape for name, form in forms.get(each.name, {}).items()}
        shapes = shapes or {each.name: each.shape}
        tensors |= {name: (each.dtype, shape) for name, shape in shapes.items()}
    return tensors
