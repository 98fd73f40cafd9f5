"""Dtypes and checks of all caches, and the conversion of int8 codes to floats.

k = scale * code        one scale for each token and head
"""

from typing import Any

import numpy as np

from ..core import arrays
from ..core.call import is_integer
from ..core.dtypes import FLOAT32, FLOATS, KERNEL_DTYPES, Array
from ..errors import ConfigError, DTypeError, RangeError, ShapeError

MOST_LAYERS = 10_000  # most layers of a cache, each with arrays of its own
INT8 = np.dtype("int8")
STORED = (*FLOATS, INT8)  # the dtypes of caches


def scale_bytes(kind: np.dtype[Any], heads: int) -> int:
    """Return the bytes of the scales for keys and values; ``heads`` counts tokens times heads."""
    return 2 * 4 * heads if kind == INT8 else 0


def scales_like(kind: np.dtype[Any], shape: tuple[int, ...], like: Any) -> Any:
    """Return the scales of an empty cache, zeros of this shape; None for a cache of floats."""
    if kind != INT8:
        return None
    scales = arrays.empty(shape, FLOAT32, like)
    scales[...] = 0  # a definition also reads slots without a token, before it masks them
    return scales


def read(codes: Array, scales: Array, dtype: Any) -> Array:
    """Return keys or values as floats: codes (..., dim) times scales (...), rounded once."""
    with np.errstate(over="ignore"):  # values beyond float16 become infinity, as on a GPU
        floats: Array = (codes * scales[..., None]).astype(dtype, copy=False)
    return floats


def windows_of(call: str, window: Any, layers: int) -> list[int | None]:
    """Return the window of each layer, from a list or from one window for all layers.

    Raise ConfigError for invalid windows or too many layers.
    """
    if layers > MOST_LAYERS:
        raise ConfigError(f"{call}(layers={layers}): pass {MOST_LAYERS} or fewer")
    windows = [*window] if isinstance(window, tuple | list) else [window] * layers
    if len(windows) != layers or not all(w is None or is_integer(w, 1) for w in windows):
        cure = "pass the number of tokens to keep, 1 or more, None for all, or a list of these"
        raise ConfigError(f"{call}(window={window!r}): {cure}")
    return windows


def check_latent(call: str, latent: Any, kv_heads: int, dim: int, kind: np.dtype[Any]) -> None:
    """Raise ConfigError unless the first ``latent`` numbers of a key can be its value."""
    if latent is None:
        return
    problem = f"{call}(latent={latent!r})"
    if not is_integer(latent, 1) or latent > dim:
        cure = f"pass how many of the {dim} numbers of a key are its value, or None"
        raise ConfigError(f"{problem}: {cure}")
    if kv_heads != 1:
        cure = "all heads read one row per token: pass kv_heads=1"
        raise ConfigError(f"{problem}: kv_heads is {kv_heads}; {cure}")
    if kind == INT8:
        cure = "pass a float dtype"
        raise ConfigError(f"{problem}: one scale per row does not fit both of its parts; {cure}")


def check_latent_options(call: str, options: dict[str, Any]) -> None:
    """Raise ConfigError unless all options are options of latent attention, with a scale."""
    names = {name for name, value in options.items() if value is not None}
    if unknown := sorted(names - {"scale", "causal", "mask"}):
        cure = "it has scale, causal and mask"
        raise ConfigError(f"{call}: a latent cache has no option {unknown[0]!r}; {cure}")
    if options.get("scale") is None:
        cure = "pass the scale of the model's heads: 1 / sqrt(length of a row) would be wrong"
        raise ConfigError(f"{call}: scale is missing, which a latent cache needs; {cure}")


def check_length(call: str, length: Any) -> None:
    """Raise RangeError unless length is a number of tokens to keep."""
    if not is_integer(length):
        cure = "pass the number of tokens to keep, 0 or more"
        raise RangeError(f"{call}.truncate({length!r}): {cure}")


def check_new(
    call: str, axis: str, rows: int, k: Any, v: Any, storage: Array, latent: int | None
) -> None:
    """Raise unless k and v are (rows, tokens, kv_heads, dim) with the storage's library and dtype.

    For int8 storage they must have one float dtype, but not float64.  For latent storage v is None.
    """
    if latent is not None and v is not None:
        cure = f"the first {latent} numbers of k are the values; pass None for v"
        raise ConfigError(f"{call}: v is passed together with latent={latent}; {cure}")
    v = k if latent is not None else v
    arrays.common(call, ("the cache", "k", "v"), (storage, k, v))
    kv_heads, dim = storage.shape[2:]
    tokens = k.shape[1] if getattr(k, "ndim", 0) > 1 else 0
    for name, array in (("k", k), ("v", v)):
        shape = getattr(array, "shape", None)
        if shape != (rows, tokens, kv_heads, dim):
            form = f"({axis}={rows}, tokens, kv_heads={kv_heads}, dim={dim})"
            problem = f"{call}: {name} is {shape}; it must be {form}"
            raise ShapeError(problem, expected=(rows, "tokens", kv_heads, dim), actual=shape)
        if storage.dtype == INT8 and (array.dtype not in KERNEL_DTYPES or array.dtype != k.dtype):
            cure = "pass k and v of one dtype: float16, bfloat16 or float32"
            raise DTypeError(f"{call}: {name} is {array.dtype}, for a cache of int8; {cure}")
        if storage.dtype not in (INT8, array.dtype):
            cure = f"create the cache with dtype={array.dtype.name!r}"
            raise DTypeError(f"{call}: {name} is {array.dtype}, not {storage.dtype}; {cure}")
