"""Kernels through NVRTC, as CuPy calls it: they compile, and ptxas is content.

No GPU is needed.  For every variant: no warning, no spilled register, no array in local memory,
registers within the launch bounds, occupancy within its budget.  A sample for sm_80 and sm_90 by
default; UNSLOTH_CUPY_ALL_VARIANTS=1 runs them all, on every architecture.
``python -m tests.test_compile`` prints the table of resources.
"""

import functools
import io
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from unsloth_cupy import _jit
from unsloth_cupy._jit import KERNEL_DTYPES
from unsloth_cupy.errors import KernelError
from unsloth_cupy.ops import (
    _attention_launch,
    _flat,
    _rows,
    cross_entropy,
    embedding,
    layer_norm,
    rms_norm,
    rope,
)

from .hardware.primitives import PRIMITIVES, launch

cupy = pytest.importorskip("cupy", reason="needs cupy-cuda12x")
compiler = pytest.importorskip("cupy.cuda.compiler", reason="needs cupy-cuda12x")
core = pytest.importorskip("cupy._core.core", reason="needs cupy-cuda12x")
try:
    cupy.cuda.nvrtc.getVersion()
except (ImportError, RuntimeError) as error:
    pytest.skip(f"needs nvidia-cuda-nvrtc-cu12: {error}", allow_module_level=True)

ALL = bool(os.environ.get("UNSLOTH_CUPY_ALL_VARIANTS"))
ARCHITECTURES = ["80", "86", "89", "90", "100", "120"] if ALL else ["80", "90"]
EXAMPLES = Path(__file__).parent / "emulator/kernels"

# of an SM: threads, blocks, bytes of shared memory; all have 65,536 registers
LIMITS = {
    "80": (2048, 32, 164 << 10),
    "86": (1536, 16, 100 << 10),
    "89": (1536, 24, 100 << 10),
    "90": (2048, 32, 228 << 10),
    "100": (2048, 32, 228 << 10),
    "120": (1536, 24, 100 << 10),
}


class Variant(NamedTuple):
    """A kernel with its constants, its threads and the occupancy it may not fall below."""

    file: str
    kernel: str
    constants: tuple[tuple[str, Any], ...]
    threads: int
    occupancy: float
    label: str
    dynamic: int = 0  # bytes of shared memory that the launch asks for

    def __str__(self) -> str:
        return f"{self.kernel} {self.label}"


class Resources(NamedTuple):
    registers: int
    shared: int
    local: int
    spilled: int


def rms_norm_variants() -> Iterator[Variant]:
    float32 = np.dtype("float32")
    # one row length of every row of the launch table, ragged ones, and the scalar path
    lengths = [1, 7, 128, 201, 512, 4096, 4104, 8192, 16384, 32768, 131072, 131073]
    dtypes = KERNEL_DTYPES if ALL else KERNEL_DTYPES[1:]  # float16 is laid out as bfloat16
    for dtype, hidden, backward in itertools.product(dtypes, lengths, (False, True)):
        lanes = 16 // dtype.itemsize if hidden % 8 == 0 else 1
        for residual, bias, weight in itertools.product(
            (False, True), (False, True), sorted({dtype, float32}, key=str)
        ):
            extreme = residual == bias == (float32 in (weight, dtype))
            if not ALL and not extreme:
                continue
            constants = rms_norm._constants(
                dtype, weight, weight if bias else None, residual, hidden, lanes, backward
            )
            yield Variant(
                "rms_norm.cu",
                "rms_norm_backward" if backward else "rms_norm_forward",
                tuple(constants.items()),
                constants["THREADS"],
                # backward: rows and float32 sums fill the registers of 512 to 768 threads
                0.25 if backward else 0.5,
                f"{dtype} {hidden}{' residual' * residual}{' bias' * bias} weight {weight}",
            )


def column_sum_variants() -> Iterator[Variant]:
    for dtype in KERNEL_DTYPES:
        yield Variant(
            "column_sum.cu", "column_sum", (("W", dtype), ("B", dtype)), 1024, 0.5, str(dtype)
        )


FLAT = {  # file: its kernels, and constants beside those of every such file
    "swiglu.cu": (("swiglu", "swiglu_backward"), [{}]),
    "geglu.cu": (("geglu", "geglu_backward"), [{"APPROXIMATE": b} for b in (False, True)]),
    "relu2.cu": (("relu2", "relu2_backward"), [{}]),
    "arithmetic.cu": (("add", "multiply", "multiply_backward", "scale"), [{}]),
    "adamw.cu": (("adamw_",), [{"G": dtype} for dtype in KERNEL_DTYPES]),
}


