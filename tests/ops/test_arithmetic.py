from typing import Any

import numpy as np
import pytest

import unsloth_cupy as uc
from unsloth_cupy.core.op import OPS
from unsloth_cupy.errors import ConfigError, RangeError, ShapeError
from unsloth_cupy.ops.elements.arithmetic import add_backward, reshape_backward

from ..harness.parity import Case, KernelAlone, KernelParity, Parity, emulator
from ..machines.cuda_on_cpu.traffic import counted
from ..machines.stand_in import gpu

# The public names, as other people's programs call them.
PUBLIC = ("index(x, *, key)",)


class TestAdd(KernelParity):
    op = "add"
    cases = (
        Case("two axes", axes=[3, 5]),
        Case("slices", axes=[2, 3, 40], gaps=True),
        Case("empty", axes=[0]),
    )


class TestAccessesAreWide(KernelAlone):
    """A warp moves 512 bytes at a time, 16 a lane."""

    op = "add"
    cases = (Case("many values"),)

    def prove(self, case: Case, dtype: Any) -> None:
        a, b = np.ones((2, 4096), dtype)
        with counted() as traffic, emulator():
            uc.add(a, b)
        for write, arrays in ((False, 2), (True, 1)):
            moved = traffic.of("global", write=write)
            assert moved.requests == arrays * a.nbytes // 512
            assert moved.efficiency == 1


class TestMultiply(KernelParity):
    op = "multiply"
    cases = (
        Case("two axes", axes=[3, 5]),
        Case("slices", axes=[2, 3, 40], gaps=True),
        Case("slices of odd rows", axes=[3, 1029], gaps=True),
        Case("too many axes", axes=[2, 3, 4, 16], gaps=True),
        Case("scalar", axes=[]),
    )


class TestScale(KernelParity):
    op = "scale"
    cases = (
        Case("two axes", axes=[3, 5], factor=0.3),
        Case("slices", axes=[2, 3, 40], gaps=True, factor=0.3),
    )


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("add", "add"),
        ("multiply", "multiply"),
        ("multiply_backward", "multiply_backward"),
        ("scale", "scale"),
        ("scale_backward", "scale"),
    ],
)
def test_slices_are_read_where_they_lie(name: str, kernel: str) -> None:
    op = OPS[name]
    options = {"factor": 2.0} if "factor" in op.options else {}
    with gpu() as machine:
        wide = machine.array((2, 3, 128), "bfloat16")
        parts = wide[..., :64], wide[..., 64:], wide[..., 32:96]
        op.call(parts[: len(op.names)], options)
        assert [launch.kernel for launch in machine.launches] == [kernel]
        assert machine.functions == [], "no copy"


class TestScaleBy(Parity):
    op = "scale_by"
    cases = (Case("two axes", axes=[3, 5]), Case("scalar", axes=[]))


class TestReshape(Parity):
    op = "reshape"
    cases = (Case("split", axes=[3, 4], shape=(3, 2, -1)),)


class TestColumns(Parity):
    op = "columns"
    cases = (Case("middle", rows=[3], columns=7, start=2, stop=5),)


@pytest.mark.parametrize("shape", [(4,), (-2, -3), (-1, -1, 6), (0, -1), 6, "x", None, (2.0, 3)])
def test_reshape_refuses_what_is_no_shape_of_it(shape: object) -> None:
    with pytest.raises(ShapeError, match="reshape"):
        uc.reshape(np.ones(6, np.float32), shape=shape)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_gradients_that_are_what_came_are_not_copied(dtype: str) -> None:
    """Nor are they widened in 16 bits: nothing is computed."""
    dy = np.ones((3, 4), dtype)
    for gradient in (reshape_backward(dy, np.ones((2, 6), dtype)), *add_backward(dy)):
        assert np.shares_memory(gradient, dy)


class TestTranspose(Parity):
    op = "transpose"
    cases = (
        Case("reversed", axes=[3, 4, 2]),
        Case("turned", axes=[3, 4, 2], order=(1, -1, 0)),
        Case("empty", axes=[0, 4]),
        Case("scalar", axes=[]),
    )


@pytest.mark.parametrize("order", [(1, 2, 0), (-1, 0, 1), [0, 2, 1], None])
def test_transpose_is_turned_back(order: Any) -> None:
    tape, x = uc.Tape(), np.arange(24.0).reshape(2, 3, 4)
    watched = tape.watch(x)
    turned = uc.transpose(watched, order=order)
    assert (turned.value == x.transpose(order)).all()
    assert (tape.gradients(turned, [watched], turned.value)[0] == x).all()


@pytest.mark.parametrize("order", [(0,), (0, 0, 1), (0, 1, 3), "xyz", 1, (0.0, 1, 2), (0, 1, -4)])
def test_transpose_refuses_what_names_no_order(order: object) -> None:
    with pytest.raises(ShapeError, match="name each of its 3 axes once"):
        uc.transpose(np.ones((2, 3, 4), np.float32), order=order)


class TestIndex(Parity):
    op = "index"
    cases = (
        Case("row", axes=[3, 4], key=-1),
        Case("part", axes=[3, 4], key=np.s_[1:, ::2]),
        Case("element", axes=[3, 4], key=(0, 1)),
        Case("new axis", axes=[3, 4], key=np.s_[..., None, 2]),
        Case("backwards", axes=[5], key=np.s_[::-2]),
        Case("nothing", axes=[5], key=np.s_[5:]),
    )


@pytest.mark.parametrize("key", [[0], np.array([0]), True, 1.5, "x", (0, [1]), (slice(1), {})])
def test_index_refuses_what_is_no_basic_key(key: object) -> None:
    with pytest.raises(ConfigError, match="pass integers, slices"):
        uc.index(np.ones((3, 4), np.float32), key=key)


@pytest.mark.parametrize("key", [3, -4, (0, 4), (0, 0, 0), (..., ...), slice(0, 2, 0), slice("x")])
def test_index_refuses_what_is_not_there(key: object) -> None:
    with pytest.raises(RangeError, match=r"index\(key="):
        uc.index(np.ones((3, 4), np.float32), key=key)
