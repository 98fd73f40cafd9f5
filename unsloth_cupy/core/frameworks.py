"""Arrays of torch, JAX and of anything that speaks DLPack, without copies.

They are adopted: NumPy or CuPy sees the same memory.  Results go back the same way, on the
stream that the other library works on.  Two libraries leave no choice but a copy: torch takes no
negative strides and no read-only memory, and XLA, on a CPU, only memory at multiples of 64 bytes,
which NumPy's seldom is.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from ..errors import FrameworkError
from . import gpu


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
        return gpu.cupy()
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