def flat_variants() -> Iterator[Variant]:
    for file, (kernels, several) in FLAT.items():
        for dtype, more in itertools.product(KERNEL_DTYPES if ALL else KERNEL_DTYPES[1:], several):
            if more.get("G", dtype) not in (dtype, np.dtype("float32")):
                continue
            several_lanes = (16 // dtype.itemsize, 1) if ALL else (16 // dtype.itemsize,)
            for lanes, kernel in itertools.product(several_lanes, kernels):
                constants = _flat.constants(dtype, lanes, **more)
                # 0.5: eight values of three to four arrays fill 40 to 48 registers
                label = " ".join(str(v) for v in (dtype, lanes, *more.values()))
                yield _variant(file, kernel, constants, label)


def row_variants() -> Iterator[Variant]:
    """One row length of every row of the launch tables, ragged ones, and the scalar path."""
    int32, int64 = np.dtype("int32"), np.dtype("int64")
    lengths = [1, 7, 128, 1000, 4104, 8192, 16384, 32768, 131072, 131073]
    lengths = lengths if ALL else [7, 4104, 16384, 131072]
    for dtype, length, backward in itertools.product(
        KERNEL_DTYPES if ALL else KERNEL_DTYPES[1:], lengths, (False, True)
    ):
        lanes = 16 // dtype.itemsize if length % 8 == 0 else 1
        name, label = "_backward" * backward, f"{dtype} {length}"
        softmax = _rows.constants(dtype, length, lanes, 1 + backward)
        yield _variant("softmax.cu", "softmax" + name, softmax, label)
        for both in (False, True) if ALL else (True,):
            kernel = "cross_entropy" + (name or "_forward")
            index = (int32, int64)[both]
            entropy = cross_entropy._constants(dtype, index, length, lanes, both, both, backward)
            yield _variant("cross_entropy.cu", kernel, entropy, f"{label} all options {both}")
            weight = dtype if both else np.dtype("float32")
            norm = layer_norm._constants(
                dtype, weight, weight if both else None, both, length, lanes, backward
            )
            kernel = "layer_norm" + (name or "_forward")
            share = 0.25 if backward else 0.5  # as rms_norm's
            yield _variant("layer_norm.cu", kernel, norm, f"{label} residual, bias {both}", share)


def rope_variants() -> Iterator[Variant]:
    float32, int64 = np.dtype("float32"), np.dtype("int64")
    for dtype, interleaved, inverse in itertools.product(
        KERNEL_DTYPES if ALL else KERNEL_DTYPES[1:], (False, True), (False, True)[: 1 + ALL]
    ):
        for heads, dim, half in (((32, 8), 128, 64), ((32, 0), 96, 24), ((3, 1), 7, 3)):
            lanes = 16 // dtype.itemsize if dim % 8 == 0 else 1
            constants = rope._constants(
                dtype, float32, int64, heads, dim, half, lanes, interleaved, inverse
            )
            threads = constants["TOKENS"] * constants["SLOTS"] * constants["COLUMNS"]
            options = " interleaved" * interleaved + " inverse" * inverse
            yield Variant(
                "rope.cu",
                "rope",
                tuple(constants.items()),
                -(-threads // 32) * 32,
                0.5,
                f"{dtype} heads {heads} dim {dim} half {half}{options}",
            )


def embedding_variants() -> Iterator[Variant]:
    kernels = ("embedding", "embedding_starts", "embedding_partial", "embedding_backward")
    dtypes = KERNEL_DTYPES if ALL else KERNEL_DTYPES[1:]
    for dtype, hidden, kernel in itertools.product(dtypes, (7, 4096), kernels):
        lanes = 16 // dtype.itemsize if hidden % 8 == 0 else 1
        constants = embedding._constants(dtype, np.dtype("int64"), hidden, lanes)
        yield _variant("embedding.cu", kernel, constants, f"{dtype} {hidden}")


ATTENTION = (  # options of a call: causal; what hides scores; what changes them
    ("RIGHT",),
    ("RIGHT", "LEFT", "LENGTHS", "STARTS", "BLOCK_MASK", "MASK", "DROPOUT"),
    (
        "RIGHT",
        "LEFT",
        "LENGTHS",
        "STARTS",
        "BLOCK_MASK",
        "MASK",
        "DROPOUT",
        "BIAS",
        "ALIBI",
        "SOFTCAP",
    ),
)


def attention_variants() -> Iterator[Variant]:
    """The tiles of an H200 and of 99 KiB, with few options and with all."""
    int32 = np.dtype("int32")
    for dtype, dim, budget, level in itertools.product(
        KERNEL_DTYPES[1:], (64, 128, 256), (227, 99)[: 1 + ALL], range(3)
    ):
        if dim == 256 and (level or dtype.itemsize == 4):
            continue  # 128 registers hold the output: options spill some bytes
        if not ALL and level == 1 and dim != 128:
            continue
        size = dtype.itemsize
        tiles = _attention_launch.resolve(size, dim, dim, level, budget << 10)
        options = {name: name in ATTENTION[level] for name in ATTENTION[-1]}
        dtypes = dict.fromkeys("TBAS", dtype) | dict.fromkeys("LP", int32)
        constants = _attention_launch._constants(
            tiles, **dtypes, DIM=dim, VALUE_DIM=dim, **options, FOLD=level < 2
        )
        yield Variant(
            "attention_forward.cu",
            "attention_forward",
            tuple(constants.items()),
            32 * tiles.warps,
            0.08,  # output, scores and queries fill all registers of 4 to 8 warps
            f"{dtype} {dim} {budget} KiB {len(ATTENTION[level])} options",
            tiles.bytes(size, dim, dim),
        )


def _variant(
    file: str, kernel: str, constants: _jit.Constants, label: str, share: float = 0.5
) -> Variant:
    return Variant(file, kernel, tuple(constants.items()), constants["THREADS"], share, label)


VARIANTS = [
    *rms_norm_variants(),
    *column_sum_variants(),
    *flat_variants(),
    *row_variants(),
    *rope_variants(),
    *embedding_variants(),
    *attention_variants(),
]


@pytest.fixture(autouse=True)
def _without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy asks its device which -arch to append; answer for it."""
    answer = lambda arch: (f"-arch=sm_{arch}", "cubin")  # noqa: E731
    monkeypatch.setattr(compiler, "_get_arch_for_options_for_nvrtc", answer)


@functools.lru_cache(maxsize=4096)
def compiled(source: str, arch: str, extra: tuple[str, ...] = ()) -> tuple[bytes, str]:
    """Return the cubin and ptxas's log, by the way cupy.RawModule takes without a device."""
    report = [f"--ptxas-options={o}" for o in ("-v", "-warn-spills", "-warn-lmem-usage")]
    options = core.assemble_cupy_compiler_options((*_jit.compiler_options(arch), *extra, *report))
    log = io.StringIO()
    cubin, _ = compiler.compile_using_nvrtc(
        source, (*options, "-ftz=true"), arch, "unit.cu", log_stream=log
    )
    return cubin, log.getvalue()


def resources(log: str) -> dict[str, Resources]:
    pattern = (
        r"entry function '(\w+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores,"
        r" (\d+) bytes spill loads.*?Used (\d+) registers([^\n]*)"
    )
    table = {}
    for name, stack, stores, loads, registers, rest in re.findall(pattern, log, re.S):
        shared = re.search(r"(\d+) bytes smem", rest)
        table[name] = Resources(
            int(registers), int(shared[1]) if shared else 0, int(stack), int(stores) + int(loads)
        )
    return table


def occupancy(arch: str, used: Resources, threads: int) -> float:
    """Return the share of an SM's threads that can be resident."""
    most_threads, most_blocks, shared = LIMITS[arch]
    warps = threads // 32
    registers = -(-used.registers * 32 // 256) * 256  # of a warp, in units of 256
    by_registers = 65536 // registers // 4 * 4 // warps
    by_shared = shared // (-(-(used.shared + 1024) // 128) * 128)  # 1 KiB is the system's
    blocks = min(most_blocks, most_threads // threads, by_registers, by_shared)
    return blocks * threads / most_threads


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_ptxas_is_content(variant: Variant, arch: str) -> None:
    if variant.dynamic + 1024 > LIMITS[arch][2]:
        pytest.skip(f"sm_{arch} has less shared memory than these tiles take")
    _, log = compiled(_jit.translation_unit(variant.file, dict(variant.constants)), arch)
    # a translation unit holds all kernels of its file; this launch asks for one
    others = set(resources(log)) - {variant.kernel}
    warnings = [line for line in log.splitlines() if re.search("warning|advisory", line, re.I)]
    assert not [w for w in warnings if not any(f"'{other}'" in w for other in others)]
    used = resources(log)[variant.kernel]
    assert used.spilled == 0
    assert used.local == 0
    share = occupancy(arch, used._replace(shared=used.shared + variant.dynamic), variant.threads)
    most = LIMITS[arch][0]
    whole_blocks = int(variant.occupancy * 2048 / most * most // variant.threads) or 1
    assert share >= min(variant.occupancy, whole_blocks * variant.threads / most), used


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    "file",
    ["flash.cu", "split_k.cu", "primitives.cu", "gemm.cu", "products.cu", "cluster.cu"],
)
def test_the_examples_of_the_emulator_compile(file: str, arch: str) -> None:
    if file in ("primitives.cu", "gemm.cu") and arch != "90":
        pytest.skip("wgmma and TMA need sm_90a")
    source = f'#include "common/device.cuh"\n#include "{file}"\n'
    names = {made.kernel for made in map(launch, PRIMITIVES) if made.file == file}
    asked = sorted(name for name in names if "<" in name and arch == "90")  # templates
    report = ["--ptxas-options=-v", f"-I{EXAMPLES}"]
    options = core.assemble_cupy_compiler_options((*_jit.compiler_options(arch), *report))
    log = io.StringIO()
    _cubin, mapping = compiler.compile_using_nvrtc(
        source, (*options, "-ftz=true"), arch, "unit.cu", asked, log
    )
    assert len(mapping or ()) == len(asked)
    assert not re.search("warning", log.getvalue(), re.I), log.getvalue()


def test_cupy_keeps_the_architecture_with_wgmma() -> None:
    """CuPy appends -arch=sm_90 to our -arch=sm_90a; NVRTC does not say which of two it takes."""
    source = 'extern "C" __global__ void k(int *x) { x[0] = 1; }'
    options = core.assemble_cupy_compiler_options(_jit.compiler_options("90"))
    with pytest.MonkeyPatch.context() as patch:
        answer = lambda arch: (f"-arch=sm_{arch}", "ptx")  # noqa: E731
        patch.setattr(compiler, "_get_arch_for_options_for_nvrtc", answer)
        ptx, _ = compiler.compile_using_nvrtc(source, options, "90", "unit.cu")
    assert b".target sm_90a" in ptx


def test_cupy_finds_the_cuda_headers_itself() -> None:
    """We pass no path to cuda_fp16.h: CuPy does, wherever pip or a toolkit put it."""
    ours = _jit.compiler_options("80")
    paths = [o[2:] for o in core.assemble_cupy_compiler_options(ours) if o.startswith("-I")]
    assert any((Path(path) / "cuda_fp16.h").exists() for path in paths)


def test_a_compile_error_shows_file_constants_and_log(monkeypatch: pytest.MonkeyPatch) -> None:
    class RawModule:  # as CuPy's, on a device of compute capability 9.0 that it does not need
        def __init__(self, code: str, options: tuple[str, ...]) -> None:
            self.code, self.options = code, core.assemble_cupy_compiler_options(options)

        def get_function(self, name: str) -> Any:
            return compiler.compile_using_nvrtc(self.code, self.options, "90", "unit.cu")

    class Device:
        compute_capability = "90"

    monkeypatch.setattr(cupy, "RawModule", RawModule)
    monkeypatch.setattr(cupy.cuda, "Device", Device)
    constants = dict(next(rms_norm_variants()).constants) | {"ROW_THREADS": False}
    source = _jit.translation_unit("rms_norm.cu", constants)
    with pytest.raises(KernelError) as caught:
        _jit.CupyTarget().compile("rms_norm_forward", source)
    for part in ("rms_norm_forward does not compile", "error", "THREADS = 128", '"rms_norm.cu"'):
        assert part in str(caught.value), str(caught.value)


if __name__ == "__main__":
    with pytest.MonkeyPatch.context() as patch:
        answer = lambda arch: (f"-arch=sm_{arch}", "cubin")  # noqa: E731
        patch.setattr(compiler, "_get_arch_for_options_for_nvrtc", answer)
        print("| kernel | threads |", *(f"sm_{a} registers, occupancy |" for a in ARCHITECTURES))
        print("|---|---|", "---|" * len(ARCHITECTURES), sep="")
        for variant in VARIANTS:
            unit = _jit.translation_unit(variant.file, dict(variant.constants))
            cells = []
            for arch in ARCHITECTURES:
                used = resources(compiled(unit, arch)[1])[variant.kernel]
                cells.append(f"{used.registers}, {occupancy(arch, used, variant.threads):.0%}")
            print(f"| {variant} | {variant.threads} |", " | ".join(cells), "|")
