"""Files and folders are written whole or not at all, wherever the writing stops."""

import codecs
import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from unsloth_cupy import files, profile
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.models import Transformer, create, load
from unsloth_cupy.pictures import save_picture

from ..models.peers import SIZES

ROOT = Path(__file__).parents[2]
CONFIG = {**SIZES, "model_type": "llama"}
CALLS = ("fsync", "replace", "unlink", "rmdir", "mkdir")  # of os: all that pathlib changes names by
SHARDS = 3


class StoppedError(BaseException):
    """The process ends here."""


@contextmanager
def stopped(at: int, dead: bool) -> Iterator[list[str]]:
    """Stop at the call of this number that changes a disk; the dead make no later one either."""
    made: list[str] = []

    def call(real: Callable[..., Any], *args: Any, **more: Any) -> Any:
        made.append(real.__name__)
        if len(made) == at or (dead and len(made) > at):
            raise StoppedError
        return real(*args, **more)

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, partial(call, getattr(os, name)))
        yield made


def sharded(model: Transformer) -> Transformer:
    names = list(model.parameters)
    model.layout = {
        f"model-0000{part + 1}-of-0000{SHARDS}.safetensors": names[part::SHARDS]
        for part in range(SHARDS)
    }
    return model


def whole(model: Transformer) -> Transformer:
    return model


def fill(model: Transformer, value: float) -> None:
    for array in model.parameters.values():
        array[...] = value
    model.texts = {**model.texts, "config.json": {**model.texts["config.json"], "_written": value}}


def held(folder: Path) -> set[float]:
    """Return the values that a reader finds, who knows nothing of this library's moves."""
    values = {float(files.read_json(folder / "config.json")["_written"])}
    for path in folder.glob("*.safetensors"):
        values |= {float(value) for array in load_file(path).values() for value in np.unique(array)}
    return values


@pytest.mark.parametrize("dead", [True, False], ids=["killed", "interrupted"])
@pytest.mark.parametrize("layout", [whole, sharded])
def test_a_save_that_stops_anywhere_leaves_the_old_or_the_new(
    tmp_path: Path, layout: Callable[[Transformer], Transformer], dead: bool
) -> None:
    model, folder = layout(create(CONFIG, seed=0)), tmp_path / "model"
    fill(model, 1)
    model.save(folder)
    (folder / "tokenizer.json").write_text("{}")
    fill(model, 2)
    seen, before, finished = set(), tmp_path / "before", False
    shutil.copytree(folder, before)
    for at in range(1, 100):
        shutil.rmtree(folder)
        shutil.copytree(before, folder)
        try:
            with stopped(at, dead):
                model.save(folder)
            finished = True
        except StoppedError:
            pass
        if (folder / "config.json").exists():
            assert len(held(folder)) == 1
        else:  # nobody reads the folder but who knows how to end the moves
            assert (folder / files.NEW).exists()
        actual = load(folder)
        values = {float(v) for array in actual.parameters.values() for v in np.unique(array)}
        assert values == held(folder)
        assert len(values) == 1
        assert (folder / "tokenizer.json").exists()
        if not dead:
            assert not [path for path in folder.rglob("*") if path.name.startswith(".")]
        seen |= values
        if finished:
            break
    assert finished
    assert seen == {1.0, 2.0}
    assert at > 2 * SHARDS * (layout is sharded)


@pytest.mark.parametrize("dead", [True, False], ids=["killed", "interrupted"])
def test_an_adapter_too_is_the_old_or_the_new(tmp_path: Path, dead: bool) -> None:
    base, folder = tmp_path / "base", tmp_path / "adapter"
    model = create(CONFIG, seed=0)
    model.save(base)
    model.add_adapter(2)
    seen = set()
    for at in range(1, 100):
        shutil.rmtree(folder, ignore_errors=True)
        for value in (1, 2):
            for array in model.trainable.values():
                array[...] = value
            if value == 1:
                model.save_adapter(folder)
        try:
            with stopped(at, dead) as calls:
                model.save_adapter(folder)
        except StoppedError:
            pass
        values = {float(a.flat[0]) for a in load(base, lora=folder).trainable.values()}
        assert len(values) == 1
        seen |= values
        if len(calls) < at:
            break
    assert seen == {1.0, 2.0}


def test_the_next_save_ends_the_moves_of_one_that_was_killed(tmp_path: Path) -> None:
    model, folder = sharded(create(CONFIG, seed=0)), tmp_path / "model"
    model.save(folder)
    with pytest.raises(StoppedError), stopped(1, dead=True):
        (folder / files.NEW).mkdir()
    for at in range(1, 100):
        try:
            with stopped(at, dead=True):
                model.save(folder)
        except StoppedError:
            if (folder / files.NEW).is_dir():
                break
    fill(model, 3)
    model.save(folder)
    assert held(folder) == {3.0}


