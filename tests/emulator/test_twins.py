"""common/ptx.cuh has a twin for the CPU: both declare the same functions; no kernel knows it."""

import re
import subprocess
from pathlib import Path

import pytest

from unsloth_cupy._source import source_root

from .. import cuda_on_cpu
from ..hardware.primitives import PRIMITIVES, launch
from . import KERNELS

TWIN = Path(cuda_on_cpu.__file__).parent / "include/common/ptx.cuh"
REAL = source_root() / "common/ptx.cuh"


def declared(path: Path) -> dict[str, list[str]]:
    """Return the parameters of every inline function; the twin adds the place of the call."""
    command = ["g++", "-E", "-P", "-x", "c++", "-D__CUDA_ARCH_FEAT_SM90_ALL", str(path)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    text = re.sub(
        r"\b(__device__ __forceinline__|inline) (void \*|void |uint32_t )", "FUNCTION ", text
    )
    text = re.sub(r",?\s*EMU_PLACE", "", text)
    found = re.findall(r"FUNCTION (\w+)\(((?:[^()]|\(&?\w*\))*)\)\s*{", text)
    return {name: types(given) for name, given in found}


def types(parameters: str) -> list[str]:
    """Return parameters without their names; N / 2 of a macro is a number."""
    bare = ["".join(parameter.split()) for parameter in re.split(r",\s+", parameters)]
    halved = [re.sub(r"(\d+)/2", lambda m: str(int(m[1]) // 2), parameter) for parameter in bare]
    return [re.sub(r"\w+(\)|$| =.*)", r"\1", parameter) for parameter in halved]


def test_the_twins_declare_the_same_functions() -> None:
    real, twin = declared(REAL), declared(TWIN)
    assert len(real) > 70
    assert real == twin


def test_templates_of_the_twins_agree() -> None:
    pattern = r"template <([^>]*)>[\s\\]*(?:PTX|inline) \w+ (\w+)"
    real, twin = (set(re.findall(pattern, path.read_text())) for path in (REAL, TWIN))
    assert real == twin


# What runs on a GPU in no primitive's launch: it has no result, or no instruction.
SILENT = {"setmaxnreg_inc", "setmaxnreg_dec", "cluster_smem_u32", "opaque"}


def test_every_function_is_a_primitive_of_tests_hardware() -> None:
    files = {launch(name).file for name in PRIMITIVES}
    text = "".join((KERNELS / file).read_text() for file in files)
    text += (source_root() / "common/descriptor.cuh").read_text()
    used = set(re.findall(r"\b[a-z]\w+", text))
    for macro, prefix in (("MMA", "mma_"), ("WGMMA_TEST", "")):
        names = re.findall(rf"^{macro}\((\w+)", text, re.M)
        used |= {prefix + name for name in names}
    used |= {
        re.sub("##N##", size, name)
        for name in re.findall(r"wgmma_m64n##N##\w+", text)
        for size in re.findall(r"^WGMMA_TEST\((\d+)", text, re.M)
    }
    unused = set(declared(REAL)) - used - SILENT
    # a shape is the same macro for bfloat16 and float16: each is run from one of the two places
    assert {re.sub("(bf|f)16", "16", name).removesuffix("_registers") for name in unused} <= {
        re.sub("(bf|f)16", "16", name).removesuffix("_registers") for name in used
    }


@pytest.mark.parametrize("path", sorted(source_root().rglob("*.cu*")), ids=lambda path: path.name)
def test_kernels_know_nothing_of_the_cpu(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"EMU|emulat|\bCPU\b|__CUDACC|__GNUC__|twin", text)
    assert path.name == "ptx.cuh" or not re.search(r"\basm\b", text)
