"""Replaces arrays in the arguments of a call by planned arrays, which have no elements."""

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..core.call import is_integer
from ..core.dtypes import FLOATS, KINDS, Stored
from ..errors import ConfigError

DTYPES = {dtype.name: dtype for dtype in (*FLOATS, *(d for kind in KINDS.values() for d in kind))}


class Shape(NamedTuple):
    """A placeholder for an array in a call of ``explain``, with its shape and dtype."""

    sizes: tuple[int, ...]
    dtype: Any


def shape(sizes: Any, dtype: Any) -> Shape:
    """Return a placeholder for an array in ``explain``: ``shape((1, 8192, 32, 128), "bfloat16")``.

    Parameters
    ----------
    sizes : tuple of int
        Sizes of the axes; an integer means one axis.
    dtype : dtype or its name
        Dtype of the elements.

    Returns
    -------
    shape : Shape

    Raises
    ------
    ConfigError
        The sizes are not integers >= 0, or the dtype is not one that ops accept.
    """
    axes = sizes if isinstance(sizes, tuple | list) else (sizes,)
    if not all(is_integer(size) for size in axes):
        raise ConfigError(f"shape({sizes!r}, {dtype!r}): sizes is not a tuple of integers >= 0")
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", "")
    name = name or str(dtype).rpartition(".")[2]
    try:
        name = name if name in DTYPES else np.dtype(dtype).name
    except (TypeError, ValueError):
        name = str(dtype)
    if name not in DTYPES:
        known = ", ".join(DTYPES)
        raise ConfigError(f"shape({sizes!r}, {dtype!r}): dtype is not one of {known}")
    return Shape(tuple(map(int, axes)), DTYPES[name])


def _is_array(value: Any) -> bool:
    """Return whether a value is an array, a quantized weight or a Shape."""
    return isinstance(value, Shape | Stored) or (
        hasattr(value, "shape") and hasattr(value, "dtype")
    )


def arrays_of(value: Any) -> list[Any]:
    """Return all arrays in nested arguments."""
    if _is_array(value):
        return [value]
    inner = value.values() if isinstance(value, Mapping) else value
    if isinstance(value, Mapping | list | tuple):
        return [array for each in inner for array in arrays_of(each)]
    return []


def placed(value: Any, kind: Any) -> Any:
    """Return arguments with planned arrays in place of all arrays and Shapes."""
    if isinstance(value, Shape):
        return kind.of(value.sizes, value.dtype)
    if isinstance(value, Stored):
        return twin_of(value, kind)
    if _is_array(value) and not isinstance(value, np.generic | np.dtype):
        return _like(value, kind)
    if type(value) is dict:
        return {name: placed(each, kind) for name, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(placed(each, kind) for each in value)
    return value


def _like(array: Any, kind: Any) -> Any:
    """Return a planned array with the shape, dtype and (if known) strides of an array."""
    planned = kind.of(*shape(tuple(array.shape), array.dtype))
    strides = getattr(array, "strides", None)
    if isinstance(strides, tuple) and strides != planned.strides:
        form = np.lib.stride_tricks.as_strided(planned.form, planned.shape, strides)
        return kind._made(form, planned.memory)
    return planned


def twin_of(owner: Any, kind: Any) -> Any:
    """Return a copy of an object, such as a model, with planned arrays in place of its arrays."""
    from ..models.transformer import Transformer

    if not isinstance(owner, Transformer):
        twin = copy.copy(owner)
        vars(twin).update({name: placed(value, kind) for name, value in vars(owner).items()})
        return twin
    model = Transformer(owner.config, placed(dict(owner.parameters), kind), owner.texts)
    model.chunked_mlp = owner.chunked_mlp
    if owner.adapter is not None:
        model.adapter = copy.copy(owner.adapter)
        model.adapter.parameters = placed(dict(owner.adapter.parameters), kind)
    return model
