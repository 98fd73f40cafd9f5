"""What the hardware is told: 16-byte accesses, asynchronous copies, tensor cores, no local memory.

Each kernel shows one variant for one architecture, another every day;
UNSLOTH_CUPY_ALL_VARIANTS=1 asks for all.
"""

import functools
import importlib.metadata
import re
import subprocess
from pathlib import Path

import pytest

from . import budget
from .variants import ALL, ARCHITECTURES, TODAY, Variant, constants, declared, of_kernel

if (reason := budget.missing()) is not None:
    pytest.skip(reason, allow_module_level=True)

SIZES = {"__half": 2, "__nv_bfloat16": 2, "float": 4}
READ, WRITE, COPY = "LDG.E.128", "STG.E.128", "LDGSTS.E.*128"  # of 16 bytes a thread
PRODUCT = "HMMA.16816"
# Kernels that do otherwise, what they show instead, and why.
OTHERS = {
    "cross_entropy_forward": (READ,),  # a row gives two numbers
    "attention_forward": (COPY, PRODUCT),  # reads go to shared memory; results leave by fragments
    "attention_decode": (COPY, PRODUCT),
    "attention_backward": (COPY, PRODUCT),
    "attention_bias": (COPY, PRODUCT),
    "attention_delta": (READ,),  # a row gives two numbers
    "attention_sum": (),  # a thread adds what neighbours of it read
    "measure": (),  # a table of tensors of all dtypes: four values, which are 16 bytes of float32
    "rescale": (),
    "loss_scaler": (),  # three numbers
    "embedding_starts": (),  # one index a thread
    "column_sum": (),  # a warp reads 32 neighbouring columns of float32: 128 bytes all the same
}


@functools.cache
def nvdisasm() -> Path:
    """Return the disassembler of the wheel; skip without it."""
    try:
        files = importlib.metadata.files("nvidia-cuda-nvdisasm") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs the extra `sass` (nvidia-cuda-nvdisasm)")
    return Path(str(next(f.locate() for f in files if f.name in ("nvdisasm", "nvdisasm.exe"))))


def instructions(variant: Variant, folder: Path) -> list[str]:
    """Return the instructions of the kernel, with their modifiers and without their operands."""
    cubin = folder / "unit.cubin"
    with budget.without_a_device():
        made, _ = budget.cubin(variant.launch.source, variant.launch.options, variant.arch)
    cubin.write_bytes(made + b"\0")  # CuPy drops the last byte, and nvdisasm misses it
    command = [nvdisasm(), "-c", cubin]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    section = re.search(rf"\.text\.{variant.kernel}:\n(.*?)(?=^\.text\.|\Z)", text, re.M | re.S)
    assert section is not None, text[:1000]
    return re.findall(r"^\s*/\*\w+\*/\s+(?:@!?\w+ )?([A-Z][\w.]*)", section[1], re.M)


def whole(variant: Variant) -> bool:
    """Say whether a variant accesses 16 bytes at a time."""
    given = constants(variant.launch.source)
    size = SIZES[given.get("T", "float")]
    return int(given.get("LANES", 16 // size)) * size == 16


@pytest.mark.parametrize("kernel", declared())
def test_the_hardware_is_told(kernel: str, tmp_path: Path) -> None:
    nvdisasm()
    archs = ARCHITECTURES if ALL else (ARCHITECTURES[TODAY % len(ARCHITECTURES)],)
    several = [v for arch in archs for v in of_kernel(kernel, arch) if whole(v)]
    for variant in several if ALL else several[TODAY % len(several) :][:1]:
        found = instructions(variant, tmp_path)
        local = {name for name in found if name.startswith(("LDL", "STL"))}
        assert not local, variant
        wanted = OTHERS.get(kernel, (READ, WRITE))
        if constants(variant.launch.source).get("T") == "float":
            wanted = tuple(name for name in wanted if name != PRODUCT)  # FMAs, for accuracy
        missing = [name for name in wanted if not any(re.match(name, each) for each in found)]
        assert not missing, f"{variant}: {sorted({*found})}"


def test_the_disassembler_is_read(tmp_path: Path) -> None:
    slow = next(v for v in of_kernel("add", "90") if not whole(v))
    found = instructions(slow, tmp_path)
    assert "EXIT" in found
    assert not any(name.startswith((READ, WRITE)) for name in found)
