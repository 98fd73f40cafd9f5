"""Tables of rotary position embeddings, with the scalings of Hugging Face's configs.

cos, sin [position, i] = factor * cos, sin (position * frequency[i])
frequency[i] = base**(-2 i / dim), then scaled for contexts longer than in training

Su et al., RoFormer, 2021.  linear: Chen et al., Position Interpolation, 2023.  dynamic, yarn:
Peng et al., YaRN, 2023.  longrope: Ding et al., LongRoPE, 2024.  llama3: Llama 3.1, 2024.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ...core.arrays import framework_of
from ...core.call import is_integer, is_number
from ...core.dtypes import Array
from ...errors import ConfigError, ShapeError
from ...machine import array_bytes, check_bytes
from ...placement import to_device_of

Scaling = Mapping[str, Any]
# The numbers of a config must be normal in float32, in which all arithmetic with them is done.
SMALLEST, LARGEST = (float(each) for each in (np.finfo("f4").tiny, np.finfo("f4").max))


def rope_tables(
    length: int,
    dim: int,
    *,
    base: float = 10000.0,
    scaling: Scaling | None = None,
    like: Any = None,
) -> tuple[Array, Array]:
    """Return cosine and sine of ``position * frequency[i]``, ``frequency[i] = base**(-2 i / dim)``.

    Angles are rounded to float32 exactly as in Hugging Face, because models were trained so.

    Parameters
    ----------
    length : int
        Number of positions, from 0 on.  The frequencies of ``dynamic`` and ``longrope`` depend on
        it.
    dim : int
        Number of rotated columns of a head; even.  If the config has a ``partial_rotary_factor``,
        the caller must multiply the head dim by it.
    base : float
        Wavelengths, in positions, range from 2 pi to almost 2 pi times base.
    scaling : mapping, optional
        The dict ``rope_scaling`` or ``rope_parameters`` of a Hugging Face config.  ``rope_type``
        (or ``type``) is one of default, linear, dynamic, yarn, longrope, llama3, proportional;
        ``rope_theta``, if present, replaces base.  If the config has ``max_position_embeddings`` or
        ``original_max_position_embeddings`` outside of this dict, add them to it.
    like : array, optional
        The tables are created in its library and on its device; by default in NumPy.

    Returns
    -------
    cos, sin : (length, dim / 2) float32
        Yarn and longrope multiply them by their attention factor.

    Raises
    ------
    ConfigError
        The type of the scaling is unknown, or a required number is missing or invalid.
    ShapeError
        dim is odd, or length or dim is negative.

    Examples
    --------
    >>> import numpy as np
    >>> from unsloth_cupy import rope_tables
    >>> cos, sin = rope_tables(6, 16, base=10_000.0)
    >>> assert cos.shape == (6, 8)
    >>> np.testing.assert_allclose(sin[:, 0], np.sin(np.arange(6)), rtol=1e-6)
    """
    if not is_integer(length) or not is_integer(dim) or dim % 2:
        raise ShapeError(
            f"rope_tables(length={length}, dim={dim}): length must be 0 or more, and dim even:"
            " columns are rotated in pairs",
            expected="a length of 0 or more, and an even dim",
            actual=(length, dim),
        )
    if like is not None:
        framework_of(like, "rope_tables: like")  # raises if like is not an array
    check_bytes(f"rope_tables(length={length}, dim={dim})", array_bytes((length, dim), 4), like)
    frequency, factor = scaled_frequencies(scaling, length, dim, base)
    angle = np.arange(length, dtype=np.float32)[:, None] * frequency  # (length, dim / 2)
    cos, sin = np.cos(angle), np.sin(angle)
    if factor != 1:
        cos, sin = cos * np.float32(factor), sin * np.float32(factor)
    return (cos, sin) if like is None else (to_device_of(cos, like), to_device_of(sin, like))


def scaled_frequencies(
    scaling: Scaling | None, length: int, dim: int, base: float
) -> tuple[Array, float]:
    """Return the frequencies for a length, and the attention factor of cosines and sines.

    Raises
    ------
    ConfigError
        For the same reasons as in ``rope_tables``.
    """
    config: Any = {} if scaling is None else scaling
    if not isinstance(config, Mapping) or any(isinstance(v, Mapping) for v in config.values()):
        raise ConfigError(
            f"rope_tables(scaling={config}): pass the dict of one layer type, or None"
        )
    base = _number(config, "rope_theta", base)
    kind = config.get("type") if config.get("rope_type") is None else config["rope_type"]
    kind = "default" if kind is None else kind
    if not isinstance(kind, str) or kind not in RULES:
        raise ConfigError(
            f"rope_tables(scaling={dict(config)}): rope_type must be one of {', '.join(RULES)}"
        )
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        frequency, factor = RULES[kind](config, length, dim, base)
    if not np.isfinite(frequency).all():
        raise ConfigError(
            f"rope_tables(scaling={dict(config)}): a frequency is not finite; choose other numbers"
        )
    return frequency, factor


def frequencies(dim: int, base: float, stretch: Array | float = 1.0, like: Any = None) -> Array:
    """Return ``base**(-2 i / dim) / stretch``, in radians per position: (dim / 2,) float32.

    They are computed on the device of ``like``: a captured graph cannot copy arrays from the host.
    """
    check_base("rope_tables", base)
    exponent = np.arange(0, dim, 2, dtype=np.float32, like=like) / np.float32(max(1, dim))
    wavelength = (base ** exponent.astype(np.float64)).astype(np.float32)  # over 2 pi
    return 1 / (np.float32(stretch) * wavelength)


def check_base(call: str, base: float) -> None:
    """Raise ConfigError unless the base is finite and above 1."""
    if not (is_number(base) and 1 < base <= LARGEST):
        raise ConfigError(f"{call}: the base of the wavelengths is {base}; it must be above 1")


# Each rule returns the frequencies, and the attention factor of cosines and sines.


def _default(scaling: Scaling, length: int, dim: int, base: float) -> tuple[Array, float]:
    """Return the frequencies of all wavelengths as they are."""
    return frequencies(dim, base), 1.0


def _linear(scaling: Scaling, length: int, dim: int, base: float) -> tuple[Array, float]:
    """Stretch all wavelengths by the same factor."""
    return frequencies(dim, base) / np.float32(_number(scaling, "factor")), 1.0


def _dynamic(scaling: Scaling, length: int, dim: int, base: float) -> tuple[Array, float]:
    """Raise the base if length exceeds the trained context: long wavelengths stretch the most."""
    factor, trained = _number(scaling, "factor"), _trained(scaling, "max_position_embeddings")
    stretch = factor * max(length, trained) / trained - (factor - 1)
    power = dim / (dim - 2) if dim > 2 else 0.0  # the only wavelength of dim 2 does not change
    return frequencies(dim, float(np.float32(base) * np.float32(stretch**power))), 1.0


def _yarn(scaling: Scaling, length: int, dim: int, base: float) -> tuple[Array, float]:
    """Stretch only wavelengths with fewer than beta_fast rotations in the trained context."""
    trained = _trained(scaling, "original_max_position_embeddings")
    factor = _factor(scaling, trained)
    growth = 0.1 * math.log(max(factor, 1))  # 0.1 is the paper's
    attention = 1 + growth
    if not any(_is_off(scaling.get(key)) for key in ("mscale", "mscale_all_dim")):
        above, below = _number(scaling, "mscale"), _number(scaling, "mscale_all_dim")
        attention = (1 + above * growth) / (1 + below * growth)
    unscaled = frequencies(dim, base)

    def column(turns: float) -> float:
        """Return the column, a fraction, whose angle makes ``turns`` full turns in training."""
        return dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base))

    first = column(_number(scaling, "beta_fast", 32.0))
    last = column(_number(scaling, "beta_slow", 1.0))
    if _flag(scaling, "truncate", default=True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    last += 0.001 * (first == last)  # no division by 0 below, as in Hugging Face
    columns = np.arange(dim // 2, dtype=np.float32)
    stretched = np.clip((columns - np.float32(first)) / np.float32(last - first), 0, 1)
    frequency = unscaled * (1 - stretched) + frequencies(dim, base, factor) * stretched
    return frequency, _number(scaling, "attention_factor", attention)


def _longrope(scaling: Scaling, length: int, dim: int, base: float) -> tuple[Array, float]:
    """Stretch each wavelength by its own factor, one for short and one for long contexts."""
    trained = _trained(scaling, "original_max_position_embeddings")
    factor = _factor(scaling, trained)
    attention = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    which = "long" if length > trained else "short"
    key = f"{which}_factor"
    if scaling.get(f"{which}_mscale") is not None:  # in configs of Phi-MoE
        attention = _number(scaling, f"{which}_mscale")
    try:
        stretch = np.asarray(scaling.get(key), np.float32)
    except (TypeError, ValueError, OverflowError):
        stretch = np.zeros(0, np.float32)
    if stretch.shape != (dim // 2,) or not ((stretch > 0) & np.isfinite(stretch)).all():
        raise ConfigError(
            f"rope_tables(scaling={dict(scaling)}): {key} must list {dim // 2} positive numbers,"
            f" one for each pair of the dim={dim} columns"
        )
    return frequencies(dim, base, stretch), _number(scaling, "attention_factor", attention)


def _llama3(scaling: Scaling, length: int, dim: int, base: float) -> tuple[Array, float]:
    """Stretch wavelengths with few rotations in training; leave wavelengths with many.

    Few is below low_freq_factor, many above high_freq_factor; between them the change is gradual.
    """
    trained = _trained(scaling, "original_max_position_embeddings")
    factor = np.float32(_number(scaling, "factor"))
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    if low >= high:
        raise ConfigError(
            f"rope_tables(scaling={dict(scaling)}): high_freq_factor must exceed low_freq_factor"
        )
    frequency = frequencies(dim, base)
    turns = np.float32(trained) / (np.float32(2 * math.pi) / frequency)
    kept = np.clip((turns - np.float32(low)) / np.float32(high - low), 0, 1)
    return (1 - kept) * frequency / factor + kept * frequency, 1.0


def _proportional(scaling: Scaling, length: int, dim: int, base: float) -> tuple[Array, float]:
    """Rotate only the shortest wavelengths: the first pairs of a head; the others stand still."""
    share, factor = (_number(scaling, key, 1.0) for key in ("partial_rotary_factor", "factor"))
    frequency = frequencies(dim, base) / np.float32(factor)
    frequency[int(share * dim // 2) :] = 0
    return frequency, 1.0


RULES: Mapping[str, Callable[[Scaling, int, int, float], tuple[Array, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "yarn": _yarn,
    "longrope": _longrope,
    "llama3": _llama3,
    "proportional": _proportional,
}


def _factor(scaling: Scaling, trained: float) -> float:
    """Return the factor by which the context grows; by default the ratio of both lengths."""
    if scaling.get("factor") is None and scaling.get("max_position_embeddings") is not None:
        return _number(scaling, "max_position_embeddings") / trained
    return _number(scaling, "factor")


def _trained(scaling: Scaling, first: str) -> float:
    """Return the number of positions in training: of the key ``first`` or else of the other key."""
    keys = ["max_position_embeddings", "original_max_position_embeddings"]
    present = [key for key in keys if scaling.get(key) is not None]
    return _number(scaling, first if first in present or not present else present[0], above=1)


def _is_off(value: Any) -> bool:
    """Return whether an optional number is absent or 0."""
    return value is None or (is_number(value) and value == 0)


def _flag(scaling: Scaling, key: str, *, default: bool) -> bool:
    """Return a bool of the scaling, or the default if it is absent."""
    value = scaling.get(key, default)
    if not isinstance(value, bool):
        raise ConfigError(
            f"rope_tables(scaling={dict(scaling)}): {key} is {value!r}; it must be true or false"
        )
    return value


def _number(scaling: Scaling, key: str, default: float | None = None, above: float = 0) -> float:
    """Return a number of the scaling, or the default if it is absent or null.

    It must be in the range of float32.
    """
    value: Any = default if scaling.get(key) is None else scaling[key]
    valid = is_number(value) and max(above, SMALLEST) <= float(value) <= LARGEST
    if not valid or value == above:
        raise ConfigError(
            f"rope_tables(scaling={dict(scaling)}): {key} is {value!r}; it must be a number"
            f" above {above}"
        )
    return float(value)
