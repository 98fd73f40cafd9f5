"""Kernels compiled ahead are those that are asked for, and what is damaged is made again."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click.testing
import numpy as np
import pytest

from unsloth_cupy import AdamW
from unsloth_cupy.cli.commands import group
from unsloth_cupy.compiled import cache
from unsloth_cupy.core.gpu import compiler_options
from unsloth_cupy.errors import ConfigError
from unsloth_cupy.models.next_logits import CachedLogits
from unsloth_cupy.models.parse import parse
from unsloth_cupy.models.transformer import Transformer
from unsloth_cupy.profiling import precompile
from unsloth_cupy.profiling.cards import card_of
from unsloth_cupy.training.gradients import measure_gradients

from ..code import budget
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
    next_logits = CachedLogits(model, tokens, 2, 66)
    past, real = np.zeros((2, 64), np.int64), np.ones((2, 64), bool)
    next_logits(past, real)
    for length in (65, 66):
        next_logits(np.zeros((2, length), np.int64), np.ones((2, length), bool))


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
from unsloth_cupy.compiled import cache
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


def test_a_home_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a file stands in place of the home, nobody can make a folder, root included."""
    home = tmp_path / "home"
    home.touch()
    monkeypatch.delenv(cache.CACHE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    assert "code" in cache.unit(cupy_of("90"), "source", OPTIONS)
    with pytest.raises(ConfigError, match=f"set {cache.CACHE} to a folder"):
        cache.keep(cache.folder(), key("source"), b"binary")


@pytest.mark.slow
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("long", [False, True])
def test_cupy_is_imported_where_it_cannot_write(named: bool, long: bool, tmp_path: Path) -> None:
    """It makes its folder as it is imported, and would end the program."""
    home = tmp_path / ("x" * 300 if long else "home")  # no folder may have so long a name
    if not long:
        home.touch()
    env = os.environ | {"HOME": str(home), "XDG_CACHE_HOME": str(home)}
    env |= {"CUPY_CACHE_DIR": str(home / "cache")} if named else {}
    env = {k: v for k, v in env.items() if k != cache.IN_MEMORY and (named or k[:6] != "CUPY_C")}
    program = "import os; from unsloth_cupy.core import gpu; gpu.cupy(); print(os.environ)"
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False
    )
    missing = "No module named 'cupy'" in done.stderr
    assert missing or f"'{cache.IN_MEMORY}': '1'" in done.stdout, done.stderr
    assert [*tmp_path.iterdir()] == ([] if long else [home])


def test_a_folder_that_can_be_written_is_left_to_cupy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(cache.IN_MEMORY, raising=False)
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "new"))
    cache.prepare.cache_clear()
    cache.prepare()
    assert cache.IN_MEMORY not in os.environ
    assert os.environ["CUPY_CACHE_DIR"] == str(tmp_path / "new")


def run(*arguments: object) -> click.testing.Result:
    return click.testing.CliRunner().invoke(group, ["precompile", *map(str, arguments)])


@pytest.mark.skipif(budget.missing() is not None, reason=str(budget.missing()))
def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.CACHE, str(tmp_path / "cache"))
    one = precompile.launches_of(
        CONFIG, card_of("sm_90"), batch=2, tokens=16, dtype="float32", optimizer="none"
    )
    few = [launch for launch in one if launch.kernel == "embedding"]
    rows: list[int] = []

    def listed(*_: Any, tokens: int, **__: Any) -> Any:
        rows.append(tokens)
        return few

    monkeypatch.setattr(precompile, "launches_of", listed)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    said = run(config, "--arch", "sm_90", "--tokens", 16).output
    assert "sm_90: 1 kernels in 1 units, 1 compiled" in said
    assert "0 compiled in" in run(config, "--arch", "h100").output
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
        (("--arch", "sm_90", "--tokens", "256"), "config.json: "),
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
