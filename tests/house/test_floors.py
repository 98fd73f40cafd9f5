"""Every arrow of the house runs downhill: a room imports those on lower floors, and no others."""

import ast
import functools
import graphlib
import re

from ..harness.tracked import ROOT, tracked

PACKAGE = ROOT / "unsloth_cupy"
FLOORS = (  # the ground first; rooms of one floor do not know each other
    ("errors", "_version", "starting"),
    ("files",),
    ("pictures", "kernel_cache"),
    ("core",),
    ("placement",),
    ("machine",),
    ("ops",),
    ("training", "inference", "interop", "losses"),
    ("parallel",),
    ("serving",),
    ("models",),
    ("memory",),
    ("bench",),
    ("profiling",),
    ("finetune",),
    ("__init__",),  # the public names; nothing but the command line may import them
    ("cli",),
    ("__main__",),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
FINETUNE = (
    ("listener", "naming", "setting"),
    ("lora",),
    ("data",),
    ("methods",),
    ("run",),
    ("planning",),
    ("__init__",),
)
SOURCES = tracked("unsloth_cupy/**/*.py")
MODULES = {path.relative_to(PACKAGE).with_suffix("").parts: path for path in SOURCES}
Module = tuple[str, ...]


@functools.cache
def imports(module: Module) -> list[Module]:
    """Return the modules that one imports: at its top, inside functions, or for types alone."""
    imported = []
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            base = module[: len(module) - node.level]
            base += tuple((node.module or "").split(".")) * bool(node.module)
            for name in (alias.name for alias in node.names):
                known = ((*base, name), (*base, name, "__init__"), base, (*base, "__init__"))
                target = next((each for each in known if each in MODULES), None)
                assert target, f"{'/'.join(module)} imports {'.'.join(base)}: git does not track it"
                imported.append(target)
    return imported


def test_rooms_are_few() -> None:
    assert {module[0] for module in MODULES} <= FLOOR.keys()
    assert sum(len(module) == 1 for module in MODULES) <= 10


def test_arrows_run_downhill() -> None:
    uphill = [
        f"{'/'.join(module)} -> {'/'.join(other)}"
        for module in MODULES
        for other in imports(module)
        if other[0] != module[0] and FLOOR[other[0]] >= FLOOR[module[0]]
    ]
    assert uphill == []


def test_rooms_of_finetune_run_downhill() -> None:
    """``data`` knows no method and no run, ``methods`` no run."""
    floor = {room: number for number, rooms in enumerate(FINETUNE) for room in rooms}
    uphill = [
        f"{'/'.join(module)} -> {'/'.join(other)}"
        for module in MODULES
        for other in (imports(module) if module[0] == "finetune" else ())
        if other[0] == "finetune" and other[1] != module[1] and floor[other[1]] >= floor[module[1]]
    ]
    assert uphill == []


def test_files_form_no_circle() -> None:
    graphlib.TopologicalSorter({module: {*imports(module)} for module in MODULES}).prepare()


def test_private_modules_stay_in_their_folder() -> None:
    """``_x.py`` is imported by its neighbours alone."""
    strangers = [
        f"{'/'.join(module)} -> {'/'.join(other)}"
        for module in MODULES
        for other in imports(module)
        if other[-1].startswith("_") and other[-1][:2] != "__" and other[:-1] != module[:-1]
    ]
    assert [line for line in strangers if not line.endswith(" _version")] == []


def test_one_module_asks_for_cupy() -> None:
    """``core/gpu.py``: others call it, so that a stand-in and an error have one place."""
    asks = re.compile(
        r"^\s*(import|from) cupy\b|modules.{1,5}[\"']cupy[\"']|import_module\(.cupy.\)"
    )
    lines = [
        f"{'/'.join(module)}:{number}: {line.strip()}"
        for module, path in MODULES.items()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if asks.search(line)
    ]
    assert {line.partition(":")[0] for line in lines} == {"core/gpu"}, lines


def test_one_module_reads_the_part_of_a_rank() -> None:
    """Files are read whole, in slices, by rows or quantized; ``RankPart`` alone decides which."""
    read = re.compile(r"\bparts\.(?:read|read_quantized|keep)\(|\bunread\.(?:whole|rows)\(")
    rooms = (path for path in SOURCES if "models" in path.parts)
    modules = {path.name for path in rooms if read.search(path.read_text())}
    assert modules == {"rank_part.py"}
