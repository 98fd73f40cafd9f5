"""Ops inside of JAX where it has no ``buffer_callback``: through a handler made with ctypes."""

import ctypes
import gc
import shutil
import subprocess
import weakref

import ml_dtypes
import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="needs the extra `peers` (jax)")

import jax.numpy as jnp  # noqa: E402

import unsloth_cupy as uc  # noqa: E402
from unsloth_cupy.interop import _jax_ffi as ffi  # noqa: E402
from unsloth_cupy.interop import jax as door  # noqa: E402

from .test_jax import (  # noqa: E402, F401
    draw,
    judged,
    test_a_batch_is_one_call_where_rows_are_free_and_else_one_for_each_slice,
    test_a_block_is_the_same_in_every_transform,
    test_a_call_that_does_not_fit_raises_before_anything_runs,
    test_a_number_stands_for_an_array_of_integers,
    test_dtypes,
    test_seeds_are_operands,
)


@pytest.fixture(autouse=True)
def _by_ffi(monkeypatch):
    monkeypatch.setattr(door, "buffer_callback", ffi.ffi_callback)
    monkeypatch.setattr(door, "functions", {})
    yield
    jax.clear_caches()  # compiled functions hold numbers of callbacks that are undone


def by_ffi(run, forms, **how):
    how = {"vmap_method": "sequential", "command_buffer_compatible": True} | how
    return ffi.ffi_callback(run, forms, **how)


@pytest.mark.parametrize("name", ["layer_norm_forward", "linear_cross_entropy_forward"])
def test_gradients_are_those_of_the_backward_op(name):
    arrays, weighed, judge = judged(getattr(uc, name), True)
    arrays = jax.tree.map(jnp.asarray, arrays)
    held = {name: array for name, array in arrays.items() if name not in judge}
    grads = jax.jit(jax.grad(lambda some: weighed(held | some)))({n: arrays[n] for n in judge})
    for operand, expected in judge.items():
        np.testing.assert_allclose(grads[operand], expected, rtol=1e-5, atol=1e-5)


WIDE = "int64", "uint64", "float64"  # which JAX has where they are asked for: test_dtypes
NARROW = sorted({np.dtype(dtype).name for dtype in ffi.DTYPES.values()} - {*WIDE})


@pytest.mark.parametrize("dtype", NARROW)
def test_buffers_are_xlas_own(dtype):
    shapes, seen = [(), (5,), (2, 3, 4), (2, 0)], []

    def run(context, results, *arguments):
        seen.append((context.stream, [(b.shape, b.dtype) for b in arguments]))
        assert {b.__dlpack_device__() for b in (*results, *arguments)} == {(1, 0)}
        for result, argument in zip(results, arguments, strict=False):
            result.__array__()[...] = argument.__array__()

    rng = np.random.default_rng(0)
    values = [np.asarray(rng.integers(0, 2, shape)).astype(dtype) for shape in shapes]
    forms = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes[:3])
    for captured in (False, True):
        call = by_ffi(run, forms, command_buffer_compatible=captured)
        for actual, expected in zip(jax.jit(call)(*values), values, strict=False):
            np.testing.assert_array_equal(actual, expected)
    assert seen == [(0, [(shape, np.dtype(dtype)) for shape in shapes])] * 2


def test_an_error_of_the_callback_is_that_of_the_step():
    def run(context, results, x):
        raise KeyError("nothing of that name")

    call = jax.jit(by_ffi(run, (jax.ShapeDtypeStruct((3,), "float32"),)))
    with pytest.raises(Exception, match="KeyError: 'nothing of that name'"):
        jax.block_until_ready(call(jnp.ones(3)))


@pytest.mark.slow
def test_compiled_functions_find_their_callbacks_when_the_library_has_forgotten_them():
    call, x = jax.jit(uc.relu2), jnp.ones(3)
    assert call(x).tolist() == [1, 1, 1]
    door.functions.clear()
    gc.collect()
    assert call(2 * x).tolist() == [4, 4, 4]


@pytest.mark.slow
def test_a_weight_is_kept_as_long_as_the_function_that_was_compiled():
    weight, before = uc.int8_weight(np.ones((16, 16), np.float32)), len(ffi.callbacks)
    codes, held = weakref.ref(weight.codes), weakref.ref(weight)
    call = jax.jit(lambda x: uc.linear(x, held()))
    x = jnp.ones((2, 16))
    np.testing.assert_allclose(call(x), 16, rtol=1e-5)
    del weight
    gc.collect()
    np.testing.assert_allclose(call(2 * x), 32, rtol=1e-5)
    assert len(ffi.callbacks) == before + 1
    del call
    gc.collect()
    assert codes() is None
    assert len(ffi.callbacks) == before


