"""Run folders of ranks on different machines.

Rank 0 writes the files of a run.  All ranks may see its folder, as on one machine or on a network
file system, or only some; no option says which.  The other ranks read a copy of the files that they
need: settings, log, the newest checkpoint until it is loaded, and the best model.
"""

import atexit
import json
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ...files import PARTIAL, atomic_path, check_room, folder_lock, regular, remove
from ..naming import named
from .ranks import Ranks
from .run_folder import RunFolder

BLOCK = 32 * 2**20  # bytes of a file that are sent at a time


class FolderCopy:
    """The run folder as this rank sees it: the folder of rank 0, or a copy of some of its files.

    Attributes
    ----------
    run : RunFolder
        The folder that this rank reads: the folder of rank 0 if this rank sees it.
    """

    def __init__(self, run: RunFolder, ranks: Ranks) -> None:
        self.source, self.run, self.ranks = run.folder, run, ranks
        self.host: Any = getattr(ranks.comm, "host", None) or ranks.comm
        self.writes = False  # whether this rank writes the copy for the ranks that see it
        self.copies = not ranks.alone and not self._is_common()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Create and lock the copy inside a ``with`` block; it is removed when the process ends."""
        if not self.writes:
            yield
            return
        folder = self.run.folder
        busy = f"{folder} is in use by another run; name another {named('out')}"
        folder.mkdir(exist_ok=True)
        with folder_lock(folder, busy):
            for each in folder.iterdir():  # of an earlier run in this process, or of a killed one
                remove(each)
            atexit.register(remove, folder)
            yield

    def bring(self, *names: str, weights: bool = True) -> None:
        """Copy files and folders of the run, by name; all ranks take part.

        Without ``weights``, safetensors files are left out.

        Raises
        ------
        ConfigError
            The disk of a rank has no room for the files.
        """
        if not self.copies:
            return
        files = json.loads(self.ranks.broadcast(json.dumps(self._listed(names, weights))))
        if self.writes:
            needed = sum(size for _, size in files)
            check_room("finetune", self.run.folder, needed, "the copy of rank 0's run")
            for name in names:
                if (self.run.folder / name).exists():
                    remove(self.run.folder / name)
        for name, size in files:
            self._send(name, size)
        self.host.barrier()

    def drop(self, name: str) -> None:
        """Remove a file or folder from the copy, once all ranks have read it."""
        if self.copies:
            self.host.barrier()
        if self.writes:
            remove(self.run.folder / name)

    def _listed(self, names: Sequence[str], weights: bool) -> list[tuple[str, int]]:
        """Return the paths and sizes of files; other ranks than rank 0 list none."""
        listed = []
        for place in (self.source / name for name in names if self.ranks.first):
            paths = sorted(place.rglob("*")) if place.is_dir() else [place]
            for path in paths:
                if path.is_file() and (weights or path.suffix != ".safetensors"):
                    listed.append((path.relative_to(self.source).as_posix(), path.stat().st_size))
        return listed

    def _send(self, name: str, size: int) -> None:
        """Send a file of rank 0 to all ranks, block by block; some of them write it."""
        sizes = [min(BLOCK, size - start) for start in range(0, size, BLOCK)]
        if self.ranks.first:
            with regular(self.source / name).open("rb") as file:
                for count in sizes:
                    self.host.broadcast(np.frombuffer(file.read(count), np.uint8))
            return
        if not self.writes:
            for count in sizes:
                self.host.broadcast(np.empty(count, np.uint8))
            return
        path = self.run.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as partial, partial.open("wb") as file:
            for count in sizes:
                file.write(self.host.broadcast(np.empty(count, np.uint8)).data)

    def _is_common(self) -> bool:
        """Return whether all ranks see the folder of rank 0; else choose who writes copies."""
        nonce = self.ranks.broadcast(secrets.token_hex(8))
        mark = self.source / f".{nonce}{PARTIAL}"
        with _marked(mark, self.ranks.first, self.host):
            sees = bool(mark.exists())
            every = self.host.all_gather(np.array([float(sees)]))
        if every.all():
            return True
        rank, parent = self.ranks.comm.rank, self.source.absolute().parent
        if not sees:
            parent.mkdir(parents=True, exist_ok=True)
        marks = {r: parent / f".{nonce}-{r}{PARTIAL}" for r in np.flatnonzero(every == 0).tolist()}
        with _marked(marks.get(rank), not sees, self.host):
            leader = next((r for r in marks if marks[r].exists()), None) if not sees else None
        if not sees:
            self.writes = leader == rank
            self.run = RunFolder(parent / f".{self.source.name}-copy", has_log=self.writes)
        return False


@contextmanager
def _marked(path: Path | None, creates: bool, host: Any) -> Iterator[None]:
    """Create a file for the time of a ``with`` block, on the ranks that create one."""
    if creates and path is not None:
        path.touch()
    host.barrier()
    try:
        yield
        host.barrier()
    finally:
        if creates and path is not None:
            path.unlink(missing_ok=True)
    host.barrier()
