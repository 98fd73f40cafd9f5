"""Kernels compiled ahead are those that are asked for, and what is damaged is made again."""

import json
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click.testing
import numpy as np
import pytest

from unsloth_cupy import AdamW, files
from unsloth_cupy import kernel_cache as cache
from unsloth_cupy.cli.commands import group
from unsloth_cupy.core.gpu import compiler_options
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.models.parse import parse
from unsloth_cupy.models.transformer import Transformer
from unsloth_cupy.profiling import precompile
from unsloth_cupy.profiling.cards import card_of
from unsloth_cupy.training.gradients import measure_gradients

from ..code.programs import budget
from ..machines.stand_in import Machine, gpu
from .test_explain import CONFIG

OPTIONS = compiler_options()


def trained_and_asked(machine: Machine, values: Any) -> None:
    """Do a step as finetune does, read a prompt, make two tokens, on the stand-in for CuPy."""
    config = parse(values)
    machine.strict = False  # generation sends tokens
    masters = {name: machine.array(size, "float32") for name, size in config.shapes().items()}
    copies = {n: machine.array(a.shape, "bfloat16") for n, a in masters.items() if a.ndim > 1}
    steps = AdamW(masters)
    steps.keep_copies(copies)
    model: Any = Transformer(config, masters | copies, {})
    tokens = machine.array((2, 64), "int64")
    _, gradients = model.loss_and_gradients(tokens, tokens)
    measure_gradients(gradients, 1.0)
    steps.step(gradients, lr=1e-3, finite=True, factor=0.5)
    weights = {name: machine.array(size, "bfloat16") for name, size in config.shapes().items()}
    model = Transformer(config, weights, {})
    model.generate(machine.place(np.zeros((2, 64), np.int64)), max_new_tokens=2, stop=())


@pytest.mark.skipif(budget.missing() is not None, reason=str(budget.missing()))
@pytest.mark.parametrize("dim", [16, 64])
def test_what_a_model_asks_for_is_what_is_compiled_ahead(dim: int) -> None:
    values = CONFIG | {"head_dim": dim}
    with gpu("90") as machine:
        trained_and_asked(machine, values)
        asked = {(launch.kernel, launch.source) for launch in machine.launches}
    sizes: dict[str, Any] = {"batch": 2, "tokens": 64, "dtype": "bfloat16"}
    made = precompile.launches_of(values, card_of("sm_90"), **sizes)
    kernels = {(launch.kernel, launch.source) for launch in made}
    assert {kernel for kernel, _ in asked - kernels} == set()
    assert {kernel for kernel, _ in kernels - asked} == set(), "and nothing else"


@pytest.mark.skipif(budget.missing() is not None, reason=str(budget.missing()))
def test_the_step_of_the_optimizer_is_compiled_ahead() -> None:
    sizes: dict[str, Any] = {"batch": 2, "tokens": 64, "dtype": "bfloat16"}
    steps = {
        name: {launch.kernel for launch in precompile.launches_of(
            CONFIG, card_of("sm_90"), **sizes, optimizer=name)}
        for name in ("adamw", "lion", "schedulefree", "muon")
    }  # fmt: skip
    alone = {name: kernels - steps["adamw"] for name, kernels in steps.items()}
    assert alone == {
        "adamw": set(), "lion": {"lion_step"}, "schedulefree": {"schedule_free_step"},
        "muon": set(),
    }  # fmt: skip
    assert "adamw_step" in steps["muon"] - steps["lion"]


def key(text: str) -> str:
    return cache.key_of(text, OPTIONS, (12, 9), "90")


@pytest.mark.parametrize(
    "other",
    [
        ("another", OPTIONS, (12, 9), "90"),
        ("source", (*OPTIONS, "-G"), (12, 9), "90"),
        ("source", OPTIONS, (13, 0), "90"),
        ("source", OPTIONS, (12, 9), "86"),
    ],
)
def test_a_binary_is_found_by_all_that_it_is_made_of(other: Any, tmp_path: Path) -> None:
    cache.keep(tmp_path, key("source"), b"binary")
    elsewhere = [o if not o.startswith("-I") else "-I/elsewhere" for o in OPTIONS]
    same = cache.key_of("source", elsewhere, (12, 9), "90")
    actual = cache.find(tmp_path, same)
    assert actual is not None
    assert actual.read_bytes() == b"binary"
    assert cache.find(tmp_path, cache.key_of(*other)) is None


