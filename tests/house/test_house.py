"""The conventions of docs/architecture.md, as assertions that name whatever breaks them."""

import ast
import builtins
import functools
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import unsloth_cupy  # noqa: F401  every op registers itself
from unsloth_cupy.bench.cases import forward_ops
from unsloth_cupy.core.dtypes import DIFFERENTIABLE
from unsloth_cupy.core.op import OPS

from ..harness.tracked import ROOT, tracked

PACKAGE, TESTS = tracked("unsloth_cupy/**/*.py"), tracked("tests/**/*.py")
KERNELS, HEADERS = tracked("kernels_cu/**/*.cu"), tracked("kernels_cu/**/*.cuh")
MACHINE_ROOM = tracked("unsloth_cupy/core/*.py")
TEXT = {".py", ".cu", ".cuh", ".hpp", ".cpp", ".h", ".md", ""}
TEXT |= {".cfg", ".toml", ".yaml", ".yml", ".json", ".cff"}

# The public names as other people's programs call them: parameters, their order and defaults.
API = {
    "AttentionConfig": "tile=128, block=256, head_dim=64, warpgroups=True",
    "check_errors": "",
    "Tape": "",
    "AdamW": "parameters, *, lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.01,"
    " state_bits=32",
    "Muon": "parameters, *, lr=0.001, momentum=0.95, nesterov=True, weight_decay=0.1,"
    " adjust='original'",
    "Adafactor": "parameters, *, lr=0.01, beta2_decay=-0.8, eps=(None, 0.001), d=1.0,"
    " weight_decay=0.0",
    "Lion": "parameters, *, lr=0.0001, betas=(0.9, 0.99), weight_decay=0.0",
    "ScheduleFreeAdamW": "parameters, *, lr=0.0025, betas=(0.9, 0.999), eps=1e-08,"
    " weight_decay=0.0, warmup=0",
    "clip_gradients": "gradients, max_norm",
    "LossScaler": "scale=65536.0, *, dynamic=True, growth=2.0, backoff=0.5, interval=2000,"
    " minimum=1.0, maximum=2147483648.0",
    "cosine_schedule": "step, *, lr, warmup, steps, minimum=0.0, cycles=1",
    "polynomial_schedule": "step, *, lr, warmup, steps, minimum=0.0, power=1.0",
    "inverse_sqrt_schedule": "step, *, lr, warmup, steps, minimum=0.0, timescale=None",
    "warmup_stable_decay_schedule": (
        "step, *, lr, warmup, steps, minimum=0.0, decay, shape='cosine'"
    ),
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
for _path in tracked("tests/ops/test_*.py"):
    for _node in ast.parse(_path.read_text()).body:
        if isinstance(_node, ast.Assign) and ast.unparse(_node.targets[0]) == "PUBLIC":
            _calls = ast.literal_eval(_node.value)
            API |= {call.partition("(")[0]: call.partition("(")[2][:-1] for call in _calls}


def named(path: Path) -> str:
    """Return a path as test reports show it."""
    return path.relative_to(ROOT).as_posix()


@functools.cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Return every node of a module's syntax tree."""
    return tuple(ast.walk(ast.parse(text_of(path))))


def check(rule: Callable[[Path], Iterable[str]], paths: Iterable[Path]) -> None:
    """Fail with all violations of a rule, each with its file."""
    if problems := [f"{named(path)}: {problem}" for path in paths for problem in rule(path)]:
        pytest.fail("\n".join(problems), pytrace=False)


def lookup(name: str) -> object:
    """Return a public name of the table above."""
    module, _, last = f"unsloth_cupy.{name}".rpartition(".")
    return getattr(importlib.import_module(module), last)


# ---- modules ----------------------------------------------------------------------------------
def test_functions_of_the_machine_room_are_short() -> None:
    """No body is longer than 40 lines."""
    nodes = [node for path in MACHINE_ROOM for node in nodes_of(path)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    assert [f.name for f in functions if f.body[-1].end_lineno - f.body[0].lineno >= 40] == []


# Where ops are defined and wired, a built-in error may tell their author what is wrong.
WIRING = ("op", "call", "signature", "source", "tape")


def foreign_errors(path: Path) -> Iterator[str]:
    """Yield assertions and built-in errors that a module raises."""
    nodes = nodes_of(path)
    yield from (f"line {n.lineno}: raise an error" for n in nodes if isinstance(n, ast.Assert))
    allowed = {"SystemExit", "KeyboardInterrupt"}
    expected = {"__getattr__": "AttributeError", "find_spec": "ModuleNotFoundError"}  # by Python
    functions = {n.name for n in nodes if isinstance(n, ast.FunctionDef)}
    allowed |= {error for name, error in expected.items() if name in functions}
    for node in nodes:
        error = node.exc if isinstance(node, ast.Raise) else None
        if isinstance(error, ast.Call) and isinstance(error.func, ast.Name):
            name = error.func.id
            if hasattr(builtins, name) and name not in allowed and path.stem not in WIRING:
                yield f"line {node.lineno}: {name} is not one of unsloth_cupy.errors"


def test_only_our_errors_are_raised() -> None:
    check(foreign_errors, PACKAGE)


def test_compilers_can_trace_calls() -> None:
    """The compiler of torch 2.11 does not know locals(): pass arguments by name."""
    assert [named(path) for path in PACKAGE if re.search(r"\blocals\(", text_of(path))] == []


def code_from_data(path: Path) -> Iterator[str]:
    """Yield imports and calls that turn data into code."""
    if not re.search(r"pickle|dill|marshal|shelve|joblib|eval|exec|load\b", text_of(path), re.I):
        return
    for node in nodes_of(path):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = {alias.name for alias in node.names} | {getattr(node, "module", "") or ""}
            for name in {"pickle", "cPickle", "dill", "marshal", "shelve", "joblib"} & names:
                yield f"line {node.lineno}: import {name}"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            generated = path.name == "call.py"  # written from the names of an op's parameters
            if called in ("eval", "exec", "torch.load") and not generated:
                yield f"line {node.lineno}: {called}"
            if any(word.arg == "allow_pickle" for word in node.keywords):
                yield f"line {node.lineno}: allow_pickle"


def test_no_code_is_read_from_data() -> None:
    check(code_from_data, PACKAGE)


def is_text(call: ast.Call) -> bool:
    """Return whether a call opens, reads or writes text."""
    name, mode = ast.unparse(call.func), call.args[-1] if call.args else None
    if any(word.arg == "text" and ast.unparse(word.value) == "True" for word in call.keywords):
        return True  # of a process
    if re.search(r"(?<!os)(\.|^)open$", name):
        return not (isinstance(mode, ast.Constant) and "b" in str(mode.value))
    return name.endswith((".read_text", ".write_text"))


def implicit_encodings(path: Path) -> Iterator[str]:
    """Yield calls that read or write text in the locale's encoding."""
    if re.search(r"_text\(|open\(|text=True", text_of(path)):
        calls = [node for node in nodes_of(path) if isinstance(node, ast.Call)]
        for call in filter(is_text, calls):
            if not any(word.arg == "encoding" for word in call.keywords):
                yield f"line {call.lineno}: pass encoding"


def test_text_has_an_encoding() -> None:
    """The locale's differs between systems, and is ASCII where NVRTC 12.0 has compiled."""
    check(implicit_encodings, [*PACKAGE, ROOT / "tests/machines/cuda_on_cpu/build.py"])


def test_import_is_light() -> None:
    heavy = "torch jax cupy click rich matplotlib tokenizers"
    program = f"import sys, unsloth_cupy; print(*(m for m in {heavy.split()} if m in sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_star_import_replaces_no_builtin() -> None:
    names: dict[str, Any] = {}
    exec("from unsloth_cupy import *", names)
    assert {"rms_norm", "rms_norm_forward", "KVCache", "explain"} <= names.keys()
    assert [n for n, v in names.items() if inspect.ismodule(v) or hasattr(builtins, n)] == []
    assert {name for name in API if "." not in name} - names.keys() == {"sum"}


# ---- ops and public names ---------------------------------------------------------------------
def without_gradient(name: str) -> str | None:
    """Return the reason why an op has no gradient, or None."""
    return OPS[name].facts.get("no_gradient")


def test_ops_have_tests() -> None:
    tests = "\n".join(text_of(path) for path in TESTS if path.name.startswith("test_"))
    missing = []
    for name in forward_ops():
        public = name.removesuffix("_forward")
        call = rf"\b{public.strip('_')}_?\("
        proof = rf'op = "{name}"' if without_gradient(name) is None else call
        if not re.search(proof, tests, re.I):
            missing.append(f"write tests/ops/test_{public}.py")
    assert missing == []


def test_ops_have_gradients() -> None:
    for name in forward_ops():
        differentiable = any(o.kind in DIFFERENTIABLE for o in OPS[name].contract.inputs)
        expected = differentiable and without_gradient(name) is None
        assert (OPS[name].backward is not None) == expected, name


@pytest.mark.parametrize("name", API)
def test_public_signature(name: str) -> None:
    """Keywords may stand in any order, and more of them may be added."""
    value: Any = lookup(name)
    actual = inspect.signature(value).parameters
    expected = inspect.signature(eval(f"lambda {API[name]}: None")).parameters
    keyword = inspect.Parameter.KEYWORD_ONLY
    positional = [[n for n, p in side.items() if p.kind != keyword] for side in (actual, expected)]
    assert positional[0] == positional[1]
    for parameter in expected.values():
        assert actual[parameter.name].kind == parameter.kind, parameter.name
        default = parameter.default
        assert default in (inspect.Parameter.empty, actual[parameter.name].default), parameter.name


def sections(name: str) -> set[str]:
    """Return the sections of a docstring, and of those of the public names that it refers to."""
    text = inspect.getdoc(lookup(name)) or ""
    titles = set(re.findall(r"^(\w+)\n-+$", text, re.M))
    referred = (set(re.findall(r"``(\w+)``", text)) & API.keys()) - {name}
    return titles.union(*(sections(other) for other in referred))


@pytest.mark.parametrize("name", API)
def test_public_docstring_has_its_sections(name: str) -> None:
    expected = {"Parameters"} if API[name] else set()
    if not isinstance(lookup(name), type):
        expected |= {"Returns", "Raises"}
    if name.endswith(("_forward", "_backward")):
        expected = set()  # they refer to the public function, which documents the arrays
    assert inspect.getdoc(lookup(name))
    assert expected <= sections(name)


# ---- kernels ----------------------------------------------------------------------------------
def missing_from_header(path: Path) -> Iterator[str]:
    """Yield what the header comment of a kernel lacks."""
    header = re.match(r"(//.*\n)+", text_of(path))
    words = ("=", "traffic", "constants")
    yield from (word for word in words if header is None or word not in header[0])


def test_kernels_open_with_their_maths() -> None:
    check(missing_from_header, KERNELS)


def not_of_a_gpu(path: Path) -> Iterator[str]:
    """Yield what a kernel source says of other machines, and assembly outside of its headers."""
    text = text_of(path)
    if not text.startswith("//"):
        yield "open with a header comment"
    if hit := re.search(r"emu(lat|_)|\bcpu\b|__CUDACC(?!_VER)|__GNUC__|twin", text, re.I):
        yield f"{hit[0]}: the twin headers are the place for that"
    if path.name not in ("ptx.cuh", "hopper.cuh") and re.search(r"\basm\b", text):
        yield "PTX belongs in ptx.cuh and hopper.cuh"


def test_kernel_sources_speak_only_of_the_gpu() -> None:
    check(not_of_a_gpu, KERNELS + HEADERS)


# ---- every file, and tests --------------------------------------------------------------------
def test_no_machine_paths() -> None:
    pattern = re.compile("|".join(f"/{name}/" for name in ("work", "opt", "root", "home")))
    hits = {named(path): pattern.search(text_of(path)) for path in tracked() if path.suffix in TEXT}
    assert {name: hit[0] for name, hit in hits.items() if hit} == {}


def wide_tolerances(path: Path) -> Iterator[str]:
    """Yield lines that set a wide tolerance without a reason beside it."""
    wide = re.compile(r"\b(atol|rtol|abs|rel)\s*=\s*[^,)]*(e-[0-3]\b|\b0\.\d)")
    for number, line in enumerate(text_of(path).splitlines(), 1):
        if wide.search(line) and "  # " not in line:
            yield f"line {number}: {line}"


def test_wide_tolerances_have_a_reason() -> None:
    """Kernels have their rule in parity.py; a wide tolerance elsewhere has a reason on its line."""
    check(wide_tolerances, TESTS)


SKIPS = [
    f"pytest.{name}"
    for name in ("skip", "xfail", "importorskip", "mark.skip", "mark.skipif", "mark.xfail")
]


def unexplained_skips(path: Path) -> Iterator[str]:
    """Yield skips without a reason, and those that skip more than they seem to."""
    nodes = nodes_of(path)
    for assignment in (n for c in nodes if isinstance(c, ast.ClassDef) for n in c.body):
        if isinstance(assignment, ast.Assign) and "importorskip" in ast.unparse(assignment):
            yield f"line {assignment.lineno} skips the whole module, not the class: use a fixture"
    calls = {id(n.func): n for n in nodes if isinstance(n, ast.Call)}
    for node in nodes:
        if isinstance(node, ast.Attribute) and (name := ast.unparse(node)) in SKIPS:
            call = calls.get(id(node))
            explained = call and any(word.arg == "reason" for word in call.keywords)
            if not (explained or (call and name == "pytest.skip" and call.args)):
                yield f"line {node.lineno}: {name} gives no reason"


def test_every_skip_has_a_reason() -> None:
    check(unexplained_skips, TESTS)
