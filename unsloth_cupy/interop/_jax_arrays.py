"""Converts between arrays of JAX and of NumPy or CuPy, over the same memory where possible.

On a CPU, XLA only accepts memory that is aligned to 64 bytes.  NumPy's memory seldom is, so results
are copied.
"""

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from ..core.frameworks import Framework, adopt_all, cupy
from ..errors import DTypeError, FrameworkError, RangeError
from ._wiring import check_places

# JAX itself may crash if such an array is used.
DELETED = "was deleted, as jax.jit deletes what it is donated; use what that call returned"


def run(op: Any, arrays: Sequence[Any], options: dict[str, Any]) -> Any:
    """Run an op on the memory of concrete (not traced) arrays."""
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
    views = [None if array is None else np.asarray(array) for array in arrays]
    return _called(op, views, arrays, options, lead)


def are_keys(array: Any) -> bool:
    """Return whether an array has keys of jax.random instead of numbers."""
    return jax.numpy.issubdtype(array.dtype, jax.dtypes.extended)


def check_numbers(op: Any, arrays: Sequence[Any]) -> None:
    """Raise for objects of JAX that are not arrays of numbers: keys, references, shape structs."""
    for name, array in zip(op.names, arrays, strict=True):
        if isinstance(array, jax.Array) and are_keys(array):
            problem = "holds keys of jax.random; pass numbers: jax.random.key_data(keys)"
            raise DTypeError(f"{op.called}: {name} {problem}")
        if type(array).__module__.startswith("jax") and not isinstance(array, jax.Array):
            problem = f"is not an array but {type(array).__name__}; pass an array"
            raise DTypeError(f"{op.called}: {name} {problem}")


def with_integers(op: Any, arrays: Sequence[Any]) -> list[Any]:
    """Return arrays with NumPy's integers and booleans, such as labels, converted to JAX's.

    Functions of ``jax.numpy`` accept these, too.  NumPy's floats stay as they are, and are refused.
    """
    lead: Any = next(array for array in arrays if isinstance(array, jax.Array))
    result = [*arrays]
    for i, (name, array) in enumerate(zip(op.names, arrays, strict=True)):
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "iub":
            continue
        narrow = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
        if not np.array_equal(narrow, array):
            problem = f"holds numbers beyond {narrow.dtype.name}; see jax_enable_x64"
            raise RangeError(f"{op.called}: {name} {problem}")
        traced = isinstance(lead, jax.core.Tracer) or not lead.committed
        result[i] = jax.numpy.asarray(narrow) if traced else jax.device_put(narrow, lead.sharding)
    return result


def run_checked(op: Any, arrays: Sequence[Any], options: dict[str, Any]) -> Any:
    """Run an op as ``run`` does; raise for arrays of another library, or on several devices."""
    for name, array in zip(op.names, arrays, strict=True):
        if isinstance(array, jax.Array) and array.is_deleted():
            raise FrameworkError(f"{op.called}: {name} {DELETED}")
        if isinstance(array, jax.Array) and len(array.devices()) > 1:
            cure = "call it inside jax.jit, or inside jax.shard_map, once for each part"
            raise FrameworkError(f"{op.called}: {name} is on several devices; {cure}")
    op.library_of(arrays)
    lead: Any = next(array for array in arrays if isinstance(array, jax.Array))
    on_host = lead.platform() == "cpu"
    check_places(op, arrays, "cpu" if on_host else f"cuda:{lead.device.local_hardware_id}")
    with stream(lead):
        views = adopt_all(DIRECT, op.called, op.names, arrays)
        return _called(op, views, arrays, options, lead)


def _called(
    op: Any, views: Sequence[Any], arrays: Sequence[Any], options: dict[str, Any], lead: Any
) -> Any:
    """Run an op on views of JAX's arrays, and return its results as arrays of JAX."""
    results = op.call(views, options)
    if results.__class__ is tuple:
        return tuple(_back(array, views, arrays, lead) for array in results)
    return _back(results, views, arrays, lead)


def alike(arrays: dict[str, Any], only: Container[str] | None = None) -> dict[str, Any]:
    """Return all arrays, or the arrays in ``only``, with equal sharding for one callback.

    Inside ``shard_map`` all arrays are made to vary over the same axes of the mesh: JAX sums a
    gradient over the axes over which its operand does not vary.  On a mesh with explicit axes all
    arrays are replicated.
    """
    axes = frozenset().union(*map(_varying, arrays.values()))
    names = [name for name in arrays if only is None or name in only]
    return {name: _alike(arrays[name], axes) for name in names}


def _alike(array: Any, axes: frozenset[Any]) -> Any:
    """Return an array that varies over these axes of the mesh, without explicit sharding."""
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
    """Return the axes of the mesh over which an array varies inside ``shard_map``."""
    form: Any = jax.typeof(array)
    if hasattr(form, "manual_axis_type"):
        form = form.manual_axis_type
    axes: frozenset[Any] = getattr(form, "varying", getattr(form, "vma", frozenset()))
    return axes


def _back(array: Any, views: Sequence[Any], arrays: Sequence[Any], lead: Any) -> Any:
    """Return a result as an array of JAX, or the operand itself if the result is its view."""
    if array is None:
        return None
    if not isinstance(array, np.ndarray) or array.base is not None:
        for view, operand in zip(views, arrays, strict=True):
            if view is array:
                return operand
    return give_back(array, lead)


def adopt(array: Any) -> Any:
    """Return a view of an array of JAX as an array of NumPy or CuPy."""
    if isinstance(array, np.ndarray):  # an operand beside arrays of JAX
        return array
    if isinstance(array, jax.core.Tracer):
        raise FrameworkError("is traced by JAX, and this call needs its values")
    if array.is_deleted():
        raise FrameworkError(DELETED)
    return np.asarray(array) if array.platform() == "cpu" else cupy().from_dlpack(array)


def give_back(array: Any, operand: Any) -> Any:
    """Return a result as an array of JAX, on the device of an operand."""
    if not isinstance(array, np.ndarray):
        return jax.dlpack.from_dlpack(array)
    if array.base is None and not operand.committed:  # NumPy's own memory
        return jax.numpy.asarray(array)
    return jax.device_put(array, operand.sharding if operand.committed else None)


@contextmanager
def stream(array: Any) -> Iterator[None]:
    """Wait for the GPU after the block, as XLA may reuse an operand's memory after its release."""
    yield
    if array.platform() != "cpu":
        cupy().cuda.Device(array.device.local_hardware_id).synchronize()


DIRECT = Framework(adopt, give_back, stream)