@pytest.mark.parametrize("damage", [b"", b"binar", b"Binary", b"binary\0"])
def test_a_damaged_entry_is_not_found_and_made_again(damage: bytes, tmp_path: Path) -> None:
    entry = cache.keep(tmp_path, key("source"), b"binary")
    entry.write_bytes(damage)
    assert cache.find(tmp_path, key("source")) is None
    assert not entry.exists()
    assert cache.keep(tmp_path, key("source"), b"binary") == entry
    assert cache.find(tmp_path, key("source")) == entry


def test_what_a_writer_left_unfinished_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        cache.keep(tmp_path, key("source"), b"binary")
    assert cache.find(tmp_path, key("source")) is None
    assert [*tmp_path.rglob(".*")] == []


WRITE_AND_READ = """
import sys
from pathlib import Path
from unsloth_cupy import kernel_cache as cache
root, key = Path(sys.argv[1]), sys.argv[2]
for n in range(50):
    cache.keep(root, key, bytes([n]) * 10_000)
    binary = cache.find(root, key)
    assert binary is not None
    assert len({*binary.read_bytes()}) == 1
"""


@pytest.mark.slow
def test_many_processes_write_one_entry(tmp_path: Path) -> None:
    """Each writes other bytes again and again; all that is found is whole."""
    command = [sys.executable, "-c", WRITE_AND_READ, str(tmp_path), key("source")]
    processes = [subprocess.Popen(command) for _ in range(3)]
    assert [process.wait() for process in processes] == [0] * 3


def cupy_of(architecture: str) -> Any:
    """Return what the cache asks of CuPy, which makes modules that say what they are made of."""
    device = SimpleNamespace(compute_capability=architecture)
    nvrtc = SimpleNamespace(getVersion=lambda: (12, 9), getSupportedArchs=lambda: (80, 86, 90))
    return SimpleNamespace(cuda=SimpleNamespace(Device=lambda: device, nvrtc=nvrtc))


def test_the_library_reads_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.CACHE, str(tmp_path))
    source = {"code": "source", "options": OPTIONS}
    assert cache.unit(cupy_of("90"), "source", OPTIONS) == source
    entry = cache.keep(cache.folder(), key("source"), b"binary")
    assert cache.unit(cupy_of("90"), "source", OPTIONS) == {"path": str(entry)}
    assert cache.unit(cupy_of("86"), "source", OPTIONS) == source
    entry.write_bytes(b"")
    assert cache.unit(cupy_of("90"), "source", OPTIONS) == source


