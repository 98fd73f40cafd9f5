"""Arrays of torch, JAX and of anything that speaks DLPack, without copies.

They are adopted: NumPy or CuPy sees the same memory.  Results go back the same way, on the
stream that the other library works on.  Two libraries leave no choice but a copy: torch takes no
negative strides and no read-only memory, and XLA, on a CPU, only memory at multiples of 64 bytes,
which NumPy's seldom is.
"""

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from ..errors import DTypeError, FrameworkError
from .devices import at
from .stand_in import StandIn, is_planned
from .target import target_of


class Framework(NamedTuple):
    """How arrays of another library are adopted, and how results go back to where one was."""

    adopt: Callable[[Any], Any]
    give_back: Callable[[Any, Any], Any]  # (result, an operand)
    stream: Callable[[Any], AbstractContextManager[Any]] = nullcontext  # of an operand


class Stream(NamedTuple):
    """A stream as CuPy takes it; torch's own speak this protocol from 2.10 on."""

    address: int

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the version of the protocol, and the stream."""
        return 0, self.address


def _plain(array: Any) -> Any:
    if isinstance(array, np.ma.MaskedArray):
        raise FrameworkError("has a mask, which would be lost; pass its .filled(value)")
    return np.asarray(array)


def _torch_adopt(tensor: Any) -> Any:
    import torch

    if tensor.requires_grad and torch.is_grad_enabled():
        raise FrameworkError(
            "requires a gradient, but torch's autograd does not see this call: pass .detach(),"
            " or call under torch.no_grad()"
        )
    tensor = tensor.detach()
    if tensor.is_cuda:
        return cupy().from_dlpack(tensor)
    if tensor.dtype == torch.bfloat16:  # which NumPy's DLPack and torch's .numpy() refuse
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def _torch_give_back(array: Any, operand: Any) -> Any:
    import torch

    if not isinstance(array, np.ndarray):
        return torch.utils.dlpack.from_dlpack(array)
    if not array.flags.writeable or min(array.strides, default=0) < 0:  # torch has neither
        array = array.copy()
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


@contextmanager
def _torch_stream(tensor: Any) -> Iterator[None]:
    if not tensor.is_cuda:
        yield
        return
    import torch

    cuda, stream = cupy().cuda, Stream(torch.cuda.current_stream(tensor.device).cuda_stream)
    with cuda.Device(tensor.device.index), cuda.Stream.from_external(stream):
        yield


def _jax_adopt(array: Any) -> Any:
    import jax

    if isinstance(array, jax.core.Tracer):
        raise FrameworkError(
            "is traced by jax.jit, grad or vmap, which do not see this call: call outside of"
            " them, or through jax.pure_callback"
        )
    if len(array.devices()) > 1:
        raise FrameworkError("lies on several devices; pass .addressable_shards[i].data")
    return np.asarray(array) if array.platform() == "cpu" else cupy().from_dlpack(array)


def _jax_give_back(array: Any, operand: Any) -> Any:
    import jax

    if isinstance(array, np.ndarray):
        return jax.device_put(array, operand.device)
    return jax.dlpack.from_dlpack(array)


@contextmanager
def _jax_stream(array: Any) -> Iterator[None]:
    yield
    if array.platform() != "cpu":  # XLA may use an operand's memory again once it is let go
        cupy().cuda.Device(array.device.local_hardware_id).synchronize()


def _dlpack_adopt(array: Any) -> Any:
    if not hasattr(array, "__dlpack__"):
        return cupy().asarray(array)  # by __cuda_array_interface__
    on_gpu = array.__dlpack_device__()[0] == 2
    return (cupy() if on_gpu else np).from_dlpack(array)


def _dlpack_give_back(array: Any, operand: Any) -> Any:
    if not hasattr(operand, "__array_namespace__"):
        return array
    return operand.__array_namespace__().from_dlpack(array)


FRAMEWORKS = {
    "numpy": Framework(_plain, lambda array, operand: array),  # subclasses and scalars
    "torch": Framework(_torch_adopt, _torch_give_back, _torch_stream),
    "jax": Framework(_jax_adopt, _jax_give_back, _jax_stream),
}
DLPACK = Framework(_dlpack_adopt, _dlpack_give_back)


def cupy() -> Any:
    """Return CuPy, which sees what other libraries keep on a GPU."""
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise FrameworkError("lies on a GPU; install unsloth-cupy[cuda12] or [cuda13]") from error


def elsewhere(library: str, op: Any, arrays: Sequence[Any], options: dict[str, Any]) -> Any:
    """Run op on adopted arrays of another library, on its stream, and give results back."""
    there = FRAMEWORKS.get(library, DLPACK)
    operand = next(a for a in arrays if a is not None and type(a) is not int)
    with there.stream(operand):
        result = op.call(adopted(there, op.__name__, op.names, arrays), options)
        if type(result) is tuple:
            return tuple(a if a is None else there.give_back(a, operand) for a in result)
        return there.give_back(result, operand)


def adopted(there: Framework, call: str, names: Iterable[str], arrays: Iterable[Any]) -> list[Any]:
    """Return the arrays of a call as NumPy's or CuPy's; None and numbers stay what they are."""
    found: list[Any] = []
    for name, array in zip(names, arrays, strict=True):
        given = array is None or type(array) is int
        try:
            found.append(array if given else there.adopt(array))
        except (TypeError, RuntimeError, BufferError) as error:
            raise FrameworkError(f"{call}: {name} {error}") from error
    return found


def framework_of(array: Any, what: str) -> str:
    """Return the name of the library an array comes from; raise for what is no array."""
    if isinstance(array, np.ndarray | np.generic) or is_planned(array):
        return "numpy"
    name = type(array).__module__.partition(".")[0]
    name = {"jaxlib": "jax"}.get(name, name)
    if name in ("cupy", "torch", "jax") or hasattr(array, "__dlpack__"):
        return name
    if hasattr(array, "__cuda_array_interface__"):
        return name
    kind = type(array).__name__
    raise DTypeError(f"{what} is no array but {kind}; wrap it in numpy.asarray(...)")


def home_of(call: str, like: Any) -> Any:
    """Return an array that lives where something new is to live: ``like``, or else NumPy's."""
    if like is None:
        return np.empty(0)
    check_library(f"{call}: like", like)
    return like


