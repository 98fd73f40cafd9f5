"""What launches choose by belongs to a context, and a gradient has that of its forward pass."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from unsloth_cupy import AttentionConfig, Tape, checkpoint
from unsloth_cupy.core.dtypes import Array
from unsloth_cupy.core.op import OPS, Op, op
from unsloth_cupy.ops.attention._tiles import requested_limits

CONFIG = AttentionConfig(tile=48)


@pytest.fixture
def seen() -> Iterator[tuple[Op[..., Any], list[int | None]]]:
    """Yield an op, and the list of the tiles that its calls are asked for, forward and backward."""
    tiles: list[int | None] = []

    def note(x: Array) -> Array:
        start = requested_limits()
        tiles.append(start and start.tile)
        return x + 0

    @op("x(*rows) -> y(*rows)")
    def noted(x: Array) -> Array:
        return note(x)

    @noted.gradient
    def noted_backward(dy: Array) -> Array:
        return note(dy)

    yield noted, tiles
    for name in ("noted", "noted_backward"):
        OPS.pop(name)


def in_thread(function: Callable[[], Any]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_on_a_tape(seen: Any) -> None:
    noted, tiles = seen
    tape = Tape()
    x = tape.watch(np.ones(3))
    with CONFIG.use():
        y = checkpoint(noted, noted(x))
    y = noted(y)
    assert tiles == [48, 48, None]
    tiles.clear()
    in_thread(lambda: tape.gradients(y.sum(), [x]))
    assert tiles == [None, 48, 48, 48]  # the checkpoint runs forward, then backward
    tiles.clear()
    with AttentionConfig(tile=32).use():
        tape.gradients(y.sum(), [x], release=True)
    assert tiles == [32, 48, 48, 48]
    tiles.clear()
    y = noted(x)  # in the place of a call with a config, which is gone
    tape.gradients(y.sum(), [x])
    assert tiles == [None, None]


@pytest.mark.parametrize("door", ["eager", "operator"])
def test_in_torch(seen: Any, door: str) -> None:
    torch = pytest.importorskip("torch", reason="it calls backward passes from threads of its own")
    from unsloth_cupy.interop import torch as in_torch

    noted, tiles = seen
    x = torch.ones(3, requires_grad=True)
    call = noted if door == "eager" else in_torch.register(_generated(noted, x)).door
    tiles.clear()
    with CONFIG.use():
        y = call(x)
    in_thread(lambda: y.sum().backward())
    assert tiles == [48, 48]


def _generated(noted: Any, x: Any) -> Any:
    noted(x)
    return noted


def test_in_jax(seen: Any) -> None:
    jax = pytest.importorskip("jax", reason="it calls ops from threads of its own")
    noted, tiles = seen
    x = jax.numpy.ones(3)
    for config, expected in ((CONFIG, 48), (AttentionConfig(tile=32), 32)):
        tiles.clear()
        with config.use():
            jax.grad(lambda x: noted(x).sum())(x).block_until_ready()
        assert tiles == [expected] * 2
