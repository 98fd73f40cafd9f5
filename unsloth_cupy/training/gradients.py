"""Sums, norms, clipping and checks of gradients, between backward and the optimizer."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from ..core.arrays import between_elements, common, framework_of
from ..core.call import is_number
from ..core.dtypes import FLOATS, Array, Stored
from ..core.gpu import device_of, several_gpus
from ..core.target import target_of
from ..errors import ConfigError, DTypeError, FrameworkError
from ..ops.common.in_place import overlapping
from ..ops.common.many import launchable
from ..ops.common.spans import span
from ..ops.elements.cast import accumulate_, cast
from ..ops.optimizers.gradients import GradientMeasure, measured, rescale, square_sum
from ..placement import on_gpu_of_first


@on_gpu_of_first
def clip_gradients(gradients: Mapping[str, Array], max_norm: float) -> Any:
    """Scale gradients in place so that their global norm is at most max_norm.

    ``norm = sqrt(sum of all squares)``, accumulated in float64;
    ``gradient *= max_norm / norm`` if norm is above max_norm.

    Parameters
    ----------
    gradients : {name: array}
        NumPy or CuPy arrays of a float dtype, writable.
    max_norm : float
        Maximum norm, above 0; infinity only measures.

    Returns
    -------
    norm : float, or float64 array of shape () on a GPU
        The norm before scaling.  If it is not finite, no gradient has changed: skip the step.  The
        host does not wait for the array.

    Raises
    ------
    ConfigError
        max_norm is not above 0, or a gradient is read-only.
    DTypeError, FrameworkError
        A gradient is not a float array of NumPy or CuPy.

    Notes
    -----
    On a GPU there are two launches; the second one returns at once if nothing needs scaling.
    ``measure_gradients`` and ``AdamW.step`` together clip without the second launch.  Source:
    Pascanu, Mikolov and Bengio, On the difficulty of training recurrent neural networks, 2013.
    """
    _check_norm("clip_gradients", max_norm)
    check_in_place("clip_gradients", gradients)
    arrays = list(gradients.values())
    if launchable(arrays):
        measure = measured(arrays, max_norm=max_norm)
        rescale(arrays, measure)
        return measure.norm
    measure = _measured(arrays, max_norm, 1.0)
    if isinstance(measure.factor, float) and (measure.factor == 1 or not measure.finite):
        return measure.norm
    for gradient in arrays:
        wide = np.promote_types(gradient.dtype, np.float32)  # a 16-bit factor would be off
        by = np.where(measure.finite, measure.factor, 1)
        np.multiply(gradient, by, out=gradient, dtype=wide, casting="same_kind")
    return measure.norm


def sum_gradients(
    passes: Iterable[tuple[Any, dict[str, Array]]], count: int, *, added: bool = False
) -> tuple[float, dict[str, Array]]:
    """Return the sum of the losses of ``count`` passes, and the float32 sums of their gradients.

    The gradients of a single pass are not cast.  The gradients of a pass are freed before the next
    pass begins: memory holds one set of gradients and the sums.  ``added``: each pass returns the
    sums so far, to which it has added its gradients.
    """
    total, sums = 0.0, dict[str, Array]()
    for loss, gradients in passes:
        with device_of(loss):
            total += float(loss)
        if count == 1:
            return total, gradients
        sums = gradients if added else add_gradients(sums, gradients)
    return total, sums


def add_gradients(sums: dict[str, Array], gradients: dict[str, Array]) -> dict[str, Array]:
    """Add gradients to float32 sums, and free each of them; return the sums."""
    for name in [*gradients]:
        if name in sums:
            accumulate_(sums[name], gradients.pop(name))
        else:
            sums[name] = cast(gradients.pop(name), dtype="float32")
    return sums


def sum_in_halves(passes: Iterator[dict[str, Array]], count: int) -> dict[str, Array]:
    """Return the float32 sums of the gradients of ``count`` passes; {} without a pass.

    The sum of the first half (the larger one) is added to the sum of the second half, and so on in
    each half.  The bits depend on the passes alone, also if ranks add up halves: see
    ``parallel.data.in_halves``.  Memory holds up to log2(count) + 1 sums.
    """
    if count <= 1:
        return add_gradients({}, next(passes)) if count else {}
    second = count // 2
    sums = sum_in_halves(passes, count - second)
    return add_gradients(sums, sum_in_halves(passes, second))


def sums_held(count: int) -> list[int]:
    """Return for each pass of ``sum_in_halves`` the number of sums in memory when it begins."""
    if count <= 1:
        return [0] * count
    return sums_held(count - count // 2) + [1 + held for held in sums_held(count // 2)]


@on_gpu_of_first
def measure_gradients(
    gradients: Mapping[str, Array], max_norm: float = math.inf, *, scaler: Any = None
) -> GradientMeasure:
    """Return the global norm of gradients, whether they are finite, and a factor to scale them.

    ``norm = sqrt(sum of (gradient / scale)**2)``, ``factor = min(1, max_norm / norm) / scale``.

    Parameters
    ----------
    gradients : {name: array}
        NumPy or CuPy arrays of a float dtype; they are not changed.
    max_norm : float
        Maximum norm, above 0; infinity does not clip.
    scaler : LossScaler, optional
        The loss scaler of the gradients: its scale is divided out.

    Returns
    -------
    GradientMeasure(norm, finite, factor)
        Arguments of ``AdamW.step(gradients, lr, finite=finite, factor=factor)`` and
        ``scaler.update(finite)``; on a GPU the host does not wait for them.

    Raises
    ------
    ConfigError
        max_norm is not above 0.
    DTypeError, FrameworkError
        A gradient is not a float array of NumPy or CuPy.
    """
    _check_norm("measure_gradients", max_norm)
    check_floats("measure_gradients", gradients)
    if scaler is not None and not hasattr(scaler, "on_device"):
        raise ConfigError(f"measure_gradients(scaler={scaler!r}): pass a LossScaler, or None")
    arrays = list(gradients.values())
    with span("measure_gradients", next(iter(arrays), None), lambda: sum(a.nbytes for a in arrays)):
        if launchable(arrays):
            divisor = None if scaler is None else scaler.on_device(arrays[0]).scale
            return measured(arrays, max_norm=max_norm, divisor=divisor)
        return _measured(arrays, max_norm, 1.0 if scaler is None else scaler.value)


def _measured(arrays: list[Array], max_norm: float, divisor: float) -> GradientMeasure:
    """Compute the measure without kernels: numbers for NumPy arrays, 0-d arrays for CuPy arrays."""
    norm: Any = np.sqrt(sum(map(square_sum, arrays), np.float64(0))) / divisor
    if isinstance(norm, np.ndarray | np.generic):
        norm = float(norm)
        clipped = max_norm / norm if norm > max_norm else 1.0
        return GradientMeasure(norm, math.isfinite(norm), clipped / divisor)
    clipped = np.where(norm > max_norm, max_norm / norm, 1)
    return GradientMeasure(norm, np.isfinite(norm), (clipped / divisor).astype(np.float32))


def _check_norm(what: str, max_norm: Any) -> None:
    if not is_number(max_norm) or not max_norm > 0:
        raise ConfigError(f"{what}: max_norm={max_norm}; pass a number above 0")


def check_mapping(what: str, arrays: Any) -> None:
    """Raise unless ``arrays`` is a mapping."""
    if not isinstance(arrays, Mapping):
        raise DTypeError(f"{what}: pass {{name: array}}, not {type(arrays).__name__}")


def check_floats(what: str, arrays: Mapping[str, Array]) -> None:
    """Raise unless ``arrays`` maps names to float arrays of NumPy or CuPy, all on one GPU."""
    check_mapping(what, arrays)
    for name, array in arrays.items():
        if isinstance(array, Stored):
            raise DTypeError(
                f"{what}: {name} is {array!r}, which is frozen; pass the arrays of an adapter"
            )
        library = framework_of(array, f"{what}: {name}")
        if library not in ("numpy", "cupy"):
            raise FrameworkError(f"{what}: {name} comes from {library}; pass NumPy or CuPy arrays")
        if array.dtype not in FLOATS:
            raise DTypeError(f"{what}: {name} is {array.dtype}; pass float arrays only")
        check_place(f"{what}: {name}", array)
    if several_gpus():
        common(what, [*arrays], [*arrays.values()])


def check_place(what: str, array: Array) -> None:
    """Raise for an array on a GPU whose address or strides are not multiples of its item size."""
    if target_of(array) is not None and between_elements(array):
        raise DTypeError(f"{what} is not aligned to its element size; pass a copy of it")


def check_in_place(what: str, arrays: Mapping[str, Array]) -> None:
    """Raise unless ``arrays`` maps names to float arrays that may be changed in place."""
    check_floats(what, arrays)
    for name, array in arrays.items():
        if not getattr(array.flags, "writeable", True):  # CuPy's arrays have no such flag
            raise ConfigError(f"{what}: {name} is read-only; pass a copy of it")
    names = {id(array): name for name, array in arrays.items()}
    for name, array in arrays.items():
        if (other := names[id(array)]) != name:
            problem = f"{name} and {other} are one array, which would be changed twice"
            raise ConfigError(f"{what}: {problem}; name it once")
    if pair := overlapping(arrays):
        problem = f"{pair[0]} and {pair[1]} share memory"
        if pair[0] == pair[1]:
            problem = f"elements of {pair[0]} share memory"
        raise ConfigError(f"{what}: {problem}, which would be changed twice; pass a copy")
