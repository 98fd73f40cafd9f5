"""Replaces ``buffer_callback`` in versions of JAX without it, by XLA's foreign function interface.

XLA calls a C function with one structure, the call frame, that points to all buffers of the call.
Here ctypes creates the function, and the structures are those of ``xla/ffi/api/c_api.h``, which
jaxlib ships; fields that later versions append are not read.  In short, for any op:

    handle = ctypes.CFUNCTYPE(c_void_p, c_void_p)(read the frame, run the callback)
    jax.ffi.register_ffi_target("unsloth_cupy", jax.ffi.pycapsule(handle))
    jax.ffi.ffi_call("unsloth_cupy", forms)(*arrays, callback=number of the callback)
"""

import ctypes
import itertools
import re
import traceback
from collections.abc import Callable, Sequence
from ctypes import POINTER, Structure, c_char_p, c_int32, c_int64, c_size_t, c_void_p, sizeof
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakValueDictionary

import jax
import ml_dtypes
import numpy as np

from ..core.frameworks import cupy
from ..errors import FrameworkError
from ._jax_callback import holds_weight

METADATA = 1  # type of the extension with which XLA queries a handler's version and traits
CAPTURED = 1  # trait: a call may become part of a command buffer
INTERNAL = 13  # XLA's code of an internal error
HOST, CUDA = 1, 2  # device types of DLPack
DTYPES: dict[int, Any] = {
    **{1: np.bool_, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 6: np.uint8, 7: np.uint16},
    **{8: np.uint32, 9: np.uint64, 10: np.float16, 11: np.float32, 12: np.float64},
    16: ml_dtypes.bfloat16,
}
fresh = itertools.count()  # numbers of new callbacks
numbers: WeakKeyDictionary[Callable[..., None], int] = WeakKeyDictionary()
callbacks: WeakValueDictionary[int, Callable[..., None]] = WeakValueDictionary()
kept: set[Callable[..., None]] = set()  # kept alive, as compiled functions may call them any time
Handler = ctypes.CFUNCTYPE(c_void_p, c_void_p)


def _structure(name: str, *fields: tuple[str, Any]) -> Any:
    """Return a ctypes structure with the two first fields that all structures of XLA have."""
    begin = ("struct_size", c_size_t), ("extension_start", c_void_p)
    return type(name, (Structure,), {"_fields_": [*begin, *fields]})


def _arrays(name: str) -> Any:
    """Return the structure of a call's arguments or results."""
    return _structure(name, ("size", c_int64), ("types", c_void_p), ("at", POINTER(c_void_p)))


Version: Any = _structure("Version", ("major", c_int32), ("minor", c_int32))
Arguments, Results = _arrays("Arguments"), _arrays("Results")
Attributes: Any = _structure(
    "Attributes",
    *(("size", c_int64), ("types", c_void_p), ("names", c_void_p), ("at", POINTER(c_void_p))),
)
Frame: Any = _structure(
    "Frame",
    *(("api", c_void_p), ("context", c_void_p), ("stage", c_int32)),
    *(("arguments", Arguments), ("results", Results), ("attributes", Attributes)),
)
Api: Any = _structure(
    "Api",
    *(("version", Version), ("internal", c_void_p), ("make_error", Handler)),
    *(("error_message", c_void_p), ("destroy_error", c_void_p), ("register", c_void_p)),
    ("stream", Handler),
)
Extension: Any = type(
    "Extension",
    (Structure,),
    {
        "_fields_": [
            *(("struct_size", c_size_t), ("type", c_int32)),
            *(("next", c_void_p), ("metadata", c_void_p)),
        ]
    },
)
Metadata: Any = type(
    "Metadata",
    (Structure,),
    {"_fields_": [("struct_size", c_size_t), ("version", Version), ("traits", ctypes.c_uint32)]},
)
Array: Any = _structure(
    "Array",
    *(("dtype", c_int32), ("data", c_void_p), ("rank", c_int64), ("dims", POINTER(c_int64))),
)
Scalar: Any = type("Scalar", (Structure,), {"_fields_": [("dtype", c_int32), ("value", c_void_p)]})
Error: Any = _structure("Error", ("message", c_char_p), ("code", c_int32))
Stream: Any = _structure("Stream", ("context", c_void_p), ("stream", c_void_p))


class Context(NamedTuple):
    """The context that a callback receives: the stream on a GPU, 0 on the host."""

    stream: int


