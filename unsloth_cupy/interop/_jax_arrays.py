"""Arrays of JAX over the memory of NumPy and CuPy, and back.

XLA, on a CPU, takes only memory at multiples of 64 bytes, which NumPy's seldom is: such results
are copied.
"""

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from ..core.frameworks import Framework, adopted, cupy
from ..errors import DTypeError, FrameworkError
from ._wiring import check_places

# What JAX itself answers of such an array may be a crash.
DELETED = "was deleted, as jax.jit deletes what it is donated; use what that call returned"


def run(op: Any, arrays: Sequence[Any], options: dict[str, Any]) -> Any:
    """Run an op on the memory of arrays that have values."""
    place = None
    for array in arrays:
        if array is not None:
            here = array.sharding
            place = place or here
            if array.is_deleted() or (here is not place and here != place):
                return run_checked(op, arrays, options)
    lead = next(array for array in arrays if array is not None)
    if place.__class__ is not SingleDeviceSharding or lead.platform() != "cpu":
        return run_checked(op, arrays, options)
    given = [None if array is None else np.asarray(array) for array in arrays]
    return _called(op, given, arrays, options, lead)


def are_keys(array: Any) -> bool:
    """Say whether an array holds keys of jax.random, and no numbers."""
    return jax.numpy.issubdtype(array.dtype, jax.dtypes.extended)


def check_numbers(op: Any, arrays: Sequence[Any]) -> None:
    """Raise for what JAX has beside arrays of numbers: keys, references, forms."""
    for name, array in zip(op.names, arrays, strict=True):
        if isinstance(array, jax.Array) and are_keys(array):
            problem = "holds keys of jax.random; pass numbers: jax.random.key_data(keys)"
            raise DTypeError(f"{op.called}: {name} {problem}")
        if type(array).__module__.startswith("jax") and not isinstance(array, jax.Array):
            problem = f"is not an array but {type(array).__name__}; pass an array"
            raise DTypeError(f"{op.called}: {name} {problem}")


def run_checked(op: Any, arrays: Sequence[Any], options: dict[str, Any]) -> Any:
    """Run an op likewise; raise for arrays of another library, and of several devices."""
    for name, array in zip(op.names, arrays, strict=True):
        if isinstance(array, jax.Array) and array.is_deleted():
            raise FrameworkError(f"{op.called}: {name} {DELETED}")
        if isinstance(array, jax.Array) and len(array.devices()) > 1:
            cure = "call inside of jax.jit, or of jax.shard_map, once for each part"
            raise FrameworkError(f"{op.called}: {name} lies on several devices; {cure}")
    op.library_of(arrays)
    lead: Any = next(array for array in arrays if isinstance(array, jax.Array))
    on_host = lead.platform() == "cpu"
    check_places(op, arrays, "cpu" if on_host else f"cuda:{lead.device.local_hardware_id}")
    with stream(lead):
        given = adopted(DIRECT, op.called, op.names, arrays)
        return _called(op, given, arrays, options, lead)


def _called(
    op: Any, given: Sequence[Any], arrays: Sequence[Any], options: dict[str, Any], lead: Any
) -> Any:
    found = op.call(given, options)
    if found.__class__ is tuple:
        return tuple(_back(array, given, arrays, lead) for array in found)
    return _back(found, given, arrays, lead)


def alike(arrays: dict[str, Any], only: Container[str] | None = None) -> dict[str, Any]:
    """Return arrays, all of them or some, as one callback takes and gives them.

    Inside of ``shard_map`` they vary over the same axes of the mesh: a gradient is summed over
    those that its operand does not vary over.  On a mesh with explicit axes they are whole.
    """
    axes = frozenset().union(*map(_varying, arrays.values()))
    names = [name for name in arrays if only is None or name in only]
    return {name: _alike(arrays[name], axes) for name in names}


def _alike(array: Any, axes: frozenset[Any]) -> Any:
    place, missing = jax.typeof(array).sharding, tuple(axes - _varying(array))
    if missing:
        lax: Any = jax.lax
        if hasattr(lax, "pcast"):
            array = lax.pcast(array, missing, to="varying")
        else:  # JAX 0.8
            array = lax.pvary(array, missing)
    if any(part is not None for part in place.spec):
        reshard: Any = jax.sharding.reshard
        whole: Any = PartitionSpec
        return reshard(array, NamedSharding(place.mesh, whole()))
    return array


def _varying(array: Any) -> frozenset[Any]:
    form: Any = jax.typeof(array)
    if hasattr(form, "manual_axis_type"):
        form = form.manual_axis_type
    axes: frozenset[Any] = getattr(form, "varying", getattr(form, "vma", frozenset()))
    return axes


def _back(array: Any, given: Sequence[Any], arrays: Sequence[Any], lead: Any) -> Any:
    """Return JAX's array for a result: an operand for what is one."""
    if array is None:
        return None
    if not isinstance(array, np.ndarray) or array.base is not None:
        for each, operand in zip(given, arrays, strict=True):
            if each is array:
                return operand
    return give_back(array, lead)


def adopt(array: Any) -> Any:
    """Return NumPy's or CuPy's view of an array of JAX."""
    if isinstance(array, jax.core.Tracer):
        raise FrameworkError("is traced by JAX, and this call asks for values")
    if array.is_deleted():
        raise FrameworkError(DELETED)
    return np.asarray(array) if array.platform() == "cpu" else cupy().from_dlpack(array)


def give_back(array: Any, operand: Any) -> Any:
    """Return JAX's view of a result, where an operand is."""
    if not isinstance(array, np.ndarray):
        return jax.dlpack.from_dlpack(array)
    if array.base is None and not operand.committed:  # new memory of NumPy's: copied
        return jax.numpy.asarray(array)
    return jax.device_put(array, operand.sharding if operand.committed else None)


@contextmanager
def stream(array: Any) -> Iterator[None]:
    """Wait, on a GPU: XLA may use an operand's memory again once it is let go."""
    yield
    if array.platform() != "cpu":
        cupy().cuda.Device(array.device.local_hardware_id).synchronize()


DIRECT = Framework(adopt, give_back, stream)
