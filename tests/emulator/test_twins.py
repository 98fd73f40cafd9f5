"""common/ptx.cuh has a twin for the CPU: both declare the same functions; no kernel knows it."""

import re
from pathlib import Path

import pytest

from unsloth_cupy._jit import source_root

from .. import cuda_on_cpu

TWIN = Path(cuda_on_cpu.__file__).parent / "include/common/ptx.cuh"
REAL = source_root() / "common/ptx.cuh"


def declared(text: str) -> dict[str, list[str]]:
    """Return the parameters of every inline function; the twin adds the place of the call."""
    text = re.sub(r"\bPTX void|\bPTX uint32_t|inline void|inline uint32_t", "FUNCTION", text)
    text = re.sub(r",?\s*EMU_PLACE", "", text)
    found = re.findall(r"FUNCTION (\w+)\(((?:[^()]|\(&?\w*\))*)\)\s*{", text)
    return {name: re.sub(r"\s+", " ", given).split(", ") for name, given in found}


def test_the_twins_declare_the_same_functions() -> None:
    real, twin = declared(REAL.read_text()), declared(TWIN.read_text())
    assert len(real) > 25
    assert {name: len(given) for name, given in real.items()} == {
        name: len(given) for name, given in twin.items()
    }
    for name, given in real.items():
        types = [re.sub(r"\w+(\)|$| =.*)", r"\1", p.replace(" ", "")) for p in given]
        twins = [re.sub(r"\w+(\)|$| =.*)", r"\1", p.replace(" ", "")) for p in twin[name]]
        assert types == twins, name


def test_templates_of_the_twins_agree() -> None:
    templates = r"template <([^>]*)>\s*(?:PTX|inline) \w+ (\w+)"
    assert set(re.findall(templates, REAL.read_text())) == set(
        re.findall(templates, TWIN.read_text())
    )


@pytest.mark.parametrize("path", sorted(source_root().rglob("*.cu*")), ids=lambda path: path.name)
def test_kernels_know_nothing_of_the_cpu(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"EMU|emulat|\bCPU\b|__CUDACC|__GNUC__|twin", text)
    assert path.name == "ptx.cuh" or not re.search(r"\basm\b", text)