class Buffer:
    """A buffer of XLA, valid only during its call."""

    def __init__(self, array: Any, device: tuple[int, int]) -> None:
        self.pointer = array.data or 0
        self.shape = tuple(array.dims[: array.rank])
        self.dtype = np.dtype(DTYPES[array.dtype])
        self.device = device

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return a writable NumPy array over the memory."""
        size = self.dtype.itemsize
        for extent in self.shape:
            size *= extent
        memory = (ctypes.c_char * size).from_address(self.pointer) if size else None
        return np.ndarray(self.shape, self.dtype, memory)

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's type of the device, and its number."""
        return self.device


def ffi_callback(
    callback: Callable[..., None],
    results: Sequence[Any],
    *,
    vmap_method: str,
    command_buffer_compatible: bool,
) -> Callable[..., Any]:
    """Return a function of arrays whose results the callback writes, as buffer_callback does.

    The callback is kept alive forever, except one that holds a quantized weight: ``jax.on_weights``
    keeps that as long as the weight lives.
    """
    number = numbers.setdefault(callback, next(fresh))
    callbacks[number] = callback
    if not holds_weight(callback):
        kept.add(callback)
    call = jax.ffi.ffi_call(NAMES[command_buffer_compatible], results, vmap_method=vmap_method)
    return lambda *arrays: call(*arrays, callback=np.int64(number))


def _handler(kind: int, traits: int) -> Callable[[int], Any]:
    """Return the function that XLA calls, for one type of device."""

    def handle(address: int) -> Any:
        frame = Frame.from_address(address)
        if frame.extension_start:
            return _describe(frame, traits)
        try:
            _run(frame, kind)
        except BaseException:  # exceptions cannot pass through XLA; its caller gets the text
            return _error(frame, traceback.format_exc())
        return None

    return handle


def _version() -> tuple[int, int]:
    """Return the version of the interface that jaxlib was built with, from its header."""
    header = (Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text(encoding="utf-8")
    major, minor = re.findall(r"#define XLA_FFI_API_M(?:AJ|IN)OR (\d+)", header)
    return int(major), int(minor)


MAJOR, MINOR = _version()


def _describe(frame: Any, traits: int) -> None:
    """Write the version of the interface and the handler's traits to XLA's metadata."""
    extension = Extension.from_address(frame.extension_start)
    while extension.type != METADATA:
        if not extension.next:
            raise FrameworkError(f"XLA uses an unknown extension of type {extension.type}")
        extension = Extension.from_address(extension.next)
    metadata = Metadata.from_address(extension.metadata)
    metadata.version.major, metadata.version.minor = MAJOR, MINOR
    metadata.traits = traits


def _run(frame: Any, kind: int) -> None:
    """Call the callback that the frame names, on the frame's buffers."""
    number = Scalar.from_address(frame.attributes.at[0]).value
    run = callbacks.get(c_int64.from_address(number).value)
    if run is None:
        problem = "the quantized weight of a compiled call was deleted"
        raise FrameworkError(f"{problem}; keep it as long as the function")
    both = [
        [Array.from_address(part.at[i]) for i in range(part.size)]
        for part in (frame.results, frame.arguments)
    ]
    device, context = (HOST, 0), Context(0)
    if kind == CUDA:
        device = CUDA, _device(array.data for array in itertools.chain(*both))
        context = Context(_stream(frame))
    results, arguments = ([Buffer(array, device) for array in arrays] for arrays in both)
    run(context, results, *arguments)


def _device(addresses: Any) -> int:
    """Return the number of the GPU that holds the memory at these addresses."""
    runtime = cupy().cuda.runtime
    for address in filter(None, addresses):
        return int(runtime.pointerGetAttributes(address).device)
    return int(runtime.getDevice())


def _stream(frame: Any) -> int:
    """Return the address of the stream that XLA runs the call on."""
    request = Stream(struct_size=sizeof(Stream), context=frame.context)
    if Api.from_address(frame.api).stream(ctypes.addressof(request)):
        raise FrameworkError("XLA reports no stream for a call on a GPU")
    return request.stream or 0


def _error(frame: Any, text: str) -> int | None:
    """Return the address of an error of XLA with this message."""
    request = Error(struct_size=sizeof(Error), message=text.encode(), code=INTERNAL)
    error: int | None = Api.from_address(frame.api).make_error(ctypes.addressof(request))
    return error


def _register(captured: bool) -> str:
    """Register handlers, which live as long as the process, with XLA; return their name."""
    name = f"unsloth_cupy{'_captured' * captured}"
    for platform, kind in (("cpu", HOST), ("CUDA", CUDA)):
        handler = Handler(_handler(kind, CAPTURED * captured))
        handlers.append(handler)
        pycapsule: Any = jax.ffi.pycapsule
        capsule = pycapsule(ctypes.cast(handler, c_void_p).value)
        jax.ffi.register_ffi_target(name, capsule, platform=platform)
    return name


handlers: list[Any] = []
NAMES = [_register(captured) for captured in (False, True)]