class Call:
    """A call frame as XLA writes one, for a handler of GPUs."""

    def __init__(self, number, results, arguments):
        self.kept = [ctypes.c_int64(number)]
        scalar = ffi.Scalar(5, ctypes.addressof(self.kept[0]))
        self.errors = []
        asks = {"make_error": self._error, "stream": self._stream}
        self.api = ffi.Api(**{name: ffi.Handler(run) for name, run in asks.items()})
        attributes = ffi.Attributes(size=1, at=self._pointers([scalar]))
        self.frame = ffi.Frame(
            api=ctypes.addressof(self.api),
            context=77,
            arguments=ffi.Arguments(size=len(arguments), at=self._arrays(arguments)),
            results=ffi.Results(size=len(results), at=self._arrays(results)),
            attributes=attributes,
        )

    def _pointers(self, held):
        self.kept += held
        made = (ctypes.c_void_p * max(1, len(held)))(*map(ctypes.addressof, held))
        self.kept.append(made)
        return ctypes.cast(made, ctypes.POINTER(ctypes.c_void_p))

    def _arrays(self, arrays):
        numbers = {np.dtype(dtype): number for number, dtype in ffi.DTYPES.items()}
        held = []
        for array in arrays:
            dims = (ctypes.c_int64 * max(1, array.ndim))(*array.shape)
            self.kept.append(dims)
            held.append(
                ffi.Array(
                    dtype=numbers[array.dtype],
                    data=array.ctypes.data if array.size else None,
                    rank=array.ndim,
                    dims=ctypes.cast(dims, ctypes.POINTER(ctypes.c_int64)),
                )
            )
        return self._pointers(held)

    def _stream(self, address):
        asked = ffi.Stream.from_address(address)
        assert (asked.struct_size, asked.context) == (ctypes.sizeof(ffi.Stream), 77)
        asked.stream = 4096

    def _error(self, address):
        self.errors.append(ffi.Error.from_address(address).message.decode())
        return 5

    def run(self):
        return ffi.Handler(ffi._handler(ffi.CUDA, 0))(ctypes.addressof(self.frame))


class Runtime:
    """What is asked of CuPy: on which device memory lies."""

    def __init__(self, addresses):
        self.addresses = addresses
        self.cuda = self.runtime = self

    def pointerGetAttributes(self, address):  # noqa: N802
        assert address in self.addresses
        return type("Attributes", (), {"device": 3})

    def getDevice(self):  # noqa: N802
        return 2


@pytest.mark.parametrize("extent", [0, 4])
def test_on_a_gpu_a_callback_gets_the_stream_and_the_device(monkeypatch, extent):
    x = np.ones((2, extent), ml_dtypes.bfloat16)
    y, seen = np.zeros((2, extent), np.float32), []
    monkeypatch.setattr(ffi, "cupy", lambda: Runtime({x.ctypes.data, y.ctypes.data}))

    def run(context, results, *arguments):
        seen.append((context.stream, [b.pointer for b in (*results, *arguments)]))
        assert {b.__dlpack_device__() for b in (*results, *arguments)} == {(2, 3 if extent else 2)}
        assert [b.dtype.name for b in (*results, *arguments)] == ["float32", "bfloat16"]

    by_ffi(run, (jax.ShapeDtypeStruct(y.shape, y.dtype),))
    assert Call(ffi.numbers[run], [y], [x]).run() is None
    assert seen == [(4096, [y.ctypes.data, x.ctypes.data] if extent else [0, 0])]
    failing = Call(-1, [y], [x])
    assert failing.run() == 5
    assert "keep it as long as the function" in failing.errors[0]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_structures_are_those_of_the_header_that_jaxlib_ships(tmp_path):
    header = f"{jax.ffi.include_dir()}/xla/ffi/api/c_api.h"
    names = {
        **{"CallFrame": ffi.Frame, "Buffer": ffi.Array, "Args": ffi.Arguments},
        **{"Rets": ffi.Results, "Attrs": ffi.Attributes, "Error_Create_Args": ffi.Error},
        **{"Stream_Get_Args": ffi.Stream, "Scalar": ffi.Scalar, "Api": ffi.Api},
        **{"Metadata": ffi.Metadata, "Metadata_Extension": ffi.Extension},
    }
    last = {
        **{
            "CallFrame": ("attrs", "attributes"),
            "Buffer": ("dims", "dims"),
            "Args": ("args", "at"),
        },
        **{"Rets": ("rets", "at"), "Attrs": ("attrs", "at"), "Scalar": ("value", "value")},
        **{"Error_Create_Args": ("errc", "code"), "Stream_Get_Args": ("stream", "stream")},
        **{"Api": ("XLA_FFI_Stream_Get", "stream"), "Metadata": ("traits", "traits")},
        "Metadata_Extension": ("metadata", "metadata"),
    }
    checks = [
        f"static_assert(offsetof(XLA_FFI_{name}, {field}) == {getattr(names[name], own).offset});"
        for name, (field, own) in last.items()
    ]
    unit = tmp_path / "unit.cpp"
    unit.write_text("\n".join([f'#include "{header}"', "#include <cstddef>", *checks]))
    subprocess.run(["g++", "-std=c++17", "-fsyntax-only", unit], check=True)
