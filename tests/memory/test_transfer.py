"""Arrays move between host and GPUs, on a tape too, and the bytes are counted."""

from typing import Any

import numpy as np
import pytest

from unsloth_cupy import Tape, memory_pool, nf4_quantize, to_device, to_host
from unsloth_cupy.errors import ConfigError, DeviceError, DTypeError, FrameworkError

from ..machines.stand_in import gpu

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def test_what_is_there_stays() -> None:
    with memory_pool() as pool:
        assert to_host(X) is to_device(X, "cpu") is X
    assert pool.transferred == {"to_host": 0, "to_device": 0}


def test_between_host_and_gpus() -> None:
    with gpu(devices=2) as machine, memory_pool() as pool:
        machine.strict = False  # the host may read
        first = to_device(X, "cuda")
        second = to_device(first, "cuda:1")
        assert (first.device.id, second.device.id) == (0, 1)
        assert to_device(first, "cuda:0") is first
        assert type(first) is type(machine.array((1,), "float32"))
        assert pool.transferred == {"to_host": 0, "to_device": 2 * X.nbytes}
        back = to_host(second)
        assert type(back) is np.ndarray
        assert back.shape == X.shape
        assert pool.transferred == {"to_host": X.nbytes, "to_device": 2 * X.nbytes}


def test_a_gradient_moves_back() -> None:
    tape = Tape()
    x = tape.watch(X)
    y = (to_host(x * x) * x).sum()
    np.testing.assert_allclose(tape.gradients(y, [x])[0], 3 * X**2)
    with gpu(devices=2) as machine:
        machine.strict = False
        tape, there = Tape(), machine.array((4,), "float32")
        x = tape.watch(there)
        y = to_host(x)
        assert type(y.value) is np.ndarray
        (back,) = tape.gradients(y, [x], np.ones(4, np.float32))
        assert type(back) is type(there)
        assert back.device.id == there.device.id


def test_tensors_stay_those_of_torch() -> None:
    torch = pytest.importorskip("torch", reason="whose arrays go in and come back")
    tensor = torch.ones(3)
    assert to_host(tensor) is tensor


@pytest.mark.parametrize(
    ("error", "words", "array", "device"),
    [
        (ConfigError, r"to_device: device='gpu'; choose 'cpu'", X, "gpu"),
        (ConfigError, "to_device: device=1", X, 1),
        (ConfigError, "to_device: device=None", X, None),
        (DeviceError, "device='cuda", X, "cuda:7"),
        (DTypeError, "to_device: array is not an array but list", [1.0], "cpu"),
        (FrameworkError, "to_device: array is a Nf4", nf4_quantize(np.ones((64, 64))), "cpu"),
    ],
)
def test_wrong_calls(error: Any, words: str, array: Any, device: Any) -> None:
    with pytest.raises(error, match=words):
        to_device(array, device)
