"""Read typed values of a config.json; errors name the key that is missing or wrong."""

from collections.abc import Mapping
from typing import Any

from ...errors import ConfigError
from ...files import say_once
from ...ops.position.rope_tables import LARGEST
from .class_keys import keys_of
from .family import Family
from .keys import COMMON, NEUTRAL, READ, WITHOUT_EFFECT

# Upper bounds of sizes: larger numbers must be mistakes.
MOST = 2**31 - 1
MOST_OF = {
    "num_hidden_layers": 10_000,
    **dict.fromkeys(("head_dim", "num_attention_heads", "num_key_value_heads"), 2**16),
    "zero_expert_num": 2**16,
    **{"hidden_size": 2**20, "intermediate_size": 2**22, "vocab_size": 2**26},
}
SHOWN = 5  # most keys in a message
CUT = 40  # most characters of a key or a value in a message


class Reader:
    """Reads typed values of a config.json; errors name the key that is missing or wrong."""

    def __init__(self, values: Mapping[str, Any], family: Family) -> None:
        self.values, self.family = values, family
        self.defaults = {**COMMON, **family.defaults}

    def get(self, key: str) -> Any:
        """Return the value, which may be None for null; if absent, the family's default or None."""
        return self.values.get(key, self.defaults.get(key))

    def not_null(self, key: str) -> Any:
        """Return the value; if absent or null, the family's default."""
        value = self.values.get(key)
        return self.defaults.get(key) if value is None else value

    def size(self, key: str) -> int:
        """Return a positive integer."""
        value = self.get(key)
        if value is None:
            raise ConfigError(f'config: {key} is missing; add it, as in "{key}": 64')
        most = MOST_OF.get(key, MOST)
        if type(value) is not int or not 1 <= value <= most:
            raise ConfigError(f"config: {key} is {value!r}; it must be an integer in 1 .. {most}")
        return value

    def number(self, key: str) -> float:
        """Return a finite number that is not negative."""
        value = self.not_null(key)
        if type(value) not in (int, float) or not 0 <= value <= LARGEST:
            raise ConfigError(f"config: {key} is {value!r}; it must be a number, 0 or more")
        return float(value)

    def flag(self, key: str) -> bool:
        """Return a bool."""
        value = self.not_null(key)
        if type(value) is not bool:
            raise ConfigError(f"config: {key} is {value!r}; it must be true or false")
        return value

    def resolve(self, flag: str | bool) -> bool:
        """Return a flag of the family; if it is a string, the value of the key that it names."""
        return self.flag(flag) if isinstance(flag, str) else flag

    def factor(self, key: str) -> float | None:
        """Return a positive number; None if it is absent, or not in the family's ``factors``."""
        if key not in self.family.factors or self.get(key) is None:
            return None
        number = self.number(key)
        if number == 0:
            raise ConfigError(f"config: {key} is 0; it must be positive, or null to leave it out")
        return number


def without_ignored(values: Mapping[str, Any], kind: str, family: Family) -> Mapping[str, Any]:
    """Return a config.json without the keys that transformers' class of this type ignores.

    These keys cannot change the results of the model.  They are listed in one warning.
    """
    keys = keys_of(kind) or values
    own = {*keys, *family.facts, *NEUTRAL}
    ignored = {k: v for k, v in values.items() if k not in own and not str(k).startswith("_")}
    if named := {k: v for k, v in ignored.items() if not _changes_nothing(k, v, WITHOUT_EFFECT)}:
        say_once(f"config: {listed(named)}: ignored, as in transformers' class of {kind}")
    return {key: value for key, value in values.items() if key not in ignored}


def check_keys(values: Mapping[str, Any], family: Family) -> None:
    """Raise for keys that are not read, unless the keys or their values have no effect.

    Values of keys that are read must be JSON values.
    """
    known = READ | family.defaults.keys() | {*family.factors}
    for key in known & values.keys():
        if not isinstance(values[key], str | int | float | list | tuple | Mapping | None):
            problem = f"config: {key} is {type(values[key]).__name__}"
            raise ConfigError(f"{problem}; it must be a JSON value, such as a number")
    refuse_unread(unread_keys(values, family), "config")


def unread_keys(values: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the keys that a family does not read and that may change what the model computes."""
    known = READ | family.defaults.keys() | {*family.factors}
    harmless = {**WITHOUT_EFFECT, **family.facts}
    return {
        key: value
        for key, value in values.items()
        if not (key in known or key in NEUTRAL or str(key).startswith("_"))
        if not _changes_nothing(key, value, harmless)
    }


def _changes_nothing(key: str, value: Any, harmless: Mapping[str, Any]) -> bool:
    """Return whether this value has no effect: the key might as well be absent."""
    if not isinstance(value, str | int | float | list | tuple | Mapping | None):
        return False  # not a JSON value: an array, for example, has no truth value
    if isinstance(value, float):
        value = float(value)  # NumPy compares its float64 with a list element by element
    absent = any(value is one for one in (None, False)) or value in ([], {})
    return absent or (key in harmless and harmless[key] in (value, ...))


def refuse_unread(unread: Mapping[Any, Any], where: str) -> None:
    """Raise a ConfigError that lists the unread keys, if there are any."""
    if unread:
        problem = f"{where}: {listed(unread)}: not read, and may change what the model computes"
        raise ConfigError(f"{problem}; remove keys without effect; other models are not supported")


def listed(keys: Mapping[Any, Any]) -> str:
    """Return the first keys with their values for a message; long ones are cut."""
    shown = sorted(((str(key), str(value)) for key, value in keys.items()))[:SHOWN]
    more = f" and {len(keys) - SHOWN} more" * (len(keys) > SHOWN)
    return ", ".join(f"{key[:CUT]}={value[:CUT]}" for key, value in shown) + more


def token_ids(key: str, values: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the token ids of a key, whose value is an id or a list, without negative ids."""
    value = values.get(key)
    listed = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(token) is not int or token > MOST for token in listed):
        raise ConfigError(f"config: {key} is {value!r}; it must be a token id or a list of them")
    return tuple(token for token in listed if token >= 0)