def test_a_load_waits_for_the_moves_of_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = sharded(create(CONFIG, seed=0)), tmp_path / "model"
    fill(model, 1)
    model.save(folder)
    fill(model, 2)
    moving, go_on, real = threading.Event(), threading.Event(), os.replace

    def slow(source: Any, target: Any) -> None:
        real(source, target)
        if Path(source).parent.name == files.NEW and not moving.is_set():
            moving.set()
            assert go_on.wait(60)

    monkeypatch.setattr(os, "replace", slow)
    loaded: list[Any] = []
    saver = threading.Thread(target=model.save, args=(folder,))
    loader = threading.Thread(target=lambda: loaded.append(load(folder)))
    saver.start()
    assert moving.wait(60)
    loader.start()
    loader.join(0.2)
    assert loader.is_alive()
    go_on.set()
    saver.join()
    loader.join()
    assert held(folder) == {2.0}
    assert {float(a.flat[0]) for a in loaded[0].parameters.values()} == {2.0}


SAVER = """
import sys
from pathlib import Path
from tests.core.test_files import CONFIG, create, fill, sharded

folder, value = Path(sys.argv[1]), float(sys.argv[2])
model = sharded(create(CONFIG, seed=0))
model.add_adapter(2)
fill(model, value)
model.adapter.settings["lora_alpha"] = value
for array in model.trainable.values():
    array[...] = value
adapter, model.adapter = model.adapter, None
for _ in range(400):
    model.save(folder / "model")
    adapter.save(folder / "adapter")
    if (folder / "stop").exists():
        break
"""


@pytest.mark.slow
def test_loads_beside_two_processes_that_save_are_of_one_save(tmp_path: Path) -> None:
    savers = [
        subprocess.Popen([sys.executable, "-c", SAVER, str(tmp_path), str(value)], cwd=ROOT)
        for value in (1, 2)
    ]
    try:
        begun = time.monotonic()
        while not (tmp_path / "adapter").is_dir():
            assert time.monotonic() < begun + 60
            time.sleep(0.01)
        seen, ends = set(), time.monotonic() + 1.5
        while time.monotonic() < ends:
            model = load(tmp_path / "model", lora=tmp_path / "adapter")
            assert model.adapter is not None
            values = {float(v) for a in model.parameters.values() for v in np.unique(a)}
            assert values == {model.texts["config.json"]["_written"]}
            learned = {float(v) for a in model.trainable.values() for v in np.unique(a)}
            assert learned == {model.adapter.settings["lora_alpha"]}
            seen |= values
        assert seen <= {1.0, 2.0}
    finally:
        (tmp_path / "stop").touch()
        for saver in savers:
            assert saver.wait(60) == 0
    assert not [path for path in tmp_path.rglob("*") if files.PARTIAL in path.name]
    assert len(held(tmp_path / "model")) == 1


def test_writers_of_one_new_folder_do_not_mix(tmp_path: Path) -> None:
    """Each has a partial folder of its own; the last to end replaces the others' files."""
    models = [sharded(create(CONFIG, seed=0)) for _ in range(3)]
    for value, model in enumerate(models):
        fill(model, value)
    for number in range(8):
        folder, start = tmp_path / str(number), threading.Barrier(3)

        def save(model: Transformer, folder: Path = folder, start: Any = start) -> None:
            start.wait(60)
            model.save(folder)

        threads = [threading.Thread(target=save, args=(model,)) for model in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(held(folder)) == 1
        assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".")]


def test_leftovers_of_writers_that_were_killed_are_removed(tmp_path: Path) -> None:
    path, ended = tmp_path / "file", subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with files.atomic_path(path) as beside:
        dead = beside.name.replace(f"-{os.getpid()}.", f"-{ended.pid}.")
        (tmp_path / dead).mkdir()
        (tmp_path / dead / "half").touch()
        others = {dead.replace("-", "0-"), f"other{files.PARTIAL}", beside.name + ".old"}
        for name in others:
            (tmp_path / name).touch()
        with files.atomic_path(path) as second:
            second.write_text("second")
        assert path.read_text() == "second"
        beside.write_text("first")
    assert path.read_text() == "first"
    assert {each.name for each in tmp_path.iterdir()} == {"file", *others}