class TestWhoseFolder:
    """Kernels are loaded, by CuPy too, from what only this user and root can write."""

    pytestmark = pytest.mark.skipif(os.name == "nt", reason="Windows has other permissions")

    @pytest.fixture(autouse=True)
    def home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """A home and a folder for temporary files of the test's own."""
        for name in (cache.CACHE, cache.CUPYS, "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        (tmp_path / "tmp").mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
        monkeypatch.setattr(cache.importlib.util, "find_spec", lambda name: name)
        monkeypatch.delitem(sys.modules, "cupy", raising=False)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        return tmp_path / "home"

    @pytest.mark.parametrize("place", ["", "kernels", "kernels/{key}", "kernels/{key}/{entry}"])
    @pytest.mark.parametrize("fault", ["given away", "writable", "link"])
    def test_what_others_can_write_is_not_loaded(
        self, place: str, fault: str, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if fault != "writable" and os.geteuid():
            pytest.skip("only root can give a file away")
        source = {"code": "source", "options": OPTIONS}
        entry = cache.keep(cache.folder(), key("source"), b"binary")
        assert cache.unit(cupy_of("90"), "source", OPTIONS) == {"path": str(entry)}
        path = home / ".cache/unsloth_cupy" / place.format(key=key("source"), entry=entry.name)
        if fault == "link":
            path.rename(home / "moved")
            path.symlink_to(home / "moved")
            assert cache.unit(cupy_of("90"), "source", OPTIONS) == {"path": str(entry)}, "one's own"
            os.chown(path, 12345, -1, follow_symlinks=False)
        elif fault == "writable":
            path.chmod(path.stat().st_mode | 0o020)
        else:
            os.chown(path, 12345, -1)
        why = "can be written by others" if fault == "writable" else "belongs to user 12345"
        with pytest.warns(UserWarning, match=why) as said:
            units = [cache.unit(cupy_of("90"), "source", OPTIONS) for _ in range(2)]
        assert units == [source] * 2
        assert len(said) == 1, "it is said once"
        assert entry.exists()

    def test_a_umask_that_lets_a_group_write(self, home: Path) -> None:
        before = os.umask(0o002)
        try:
            entry = cache.keep(cache.folder(), key("source"), b"binary")
            cache.prepare()
        finally:
            os.umask(before)
        assert cache.unit(cupy_of("90"), "source", OPTIONS) == {"path": str(entry)}
        assert stat.S_IMODE((home / ".cache/unsloth_cupy").stat().st_mode) == 0o700
        assert stat.S_IMODE((home / ".cupy/kernel_cache").stat().st_mode) == 0o700

    @pytest.mark.parametrize(
        "fault", ["file", "writable", "given away", "too long", "no permissions", "no home"]
    )
    def test_a_home_that_does_not_suit(
        self, fault: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A folder of the user's own among the temporary ones takes its place, and it is said."""
        folders = home / ".cache/unsloth_cupy", home / ".cupy/kernel_cache"
        if fault == "file":  # nobody can make a folder there, root included
            home.touch()
        elif fault == "too long":
            monkeypatch.setenv("HOME", str(tmp_path / ("x" * 300)))
        elif fault == "no home":
            monkeypatch.setattr(Path, "expanduser", homeless)
        elif fault == "no permissions":
            monkeypatch.setattr(Path, "mkdir", permissive(home))
        for folder in folders if fault in ("writable", "given away") else ():
            folder.mkdir(parents=True)
            folder.chmod(0o775)
            if fault == "given away":
                if os.geteuid():
                    pytest.skip("only root can give a file away")
                folder.chmod(0o755)
                os.chown(folder, 12345, -1)
        with pytest.warns(UserWarning, match=r"kernel_cache|is unknown.*using"):
            cache.prepare()
        with pytest.warns(UserWarning, match="using .* instead") as said:
            roots = [cache.folder() for _ in range(2)]
        assert len(said) == 1, "it is said once"
        entry = cache.keep(roots[1], key("source"), b"binary")
        place = tmp_path / "tmp" / f"unsloth_cupy-{os.geteuid()}"
        assert stat.S_IMODE(place.stat().st_mode) == 0o700
        assert entry.is_relative_to(place)
        assert os.environ[cache.CUPYS] == str(place / "cupy")
        assert cache.unit(cupy_of("90"), "source", OPTIONS) == {"path": str(entry)}

    @pytest.mark.parametrize("fault", ["link", "readable", "file", "given away"])
    def test_a_temporary_folder_that_somebody_else_made(
        self, fault: str, home: Path, tmp_path: Path
    ) -> None:
        """A new one is used, and removed when the process ends."""
        home.touch()
        place = files.temporary_name()
        if fault == "link":
            (tmp_path / "theirs").mkdir(0o700)
            place.symlink_to(tmp_path / "theirs")
        elif fault == "file":
            place.touch()
        else:
            place.mkdir(0o755 if fault == "readable" else 0o700)
            if fault == "given away":
                if os.geteuid():
                    pytest.skip("only root can give a file away")
                os.chown(place, 12345, -1)
        with pytest.warns(UserWarning, match="using .* instead"):
            actual = cache.folder()
        assert actual.parent.parent == place.parent
        assert actual.parent != place
        assert stat.S_IMODE(actual.parent.stat().st_mode) == 0o700
        assert not actual.exists()

    def test_no_folder_at_all_can_be_written(
        self, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Kernels are compiled all the same; what has to be kept says what it needs."""
        home.touch()

        def nowhere() -> str:
            raise FileNotFoundError(2, "No usable temporary directory found")

        monkeypatch.setattr(tempfile, "gettempdir", nowhere)
        monkeypatch.setenv("XDG_CACHE_HOME", str(home.parent / "missing"))
        source = {"code": "source", "options": OPTIONS}
        assert cache.unit(cupy_of("90"), "source", OPTIONS) == source
        with pytest.raises(ConfigError, match="set TMPDIR to a folder"):
            cache.prepare()

    def test_a_folder_that_is_named_and_does_not_suit_is_an_error(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What is written is written where the user said, or not at all."""
        (tmp_path / "shared").mkdir()
        (tmp_path / "shared").chmod(0o777)
        (tmp_path / "file").touch()
        for name, why in (("shared", "can be written by others"), ("file", "cannot be created")):
            monkeypatch.setenv(cache.CACHE, str(tmp_path / name))
            with pytest.raises(ConfigError, match=f"{cache.CACHE}=.*{why}.*set it to a folder"):
                cache.folder()
        with pytest.raises(ConfigError, match="can be written by others"):
            cache.keep(tmp_path / "shared", key("source"), b"binary")

    def test_a_folder_that_suits_is_left_to_cupy(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for named in (None, str(tmp_path / "new"), "~/other"):
            cache.prepare.cache_clear()
            if named is not None:
                monkeypatch.setenv(cache.CUPYS, named)
            cache.prepare()
            assert os.environ.get(cache.CUPYS) == (named and str(Path(named).expanduser()))


def permissive(home: Path) -> Any:
    """Return what makes folders in the home as a disk without permissions does: for everybody."""
    make = Path.mkdir

    def made(self: Path, *arguments: Any, **options: Any) -> None:
        make(self, *arguments, **options)
        if self.is_relative_to(home):
            self.chmod(0o777)

    return made


def homeless(path: Path) -> Path:
    """Do what pathlib does for a user without a home and without a name."""
    if str(path).startswith("~"):
        raise RuntimeError("Could not determine home directory.")
    return path


@pytest.mark.slow
def test_cupy_is_imported_where_it_cannot_write(tmp_path: Path) -> None:
    """It makes its folder as it is imported, and would end the program."""
    home = tmp_path / "home"
    home.touch()
    env = os.environ | {"HOME": str(home), "XDG_CACHE_HOME": str(home), "TMPDIR": str(tmp_path)}
    env = {name: value for name, value in env.items() if name != cache.CUPYS}
    program = "import os; from unsloth_cupy.core import gpu; gpu.cupy(); print(os.environ)"
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False
    )
    assert " instead; set" in done.stderr or "No module named 'cupy'" in done.stderr
    assert " instead; set" not in done.stderr or str(tmp_path / "unsloth_cupy-") in done.stdout


def run(*arguments: object) -> click.testing.Result:
    return click.testing.CliRunner().invoke(group, ["precompile", *map(str, arguments)])


@pytest.mark.skipif(budget.missing() is not None, reason=str(budget.missing()))
def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.CACHE, str(tmp_path / "cache"))
    one = precompile.launches_of(
        CONFIG, card_of("sm_90"), batch=2, tokens=16, dtype="float32", optimizer="none"
    )
    few = [launch for launch in one if launch.kernel == "embedding"][:1]
    rows: list[int] = []

    def listed(*_: Any, tokens: int, **__: Any) -> Any:
        rows.append(tokens)
        return few

    monkeypatch.setattr(precompile, "launches_of", listed)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    said = run(config, "--arch", "sm_90", "--tokens", 16).output
    assert "sm_90: 1 kernels in 1 translation units; 1 compiled" in said
    assert "; 0 compiled in" in run(config, "--arch", "h100").output
    assert rows == [16, CONFIG["max_position_embeddings"]]
    (unit,) = precompile.units_of(few, 90)
    entry = cache.find(cache.folder(), unit.key)
    assert entry is not None
    assert entry.read_bytes()[:4] == b"\x7fELF"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "this machine has no GPU; name one, as --arch sm_90"),
        (("--arch", "T4"), "--arch 'T4': kernels need sm_80 or newer, and T4 is sm_75"),
        (("--arch", "h100,x"), "--arch 'h100,x': no GPU is known as 'x'; choose from a100"),
        (("--arch", "h100,rtx4099"), "no GPU is known as 'rtx4099'; did you mean rtx 4090"),
        (("--arch", "sm_90", "--tokens", "0"), "is not a list of positive integers"),
        (("--arch", "sm_90", "--batch", "x"), "is not a list of positive integers"),
    ],
)
def test_what_makes_no_sense_is_named(
    arguments: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(cache.CACHE, str(tmp_path / "cache"))
    if budget.missing() is not None:
        pytest.skip(str(budget.missing()))
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    result = run(config, *arguments)
    assert result.exit_code == 1
    assert said in result.output


@pytest.mark.skipif(budget.missing() is not None, reason=str(budget.missing()))
def test_what_this_compiler_lacks_is_refused_before_it_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    import cupy

    known = cupy.cuda.nvrtc.getSupportedArchs
    monkeypatch.setattr(
        cupy.cuda.nvrtc, "getSupportedArchs", lambda: [a for a in known() if a != 121]
    )
    result = run(tmp_path, "--arch", "dgx spark")
    assert result.exit_code == 1
    assert "does not compile for sm_121; install a newer one" in result.output
