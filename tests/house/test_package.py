"""Wheel, sdist, editable install and bare checkout all hold the kernels."""

import ast
import configparser
import importlib
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import unsloth_cupy.models
from unsloth_cupy.core.source import source_root

from ..harness.tracked import ROOT, tracked

KERNELS = {path.relative_to(ROOT).as_posix() for path in tracked("kernels_cu/**/*.cu*")}
MODULES = {path.relative_to(ROOT).as_posix() for path in tracked("unsloth_cupy/**/*.py")}
USE = """
import numpy, unsloth_cupy
from unsloth_cupy.core import source

root = source.source_root()
assert root.is_relative_to({where!r}), root
assert {{p.relative_to(root).as_posix() for p in root.rglob('*.cu*')}} >= {kernels!r}
y = unsloth_cupy.rms_norm(numpy.ones((2, 4), 'float32'), numpy.ones(4, 'float32'))
print(y.sum().round(3))
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Run Python outside the checkout; show everything it said if it fails."""
    call = [sys.executable, *map(str, command)]
    done = subprocess.run(call, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def use(where: Path) -> str:
    """Return a program that runs one op and finds every kernel under where."""
    kernels = {name.removeprefix("kernels_cu/") for name in KERNELS}
    return USE.format(where=str(where), kernels=kernels)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist of this checkout and the wheel built from that sdist, without a network.

    A copy is built, since the build writes into its folder and other tests may run beside this.
    """
    pytest.importorskip("build", reason="needs the extra `test`")
    out, copy = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("copy")
    for path in tracked("**/*"):
        target = copy / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    run("-m", "build", "--no-isolation", "--outdir", out, copy, cwd=out)
    return out


def test_wheel_holds_modules_and_kernels(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as archive:
        names = set(archive.namelist())
    assert {f"unsloth_cupy/{name}" for name in KERNELS} <= names
    assert MODULES | {"unsloth_cupy/py.typed"} <= names
    assert {name.partition("/")[0] for name in names if "dist-info" not in name} == {"unsloth_cupy"}


def test_sdist_holds_what_building_and_testing_need(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    expected = {"README.md", "LICENSE", "setup.cfg", "pyproject.toml", "tests/harness/parity.py"}
    assert KERNELS | MODULES | expected <= names


def test_cupy_comes_with_a_numpy_that_its_bfloat16_takes() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = config["options.extras_require"]
    for_gpus = [name for name in extras if "[ctk]" in extras[name]]
    assert for_gpus == ["cuda12", "cuda13"]
    for name in for_gpus:
        assert "numpy>=2.1.2" in extras[name].split()


def test_installed_wheel_runs(built: Path, tmp_path: Path) -> None:
    target = tmp_path / "installed"
    wheel = next(built.glob("*.whl"))
    options = ("-q", "--no-deps", "--no-compile", "--target", target)
    run("-m", "pip", "install", *options, wheel, cwd=tmp_path)
    program = f"import sys; sys.path.insert(0, {str(target)!r}); {use(target)}"
    assert run("-c", program, cwd=tmp_path) == "8.0\n"


def test_bare_checkout_runs(tmp_path: Path) -> None:
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); {use(ROOT)}"
    assert run("-c", program, cwd=tmp_path) == "8.0\n"


def test_import_reads_no_more_than_the_public_names(tmp_path: Path) -> None:
    """Rooms that a caller of ops does not enter, and the libraries of others, are not read."""
    rooms = (
        "models.folders.folder",
        "models.transformer",
        "finetune",
        "bench",
        "cli",
        "interop.torch",
    )
    others = ("cupy", "torch", "jax", "transformers", "matplotlib", "safetensors", "scipy")
    strange = (*(f"unsloth_cupy.{room}" for room in rooms), *others)
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import unsloth_cupy;"
    program += f"print([name for name in {strange!r} if name in sys.modules])"
    assert run("-c", program, cwd=tmp_path) == "[]\n"


def test_models_are_imported_by_name(tmp_path: Path) -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import unsloth_cupy.models as models;"
    )
    program += "print([name for name in dir(models) if callable(getattr(models, name))])"
    public = [name for name in ast.literal_eval(run("-c", program, cwd=tmp_path)) if name[0] != "_"]
    assert public == sorted(unsloth_cupy.models._HOMES)
    tree = ast.parse((ROOT / "unsloth_cupy" / "models" / "__init__.py").read_text())
    lines = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    pairs = [(alias.asname, node.module) for node in lines for alias in node.names]
    typed = {name: module for name, module in pairs if name[0] != "_"}
    assert typed == unsloth_cupy.models._HOMES, "what type checkers read, and what is imported"
    with pytest.raises(AttributeError, match="has no lode"):
        _ = unsloth_cupy.models.lode


def test_this_installation_finds_its_kernels() -> None:
    """Editable where the README's command installed it."""
    assert (source_root() / "common" / "device.cuh").is_file()


def test_modules_of_finetune_are_named_by_their_old_path() -> None:
    files = tracked("unsloth_cupy/finetune/*/*.py")
    for room, name in {(path.parent.name, path.stem) for path in files}:
        if name not in ("__init__", "sources", "registry"):
            with pytest.raises(ModuleNotFoundError, match=rf"finetune\.{room}\.{name}$"):
                importlib.import_module(f"unsloth_cupy.finetune.{name}")
