"""What kernels may take of an SM: ``[kernels]`` of ``costs.toml``, reviewed when it changes.

    python -m tests.budget --write [KERNEL ...]      renews it, all or the lines of some kernels

and the table of docs/performance.md, which has a row for every op with a kernel.

A line says what a variant takes, by architectures: registers of a thread, bytes of static and of
dynamic shared memory, and the share of an SM's threads that can be resident, in percent.
"""

import functools
import json
import re
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from unsloth_cupy.bench import report
from unsloth_cupy.core.source import source_root
from unsloth_cupy.profiling import binary

from . import table
from .cuda_on_cpu.build import kept_file
from .stand_in import Launch
from .variants import ARCHITECTURES, Variant, constants, variants

PAGE = Path(__file__).parent.parent / "docs/performance.md"
HEAD = """\
# What every variant of a kernel takes: registers of a thread, bytes of static and of dynamic shared
# memory, occupancy in percent.  Written by python -m tests.budget --write; the reasons by hand.
"""
REPORT = tuple(f"--ptxas-options={o}" for o in ("-v", "-warn-spills", "-warn-lmem-usage"))
SILENCE = re.compile(  # what ptxas says where all is well
    r"(ptxas info +: (\d+ bytes gmem|Compiling entry function|Function properties for|"
    r"Used \d+ registers|Compile time =|Overriding maximum register limit)|"
    r"ptxas +\. +\d+ bytes stack frame)"
)
# A thread gets registers by so many.  NVRTC does not give every run the same: of one source, 133,
# 134 and 138 in 60 runs.
REGISTER_UNIT = 8
Lines = dict[str, dict[str, dict[str, list[int]]]]  # kernel, label, architecture: numbers


class Resources(NamedTuple):
    """What ptxas says of a kernel: bytes but for registers, and lines that are not routine."""

    registers: int
    shared: int
    local: int
    spilled: int
    complaints: tuple[str, ...]


def missing() -> str | None:
    """Return why nothing can be compiled here, or None."""
    try:
        compiler_version()
    except (ImportError, RuntimeError) as error:
        return f"needs cupy-cuda12x and nvidia-cuda-nvrtc-cu12: {error}"
    return None


def cubin(source: str, options: tuple[str, ...], arch: str) -> tuple[bytes, str]:
    """Compile as cupy.RawModule does on a device of this architecture; return ptxas's log too."""
    return binary.compiled(source, int(arch), REPORT, options)


def compiler_version() -> str:
    """Return the version of NVRTC."""
    return "{}.{}".format(*binary.version())


def read_log(log: str) -> dict[str, Resources]:
    """Return the resources of every kernel that ptxas speaks of, and what it complains of."""
    found = binary.read_log(log)
    lines = [line for line in log.replace("\0", "").splitlines() if line.strip()]
    lines = [line for line in lines if not SILENCE.match(line)]
    by_kernel = {}
    for name, used in found.items():
        others = [f"'{other}'" for other in found if other != name]
        own = (line for line in lines if not any(other in line for other in others))
        by_kernel[name] = Resources(*used, tuple(own))
    return by_kernel


def _closure(text: str, seen: dict[str, str]) -> dict[str, str]:
    """Return the sources that a text includes, and those that they include."""
    for name in re.findall(r'^#include "([^"]+)"', text, re.M):
        if name not in seen:
            seen[name] = (source_root() / name).read_text()
            _closure(seen[name], seen)
    return seen


def told(source: str, options: Iterable[str], arch: str, *more: Any) -> bytes:
    """Return all that the binary of a translation unit is made of: what is kept is found by it."""
    unit = re.sub(r"^// kernels_cu \w+\n", "", source)  # the digest of all sources
    found = [compiler_version(), arch, *more, unit, sorted(_closure(unit, {}).items())]
    found.append([option for option in options if not option.startswith("-I")])
    return json.dumps(found).encode()


@functools.cache
def _read(log: Path) -> dict[str, Resources]:
    return read_log(log.read_text())


def resources(launch: Launch, arch: str) -> Resources:
    """Return what the kernel of a launch takes; kept by what its source includes."""

    def build(folder: Path) -> Path:
        log = folder / "log"
        log.write_text(cubin(launch.source, launch.options, arch)[1])
        return log

    key = told(launch.source, launch.options, arch, REPORT)
    return _read(kept_file("ptxas", key, build, ".txt"))[launch.kernel]


def kept(variant: Variant) -> bool:
    """Say whether the table has a line for a variant: float16 takes what bfloat16 takes."""
    return constants(variant.launch.source).get("T") != "__half"


def numbers(variant: Variant) -> list[int]:
    """Return what the table keeps of a variant."""
    used, launch = resources(variant.launch, variant.arch), variant.launch
    shared = used.shared + launch.shared
    share = binary.occupancy(int(variant.arch), used.registers, shared, launch.threads)
    return [used.registers, used.shared, launch.shared, share]


def read() -> tuple[dict[str, Any], Lines]:
    """Return the head of the part, and its numbers by kernel, variant and architecture."""
    head = table.read("kernels")
    lines = {
        kernel: {
            label: {arch: found for archs, found in by.items() for arch in archs.split()}
            for label, by in several.items()
        }
        for kernel, several in head.pop("variants").items()
    }
    return head, lines


def text(head: dict[str, Any], lines: Lines) -> Iterator[str]:
    """Return the lines of the part."""
    yield HEAD + f'compiler = "{head["compiler"]}"'
    yield "\n[kernels.reasons]  # why no more than half of an SM's threads are resident"
    yield from table.reason_lines(head["reasons"])
    for kernel in sorted(lines):
        yield f"\n[kernels.variants.{kernel}]"
        for label, by in sorted(lines[kernel].items(), key=table.order):
            yield f'"{label}" = {{ {", ".join(table.by_architecture(by))} }}'


def write(kernels: Iterable[str] = ()) -> None:
    """Renew the lines of these kernels, or all."""
    head, lines = read()
    asked = [v for arch in ARCHITECTURES for v in variants(arch) if kept(v)]
    known = {v.kernel for v in asked}
    if strange := set(kernels) - known:
        sys.exit(f"there is no kernel {strange}; choose from {sorted(known)}")
    chosen = set(kernels) or known
    lines = {kernel: several for kernel, several in lines.items() if kernel in known - chosen}
    head["compiler"] = compiler_version()
    with ThreadPoolExecutor(4) as pool:
        wanted = [v for v in asked if v.kernel in chosen]
        for variant, found in zip(wanted, pool.map(numbers, wanted), strict=True):
            by = lines.setdefault(variant.kernel, {}).setdefault(variant.label, {})
            by[variant.arch] = found
    used = ((variant, resources(variant.launch, variant.arch)) for variant in wanted)
    if spilled := [str(variant) for variant, each in used if each.spilled or each.local]:
        sys.exit(f"these use local memory, and nothing is written: {', '.join(spilled)}")
    table.replace("kernels", text(head, lines))
    report.renew(PAGE)


if __name__ == "__main__":
    if sys.argv[1:2] != ["--write"]:
        sys.exit(__doc__)
    write(sys.argv[2:])
