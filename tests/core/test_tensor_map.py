"""Tensor maps: one request to the driver for each address; replayed launches find the map again."""

import ctypes
import subprocess
import timeit
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import AttentionConfig, attention_forward
from unsloth_cupy.core.dtypes import BFLOAT16
from unsloth_cupy.errors import KernelError
from unsloth_cupy.ops.attention import _hopper
from unsloth_cupy.ops.common import tensor_map
from unsloth_cupy.ops.common.tensor_map import Form, mappable

from ..machines.stand_in import Machine, gpu

NAME = "attention_forward_sm90"


@pytest.fixture(autouse=True)
def _asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_hopper, "requested", True)


def kernels(machine: Machine) -> list[str]:
    return [launch.kernel for launch in machine.launches]


def test_what_the_driver_is_asked() -> None:
    """Axes are innermost first; keys may be the first tokens of a longer cache."""
    with gpu("90") as machine:
        q, cache = (
            machine.array((2, 70, 4, 72), "float16"),
            machine.array((2, 99, 2, 72), "float16"),
        )
        attention_forward(q, cache[:, :80], cache[:, 8:88])
        first, *keys = machine.maps.requests
    assert kernels(machine) == [NAME]
    assert first == {
        "dtype": 6,
        "address": q.data.ptr,
        "sizes": [72, 4, 70, 2],
        "strides": [144, 576, 70 * 576],
        "box": [64, 1, 128, 1],
        "modes": (0, 3, 3, 0),
    }
    for request, begin in zip(keys, (0, 8), strict=True):
        assert request["address"] == cache.data.ptr + begin * 288
        assert request["sizes"] == [72, 2, 80, 2]
        assert request["strides"] == [144, 288, 99 * 288]
        assert request["box"] == [64, 1, 128, 1]


def test_a_known_address_asks_for_nothing() -> None:
    """Also in the third call, which is replayed; another address requests only its own map."""
    with gpu("90") as machine:
        q, k, v, other = (machine.array((1, 64, 2, 64), "bfloat16") for _ in range(4))
        counts = []
        for values in (v, v, v, v, other, other, v):
            attention_forward(q, k, values, causal=True)
            counts.append(len(machine.maps.requests))
    assert kernels(machine) == [NAME] * 7
    assert counts == [3, 3, 3, 3, 4, 4, 4]
    assert {request["dtype"] for request in machine.maps.requests} == {9}


def test_arrays_that_tma_cannot_copy_are_packed() -> None:
    wide = np.zeros((2, 6, 4, 80), np.float16)
    for view in (wide, wide[..., 8:72], wide[:, ::2], wide[1:, :, :1]):
        assert mappable(view) is view
    for view in (wide[..., 1:73], wide[..., ::2], wide[:, ::-1], wide.swapaxes(2, 3)):
        packed = mappable(view)
        assert packed is not view
        assert packed.flags.c_contiguous
        assert packed.ctypes.data % 16 == 0
        assert np.array_equal(packed, view)
    narrow = np.zeros((2, 6, 1, 12), np.float16)  # rows of 24 bytes
    assert mappable(narrow[:, :, :, :8]) is not narrow


@pytest.mark.parametrize(
    "why", ["sm_80", "sm_100", "compiler", "driver", "float32", "few", "config", "nobody asks"]
)
def test_other_calls_take_the_other_kernel(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arch = why.partition("_")[2] or "90"
    monkeypatch.setattr(_hopper, "requested", why != "nobody asks")
    with gpu(arch) as machine:
        if why == "compiler":
            machine.compiler = (12, 8)
        if why == "driver":
            monkeypatch.setattr(tensor_map, "encoder", lambda: None)
        queries, dtype = (63 if why == "few" else 64), "float32" if why == "float32" else "float16"
        q, k = (machine.array((1, tokens, 2, 64), dtype) for tokens in (queries, 64))
        if why == "config":
            with AttentionConfig(warpgroups=False).use():
                attention_forward(q, k, k)
        else:
            attention_forward(q, k, k)
        assert kernels(machine) == ["attention_forward"]
        assert not machine.maps.requests


def test_an_axis_without_elements_has_no_map() -> None:
    """The driver rejects it; the other kernel computes rows that see no key."""
    with gpu("90") as machine:
        q, k = (machine.array((1, tokens, 2, 64), "float16") for tokens in (64, 0))
        attention_forward(q, k, k)
        none = machine.array((0, 64, 2, 64), "float16")
        attention_forward(none, none, none)
    assert NAME not in kernels(machine)


def test_an_error_of_the_driver_names_the_array(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_map, "encoder", lambda: lambda *_: 1)
    form = Form((2, 64, 4, 64), (32768, 512, 128, 2), np.dtype("float16"), (64, 1, 128, 1))
    with pytest.raises(KernelError, match=r"float16 \(2, 64, 4, 64\).*at 0x100: CUDA error 1"):
        form.encode(256)
    monkeypatch.setattr(tensor_map, "encoder", lambda: None)
    with pytest.raises(KernelError, match="update it to CUDA 12"):
        form.encode(256)


DRIVER = """
#include <stdint.h>
int encode(uint64_t *map, int dtype, uint32_t rank, void *address, const uint64_t *sizes,
           const uint64_t *strides, const uint32_t *box, const uint32_t *steps, int interleave,
           int swizzle, int promotion, int fill) {
  map[0] = (uint64_t)address, map[1] = sizes[0] << 32 | sizes[rank - 1];
  map[2] = strides[rank - 2], map[3] = box[0] << 8 | box[rank - 1];
  map[4] = dtype, map[5] = swizzle, map[15] = steps[rank - 1];
  return interleave | fill;
}
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a driver that writes its arguments into the map."""
    folder: Path = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    command = ["gcc", "-shared", "-fPIC", "-O2", "-o", "driver.so", "driver.c"]
    if subprocess.run(command, cwd=folder, check=False, capture_output=True).returncode:
        pytest.skip("needs gcc")
    return ctypes.CDLL(str(folder / "driver.so")).encode


def test_a_map_holds_what_the_driver_wrote(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A map is a scalar of 128 bytes for a launch; an address needs one call of the driver."""
    monkeypatch.setattr(tensor_map, "encoder", lambda: driver)
    form = Form((2, 64, 4, 96), (49152, 768, 192, 2), BFLOAT16, (64, 1, 128, 1))
    made = form.encode(0x7000)
    assert made.dtype == np.dtype("V128")
    words = np.frombuffer(made.tobytes(), np.uint64)
    assert [*words[:6], words[15]] == [0x7000, 96 << 32 | 2, 49152, 64 << 8 | 1, 9, 3, 1]
    assert ctypes.addressof(form.map) % 64 == 0
    microseconds = min(timeit.repeat(lambda: form.encode(0x7000), number=200, repeat=5)) / 200 * 1e6
    assert microseconds < 50  # a few if nothing else runs
