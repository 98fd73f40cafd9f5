"""The conventions of docs/architecture.md, as assertions that name whatever breaks them."""

import ast
import builtins
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import unsloth_cupy  # noqa: F401  every op registers itself
from unsloth_cupy.bench.cases import forward_ops
from unsloth_cupy.core.dtypes import DIFFERENTIABLE
from unsloth_cupy.core.op import OPS

ROOT = Path(__file__).parent.parent
PACKAGE = sorted((ROOT / "unsloth_cupy").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
KERNELS = sorted((ROOT / "kernels_cu").rglob("*.cu"))
HEADERS = sorted((ROOT / "kernels_cu").rglob("*.cuh"))
MACHINE_ROOM = sorted((ROOT / "unsloth_cupy" / "core").glob("*.py"))
MACHINE_ROOM_LINES = 1600
# Everything that is written by hand or committed; caches and builds are not.
TRACKED = ("unsloth_cupy", "kernels_cu", "tests", "docs", "asv_benchmarks", ".ci")
TEXT = {".py", ".cu", ".cuh", ".hpp", ".cpp", ".h", ".md", ".cfg", ".toml", ".yaml", ".json", ""}

# The public names as other people's programs call them: parameters, their order and defaults.
API = {
    "AttentionConfig": "tile=128, block=256, head_dim=64, warpgroups=False",
    "check_errors": "",
    "Tape": "",
    "AdamW": "parameters, *, lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.01,"
    " state_bits=32",
    "clip_gradients": "gradients, max_norm",
    "LossScaler": "scale=65536.0, *, dynamic=True, growth=2.0, backoff=0.5, interval=2000,"
    " minimum=1.0, maximum=2147483648.0",
    "cosine_schedule": "step, *, lr, warmup, steps, minimum=0.0",
    "linear_schedule": "step, *, lr, warmup, steps, minimum=0.0",
    "constant_schedule": "step, *, lr, warmup, steps, minimum=0.0",
    "KVCache": "layers, batch, capacity, kv_heads, dim, *, dtype, like=None, window=None, sinks=0",
    "MultiHeadAttention": "hidden, heads, *, kv_heads=None, dim=None, bias=True, rope=None,"
    " dtype='float32', seed, like=None",
    "PagedKVCache": "layers, pages, page, kv_heads, dim, *, dtype, like=None",
    "models.load": "folder, *, dtype=None, device=None",
    "models.create": "config, *, seed, dtype='float32', device=None",
}
# Those of ops stand in tests/ops, beside what they promise.
for _path in sorted((ROOT / "tests/ops").glob("test_*.py")):
    for _node in ast.parse(_path.read_text()).body:
        if isinstance(_node, ast.Assign) and ast.unparse(_node.targets[0]) == "PUBLIC":
            _calls = ast.literal_eval(_node.value)
            API |= {call.partition("(")[0]: call.partition("(")[2][:-1] for call in _calls}


def named(path: Path) -> str:
    """Return a path as test reports show it."""
    return path.relative_to(ROOT).as_posix()


def lookup(name: str) -> object:
    """Return a public name of the table above."""
    module, _, last = f"unsloth_cupy.{name}".rpartition(".")
    return getattr(importlib.import_module(module), last)


def text_files() -> Iterator[Path]:
    """Return every text file of the project."""
    folders = [path for name in TRACKED for path in (ROOT / name).rglob("*")]
    for path in [*folders, *ROOT.glob("*"), *ROOT.glob(".*")]:
        hidden = any(part in (".asv", "_build", "__pycache__", "api") for part in path.parts)
        if path.is_file() and not hidden and path.suffix in TEXT and path.name != ".git":
            yield path


@pytest.mark.parametrize("path", PACKAGE, ids=named)
def test_module_fits_a_reader(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 300, "split it by variant, never by layer"


def test_machine_room_is_small() -> None:
    lines = sum(len(path.read_text().splitlines()) for path in MACHINE_ROOM)
    assert lines <= MACHINE_ROOM_LINES


def test_functions_of_the_machine_room_are_short() -> None:
    """No body is longer than 40 lines."""
    trees = [ast.walk(ast.parse(path.read_text())) for path in MACHINE_ROOM]
    functions = [node for tree in trees for node in tree if isinstance(node, ast.FunctionDef)]
    assert [f.name for f in functions if f.body[-1].end_lineno - f.body[0].lineno >= 40] == []


def without_gradient(name: str) -> str | None:
    """Return why an op has no gradient, if it says so."""
    return OPS[name].facts.get("no_gradient")


@pytest.mark.parametrize("name", forward_ops())
def test_op_has_tests(name: str) -> None:
    tests = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    public = name.removesuffix("_forward")
    proof = rf'op = "{name}"' if without_gradient(name) is None else rf"\b{public.strip('_')}_?\("
    assert re.search(proof, tests, re.I), f"write tests/ops/test_{public}.py"


@pytest.mark.parametrize("name", forward_ops())
def test_op_has_a_gradient(name: str) -> None:
    differentiable = any(o.kind in DIFFERENTIABLE for o in OPS[name].contract.inputs)
    assert (OPS[name].backward is not None) == (differentiable and without_gradient(name) is None)


@pytest.mark.parametrize("name", API)
def test_public_signature(name: str) -> None:
    """Keywords may stand in any order, and more of them may be added."""
    value: Any = lookup(name)
    found = inspect.signature(value).parameters
    promised = eval(f"lambda {API[name]}: None")
    wanted = inspect.signature(promised).parameters
    keyword = inspect.Parameter.KEYWORD_ONLY
    positional = [[n for n, p in side.items() if p.kind != keyword] for side in (found, wanted)]
    assert positional[0] == positional[1]
    for parameter in wanted.values():
        assert found[parameter.name].kind == parameter.kind, parameter.name
        promise = parameter.default
        assert promise in (inspect.Parameter.empty, found[parameter.name].default), parameter.name


def sections(name: str) -> set[str]:
    """Return the sections of a docstring, with those of the public names that it refers to."""
    text = inspect.getdoc(lookup(name)) or ""
    found = set(re.findall(r"^(\w+)\n-+$", text, re.M))
    referred = (set(re.findall(r"``(\w+)``", text)) & API.keys()) - {name}
    return found.union(*(sections(other) for other in referred))


@pytest.mark.parametrize("name", API)
def test_public_docstring_has_its_sections(name: str) -> None:
    wanted = {"Parameters"} if API[name] else set()
    if not isinstance(lookup(name), type):
        wanted |= {"Returns", "Raises"}
    if name.endswith(("_forward", "_backward")):
        wanted = set()  # they speak of the public function that documents the arrays
    assert inspect.getdoc(lookup(name))
    assert wanted <= sections(name)


@pytest.mark.parametrize("path", PACKAGE, ids=named)
def test_only_our_errors_are_raised(path: Path) -> None:
    """Where ops are made and wired, a built-in error may tell their author what is wrong."""
    tree = ast.parse(path.read_text())
    assert not [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Assert)], "raise an error"
    if path.stem in ("op", "call", "signature", "source", "tape"):
        return
    raised = [n.exc for n in ast.walk(tree) if isinstance(n, ast.Raise) and n.exc is not None]
    names = [
        node.func.id
        for node in raised
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    control = {"SystemExit", "KeyboardInterrupt"}
    if any(isinstance(n, ast.FunctionDef) and n.name == "__getattr__" for n in ast.walk(tree)):
        control.add("AttributeError")  # what Python asks of a module's __getattr__
    assert not [name for name in names if hasattr(builtins, name) and name not in control]


@pytest.mark.parametrize("path", PACKAGE, ids=named)
def test_compilers_can_trace_calls(path: Path) -> None:
    """The compiler of torch 2.11 does not know locals()."""
    assert not re.search(r"\blocals\(", path.read_text()), "pass arguments by name"


@pytest.mark.parametrize("path", PACKAGE, ids=named)
def test_no_code_is_read_from_data(path: Path) -> None:
    text = path.read_text()
    if not re.search(r"pickle|dill|marshal|shelve|joblib|eval|exec|load\b", text, re.I):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", "") or ""]
            found = {"pickle", "cPickle", "dill", "marshal", "shelve", "joblib"} & set(names)
            assert not found, node.lineno
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            written_here = path.name == "call.py"  # from the names of an op's parameters
            assert called not in ("eval", "exec", "torch.load") or written_here, node.lineno
            assert not any(word.arg == "allow_pickle" for word in node.keywords), node.lineno


def is_text(call: ast.Call) -> bool:
    """Say whether a call opens, reads or writes text."""
    name, mode = ast.unparse(call.func), call.args[-1] if call.args else None
    if any(word.arg == "text" and ast.unparse(word.value) == "True" for word in call.keywords):
        return True  # of a process
    if re.search(r"(?<!os)(\.|^)open$", name):
        return not (isinstance(mode, ast.Constant) and "b" in str(mode.value))
    return name.endswith((".read_text", ".write_text"))


def test_text_says_its_encoding() -> None:
    """The locale's is another on another system, and ASCII where NVRTC 12.0 has compiled."""
    silent = []
    for path in [*PACKAGE, ROOT / "tests/cuda_on_cpu/build.py"]:
        text = path.read_text(encoding="utf-8")
        if re.search(r"_text\(|open\(|text=True", text):
            nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
            several = (node for node in nodes if is_text(node))
            given = ((call, {word.arg for word in call.keywords}) for call in several)
            silent += [f"{named(path)}:{c.lineno}" for c, words in given if "encoding" not in words]
    assert silent == []


def test_import_is_light() -> None:
    heavy = "torch jax cupy click rich matplotlib tokenizers"
    program = f"import sys, unsloth_cupy; print(*(m for m in {heavy.split()} if m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


@pytest.mark.parametrize("path", KERNELS, ids=named)
def test_kernel_opens_with_its_maths(path: Path) -> None:
    header = re.match(r"(//.*\n)+", path.read_text())
    assert header, "open with a header comment"
    missing = [word for word in ("=", "traffic", "constants") if word not in header[0]]
    assert not missing


@pytest.mark.parametrize("path", KERNELS + HEADERS, ids=named)
def test_kernel_source_speaks_of_the_gpu_alone(path: Path) -> None:
    text = path.read_text()
    assert text.startswith("//"), "open with a header comment"
    of_others = r"emu(lat|_)|\bcpu\b|__CUDACC(?!_VER)|__GNUC__|twin"
    assert not re.search(of_others, text, re.I), "the twin headers are the place for that"
    home = path.name in ("ptx.cuh", "hopper.cuh")
    assert home or not re.search(r"\basm\b", text), "PTX belongs in ptx.cuh and hopper.cuh"


def test_no_machine_paths() -> None:
    pattern = re.compile("|".join(f"/{name}/" for name in ("work", "opt", "root", "home")))
    found = {
        named(path): hit[0]
        for path in text_files()
        if (hit := pattern.search(path.read_text(encoding="utf-8", errors="replace")))
    }
    assert found == {}


@pytest.mark.parametrize("path", TESTS, ids=named)
def test_wide_tolerances_have_a_reason(path: Path) -> None:
    """Kernels have their rule in parity.py; what is wide elsewhere says why, on its line."""
    wide = re.compile(r"\b(atol|rtol|abs|rel)\s*=\s*[^,)]*(e-[0-3]\b|\b0\.\d)")
    lines = enumerate(path.read_text().splitlines(), 1)
    assert not [f"{i}: {line}" for i, line in lines if wide.search(line) and "  # " not in line]


@pytest.mark.parametrize("path", TESTS, ids=named)
def test_every_skip_has_a_reason(path: Path) -> None:
    tree = ast.parse(path.read_text())
    classes = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
    at_import = [n for c in classes for n in c.body if isinstance(n, ast.Assign)]
    assert not [n.lineno for n in at_import if "importorskip" in ast.unparse(n)], (
        "this skips the whole module, not the class: use a fixture"
    )
    calls = {id(n.func): n for n in ast.walk(tree) if isinstance(n, ast.Call)}
    skips = ("mark.skip", "mark.skipif", "mark.xfail", "importorskip", "skip", "xfail")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in [f"pytest.{s}" for s in skips]:
            call = calls.get(id(node))
            given = call is not None and any(word.arg == "reason" for word in call.keywords)
            said = call is not None and ast.unparse(node) == "pytest.skip" and call.args
            assert given or said, f"line {node.lineno}: {ast.unparse(node)} gives no reason"