def check_library(what: str, array: Any) -> None:
    """Raise unless an array is NumPy's or CuPy's."""
    if (library := framework_of(array, what)) not in ("numpy", "cupy"):
        raise FrameworkError(f"{what} comes from {library}; pass an array of NumPy or CuPy")


def common(op: str, names: Sequence[str], arrays: Sequence[Any]) -> str:
    """Return the one library that all arrays of a call come from; raise where they mix."""
    places: dict[str, str] = {}
    for name, array in zip(names, arrays, strict=False):
        if array is not None and type(array) is not int:
            library = framework_of(array, f"{op}: {name}")
            places[name] = f"{library} {getattr(array, 'device', '')}"
    if len(set(places.values())) > 1:
        listed = ", ".join(f"{name} from {place}" for name, place in places.items())
        raise FrameworkError(
            f"{op}: arrays of one call must share library and device; bring these to one: {listed}"
        )
    return next(iter(places.values()), "numpy").partition(" ")[0]


def native(arrays: Sequence[Any]) -> bool:
    """Say whether definitions and kernels take these arrays as they are."""
    exact = (np.ndarray, int, type(None))
    return all(
        type(a) in exact or is_planned(a) or type(a).__module__.startswith("cupy") for a in arrays
    )


def full_like(array: Any, number: float, shape: tuple[int, ...] | None = None) -> Any:
    """Return a new array of array's library, dtype and device, filled with a number.

    It has the shape of array where none is given.
    """
    library = framework_of(array, "the model of a new array")
    if library in ("numpy", "cupy"):
        with at(array):
            return np.full_like(array, number, shape=shape)
    shape = tuple(array.shape) if shape is None else shape
    if library == "torch":
        return array.new_full(shape, number)
    new = array.__array_namespace__().full
    return new(shape, number, dtype=array.dtype, device=array.device)


def placed(array: Any, like: Any) -> Any:
    """Return a NumPy array as one of like's library and device."""
    library = framework_of(like, "the model of a new array")
    if is_planned(like):
        return like.placed(array)
    if library == "torch":
        return FRAMEWORKS["torch"].give_back(array, like).to(like.device)
    if library == "jax":
        return FRAMEWORKS["jax"].give_back(array, like)
    with at(like):
        return np.asarray(array, like=like) if library == "cupy" else array


def on_host(array: Any) -> Any:
    """Return array as NumPy's, copied from its GPU where it lives on one."""
    if isinstance(array, np.ndarray):
        return array
    with at(array):  # its current stream is the one to wait for
        return array.get()


def empty(shape: Any, dtype: Any, like: Any) -> Any:
    """Return a new array, uninitialised, of like's library and device."""
    if type(like) is np.ndarray:
        return np.empty(shape, dtype)
    if isinstance(like, StandIn):
        return like.empty(shape, dtype)
    target = target_of(like)
    return np.empty(shape, dtype) if target is None else target.empty(shape, dtype, like)


def scipy_of(module: str, like: Any) -> Any:
    """Return a module of SciPy, or of CuPy's twin of it, by where an array lives."""
    if is_planned(like):
        return like.scipy[module]
    home = "scipy" if isinstance(like, np.ndarray) else "cupyx.scipy"
    return importlib.import_module(f"{home}.{module}")