@pytest.mark.parametrize("share", [0, 0.01, 0.5, 0.99])
def test_a_disk_that_is_full_changes_nothing(tmp_path: Path, share: float) -> None:
    """The limit of a file's size is a disk's end that any machine has."""
    resource = pytest.importorskip("resource", reason="limits of files are of POSIX")
    model, folder = create(CONFIG, seed=0), tmp_path / "model"
    model.save(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    size = int(share * (folder / "model.safetensors").stat().st_size)
    fill(model, 2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for place in (folder, tmp_path / "new"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
        try:
            with pytest.raises(ConfigError, match="make room on its disk"):
                model.save(place)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def half_written(path: Path, error: OSError) -> None:
    with files.atomic_path(path) as beside:
        beside.write_text("half")
        raise error


@pytest.mark.parametrize("number", files.FULL)
def test_a_partial_file_goes_where_the_disk_is_full(tmp_path: Path, number: int) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(ConfigError, match=r"file cannot be written: .*; make room on its disk"):
        half_written(path, OSError(number, os.strerror(number)))
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert path.read_text() == "old"


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        half_written(tmp_path / "file", FileNotFoundError(errno.ENOENT, "another file"))
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("name", ["save", "save_adapter", "save_trace", "plot"])
def test_what_cannot_be_written_names_the_call_and_the_path(tmp_path: Path, name: str) -> None:
    model, figure = (
        create(CONFIG, seed=0),
        SimpleNamespace(savefig=lambda path, format: path.touch()),
    )
    if name == "save_adapter":
        model.add_adapter(2)
    with profile() as measured:
        pass
    writes: dict[str, Callable[[Path], None]] = {
        "save": model.save,
        "save_adapter": model.save_adapter,
        "save_trace": measured.save_trace,
        "plot": lambda path: save_picture(figure, path, "plot"),
    }
    (tmp_path / "file").touch()
    for place in ("file/new", "n" * 300, *["missing/new", "."][2 * name.startswith("save") :]):
        with pytest.raises(ConfigError, match=rf"(?s)^{name}[:(].*; pass "):
            writes[name](tmp_path / place)
    assert [path.name for path in tmp_path.rglob("*")] == ["file"]


def test_pictures_and_a_date_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """matplotlib reads it as the date of a PDF or an SVG; a PNG has none."""
    from matplotlib.figure import Figure

    for value in ("x", "1e9", "9" * 30, "0", ""):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", value)
        for suffix in ("png", "pdf", "svg"):
            path = tmp_path / f"p{value}.{suffix}"
            if suffix == "png" or value in ("", "0"):
                save_picture(Figure(), path)
                assert path.exists()
                continue
            with pytest.raises(ConfigError, match=r"^plot: SOURCE_DATE_EPOCH=.*; unset it"):
                save_picture(Figure(), path, "plot")


def test_a_folder_that_cannot_be_written_says_how_its_moves_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, folder = create(CONFIG, seed=0), tmp_path / "model"
    model.save(folder)
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy").replace(folder / files.NEW)

    def refused(*args: object, **more: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "unlink", refused)
    with pytest.raises(ConfigError, match="load the folder once with write access"):
        load(folder)


def test_room_is_asked_of_the_disk_that_will_hold_the_path(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    files.check_room("merge", tmp_path / "a" / "b", 1, "a run")
    with pytest.raises(
        ConfigError, match=r"^merge: a run needs [\d,.]+ MiB, but the disk of .*b has "
    ):
        files.check_room("merge", tmp_path / "a" / "b", 2 * free, "a run")


def test_json_is_read_with_and_without_the_mark_of_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for mark in (b"", codecs.BOM_UTF8):
        path.write_bytes(mark + '{"name": "é"}'.encode())
        assert files.read_json(path) == {"name": "é"}


def test_a_folder_is_of_one_alone(tmp_path: Path) -> None:
    """Who does not wait is told so; what else the first one meets stays what it is."""
    pytest.importorskip("fcntl", reason="locks of folders are of POSIX")
    messages = []

    def second() -> None:
        with pytest.raises(ConfigError) as caught, files.folder_lock(tmp_path, "taken"):
            pytest.fail("two are in it")
        messages.append(str(caught.value))

    with files.folder_lock(tmp_path):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join(10)
        assert messages == ["taken"]
    with pytest.raises(BlockingIOError, match="own"), files.folder_lock(tmp_path, "taken"):
        raise BlockingIOError("own")
    with files.folder_lock(tmp_path, "taken"):
        pass


def test_a_name_that_cannot_be_locked_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No lock is waited for that nobody holds."""
    monkeypatch.setattr(files, "temporary_folder", lambda: tmp_path / "none")
    cannot = pytest.raises(ConfigError, match=r"cannot be locked: .*; set TMPDIR")
    with cannot, files.name_lock(tmp_path):
        pass
    monkeypatch.setattr(files, "temporary_folder", lambda: tmp_path)
    busy = pytest.raises(ConfigError, match=r"^in use$")
    with files.name_lock(tmp_path), busy, files.name_lock(tmp_path, "in use"):
        pass
