"""Headers of inline PTX have twins for the CPU: both declare the same functions."""

import re
import subprocess
from pathlib import Path

import pytest

from unsloth_cupy.core.source import source_root

from ...harness.tracked import tracked
from ...machines import cuda_on_cpu
from ..hardware.primitives import PRIMITIVES, launch
from . import KERNELS

TWINS = Path(cuda_on_cpu.__file__).parent / "include/common"
REAL = source_root() / "common"
FILES = [path.name for path in tracked("tests/machines/cuda_on_cpu/include/common/*")]


def declared(path: Path) -> dict[str, list[str]]:
    """Return the parameters of every inline function; the twin adds the place of the call."""
    command = ["g++", "-E", "-P", "-x", "c++", "-D__CUDA_ARCH_FEAT_SM90_ALL", "-"]
    alone = re.sub(r"#include.*", "", path.read_text())
    text = subprocess.run(command, input=alone, capture_output=True, text=True, check=True).stdout
    text = re.sub(r"\b(DEVICE|inline) (void \*|void |uint32_t |int )", "FUNCTION ", text)
    text = re.sub(r",?\s*EMU_PLACE", "", text)
    functions = re.findall(r"FUNCTION (\w+)\(((?:[^()]|\(&?\w*\))*)\)\s*{", text)
    return {name: types(parameters) for name, parameters in functions}


def types(parameters: str) -> list[str]:
    """Return parameters without their names; N / 2 of a macro is a number."""
    bare = ["".join(parameter.split()) for parameter in re.split(r",\s+", parameters)]
    halved = [re.sub(r"(\d+)/2", lambda m: str(int(m[1]) // 2), parameter) for parameter in bare]
    return [re.sub(r"\w+(\)|$| =.*)", r"\1", parameter) for parameter in halved]


@pytest.mark.parametrize("file", FILES)
def test_the_twins_declare_the_same_functions(file: str) -> None:
    real, twin = declared(REAL / file), declared(TWINS / file)
    assert len(real) > 15
    assert real == twin


@pytest.mark.parametrize("file", FILES)
def test_templates_of_the_twins_agree(file: str) -> None:
    pattern = r"template <([^>]*)>[\s\\]*(?:DEVICE|inline) \w+ (\w+)"
    real, twin = (set(re.findall(pattern, (folder / file).read_text())) for folder in (REAL, TWINS))
    assert real == twin


# What runs on a GPU in no primitive's launch: it has no result, or no instruction.
SILENT = {"setmaxnreg_inc", "setmaxnreg_dec", "cluster_smem_u32", "opaque", "wgmma_name"}


def test_every_function_is_a_primitive_of_tests_hardware() -> None:
    files = {launch(name).file for name in PRIMITIVES}
    text = "".join((KERNELS / file).read_text() for file in files)
    text += (REAL / "descriptor.cuh").read_text()
    used = set(re.findall(r"\b[a-z]\w+", text))
    for macro, prefix in (("MMA", "mma_"), ("WGMMA_TEST", "")):
        names = re.findall(rf"^{macro}\((\w+)", text, re.M)
        used |= {prefix + name for name in names}
    used |= {
        re.sub("##N##", size, name)
        for name in re.findall(r"wgmma_m64n##N##\w+", text)
        for size in re.findall(r"^WGMMA_TEST\((\d+)", text, re.M)
    }
    unused = {name for file in FILES for name in declared(REAL / file)} - used - SILENT
    # a shape is the same macro for bfloat16 and float16: each is run from one of the two places
    assert {re.sub("(bf|f)16", "16", name).removesuffix("_registers") for name in unused} <= {
        re.sub("(bf|f)16", "16", name).removesuffix("_registers") for name in used
    }
