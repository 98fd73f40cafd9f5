"""The resources that each kernel may use on an SM: ``[kernels]`` of ``costs.toml``.

    python -m tests.code.programs.budget --write [KERNEL ...]    rewrites all lines, or some

It also rewrites the table of docs/performance.md, which has a row for every op with a kernel.
Review the difference before you commit it.

A line has the numbers of one variant of a kernel, by architecture: registers of a thread, bytes of
static and of dynamic shared memory, and occupancy (the percentage of an SM's threads that can be
resident).
"""

import json
import pickle
import re
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from unsloth_cupy.core.source import source_root
from unsloth_cupy.profiling import binary

from ...machines.cuda_on_cpu.build import kept_file
from ...machines.stand_in import Launch
from . import costs_file, performance
from .variants import ARCHITECTURES, Variant, constants, variants

PAGE = Path(__file__).parents[3] / "docs/performance.md"
HEAD = """\
# The resources of every variant of a kernel: registers of a thread, bytes of static and of dynamic
# shared memory, occupancy in percent.  All but the reasons is written by
# python -m tests.code.programs.budget --write.
"""
REPORT = tuple(f"--ptxas-options={o}" for o in ("-v", "-warn-spills", "-warn-lmem-usage"))
SILENCE = re.compile(  # lines that ptxas also prints when nothing is wrong
    r"(ptxas info +: (\d+ bytes gmem|Compiling entry function|Function properties for|"
    r"Used \d+ registers|Compile time =|Overriding maximum register limit)|"
    r"ptxas +\. +\d+ bytes stack frame)"
)
# The hardware allocates a thread's registers in multiples of this.  NVRTC does not use the same
# number in every run: 133, 134 and 138 for one source in 60 runs.
REGISTER_UNIT = 8
Lines = dict[str, dict[str, dict[str, list[int]]]]  # kernel, label, architecture: numbers


class Resources(NamedTuple):
    """ptxas's report on a kernel: registers, then bytes, and the lines that are not routine."""

    registers: int
    shared: int
    local: int
    spilled: int
    complaints: tuple[str, ...]


def missing() -> str | None:
    """Return the reason why kernels cannot be compiled here, or None."""
    try:
        compiler_version()
    except (ImportError, RuntimeError) as error:
        return f"needs cupy-cuda12x and nvidia-cuda-nvrtc-cu12: {error}"
    return None


def compiler_version() -> str:
    """Return the version of NVRTC."""
    return "{}.{}".format(*binary.version())


def read_log(log: str) -> dict[str, Resources]:
    """Return the resources of every kernel in a log of ptxas, and the warnings about it."""
    reported = binary.read_log(log)
    lines = [line for line in log.replace("\0", "").splitlines() if line.strip()]
    lines = [line for line in lines if not SILENCE.match(line)]
    by_kernel = {}
    for name, used in reported.items():
        others = [f"'{other}'" for other in reported if other != name]
        own = (line for line in lines if not any(other in line for other in others))
        by_kernel[name] = Resources(*used, tuple(own))
    return by_kernel


def _closure(text: str, seen: dict[str, str]) -> dict[str, str]:
    """Return the sources that a text includes, directly or through other sources."""
    for name in re.findall(r'^#include ["<](.+\.cuh?)[">]', text, re.M):
        if name not in seen:
            seen[name] = (source_root() / name).read_text()
            _closure(seen[name], seen)
    return seen


def cache_key(source: str, options: Iterable[str], arch: str, *more: Any) -> bytes:
    """Return all that determines the binary of a translation unit: the key of cached results."""
    unit = re.sub(r"^// kernels_cu \w+\n", "", source)  # the digest of all sources
    parts = [compiler_version(), arch, *more, unit, sorted(_closure(unit, {}).items())]
    parts.append([option for option in options if not option.startswith("-I")])
    return json.dumps(parts).encode()


def cubin(source: str, options: tuple[str, ...], arch: str) -> tuple[bytes, str]:
    """Return the cubin that cupy.RawModule makes for this architecture, and ptxas's log.

    Both are cached on disk by the sources that this one includes.
    """

    def build(folder: Path) -> Path:
        path = folder / "unit"
        path.write_bytes(pickle.dumps(binary.compiled(source, int(arch), REPORT, options)))
        return path

    path = kept_file("cubin", cache_key(source, options, arch, REPORT), build, ".pickle")
    made: tuple[bytes, str] = pickle.loads(path.read_bytes())
    return made


def resources(launch: Launch, arch: str) -> Resources:
    """Return the resources of the kernel of a launch."""
    return read_log(cubin(launch.source, launch.options, arch)[1])[launch.kernel]


def kept(variant: Variant) -> bool:
    """Return whether the table has a line for a variant: float16 uses the same as bfloat16."""
    return constants(variant.launch.source).get("T") != "__half"


def numbers(variant: Variant) -> list[int]:
    """Return the numbers of a variant in the table."""
    used, launch = resources(variant.launch, variant.arch), variant.launch
    shared = used.shared + launch.shared
    share = binary.occupancy(int(variant.arch), used.registers, shared, launch.threads)
    return [used.registers, used.shared, launch.shared, share]


def read() -> tuple[dict[str, Any], Lines]:
    """Return the header of ``[kernels]``, and its numbers by kernel, variant and architecture."""
    head = costs_file.read("kernels")
    lines = {
        kernel: {
            label: {arch: values for archs, values in by.items() for arch in archs.split()}
            for label, by in labels.items()
        }
        for kernel, labels in head.pop("variants").items()
    }
    return head, lines


def text(head: dict[str, Any], lines: Lines) -> Iterator[str]:
    """Yield the lines of ``[kernels]``."""
    yield HEAD + f'compiler = "{head["compiler"]}"'
    yield "\n[kernels.reasons]  # why only half of an SM's threads, or fewer, are resident"
    yield from costs_file.reason_lines(head["reasons"])
    for kernel in sorted(lines):
        yield f"\n[kernels.variants.{kernel}]"
        for label, by in sorted(lines[kernel].items(), key=costs_file.order):
            yield f'"{label}" = {{ {", ".join(costs_file.by_architecture(by))} }}'


def write(kernels: Iterable[str] = ()) -> None:
    """Rewrite the lines of these kernels, or all lines."""
    head, lines = read()
    every = [v for arch in ARCHITECTURES for v in variants(arch) if kept(v)]
    known = {v.kernel for v in every}
    if unknown := set(kernels) - known:
        sys.exit(f"there is no kernel {unknown}; choose from {sorted(known)}")
    chosen = set(kernels) or known
    lines = {kernel: labels for kernel, labels in lines.items() if kernel in known - chosen}
    head["compiler"] = compiler_version()
    with ThreadPoolExecutor(4) as pool:
        selected = [v for v in every if v.kernel in chosen]
        for variant, values in zip(selected, pool.map(numbers, selected), strict=True):
            by = lines.setdefault(variant.kernel, {}).setdefault(variant.label, {})
            by[variant.arch] = values
    used = ((variant, resources(variant.launch, variant.arch)) for variant in selected)
    if spilled := [str(variant) for variant, each in used if each.spilled or each.local]:
        sys.exit(f"the table is not written, as these use local memory: {', '.join(spilled)}")
    costs_file.replace("kernels", text(head, lines))
    performance.renew(PAGE)


if __name__ == "__main__":
    if sys.argv[1:2] != ["--write"]:
        sys.exit(__doc__)
    write(sys.argv[2:])
