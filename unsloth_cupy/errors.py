"""The exceptions of the package; every message shows the call and how to correct it."""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

# Characters that move a terminal's cursor, begin its commands or reorder what it shows, and halves
# of characters, which no output can encode.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
MOST = 3000  # characters of a message: it is read in a terminal
# More characters than the name of a file may have: a value that fills a message.
_ENDLESS = re.compile(r"[^\s/\\]{256,}")
_F = TypeVar("_F", bound=Callable[..., Any])


def printable(text: str) -> str:
    r"""Return a text with its control characters escaped: a carriage return becomes ``\r``.

    All that is printed and may come from a file, a model or another process passes through here.
    Lines and tabs stay.
    """
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def shortened(text: str) -> str:
    """Return a text whose endless words, and whose middle beyond ``MOST`` characters, are cut.

    A value from a file may be of any length; the beginning of a message says what is wrong, its end
    how to correct it.
    """
    text = _ENDLESS.sub(lambda word: f"{word[0][:80]}...{word[0][-20:]}", text)
    return text if len(text) <= MOST else f"{text[: MOST - 1005]} ... {text[-1000:]}"


class UnslothCupyError(Exception):
    """Base of every error raised on purpose by this package; its message is ``printable``.

    Values of any length in it are ``shortened``.

    Attributes
    ----------
    expected, actual : object
        The required and the actual value, if the error is about a single one: a shape (names stand
        for axes of any size), a dtype, a number.  None if only the message explains the error.
    """

    def __init__(self, message: str = "", *, expected: Any = None, actual: Any = None) -> None:
        super().__init__(printable(shortened(message)))
        self.expected, self.actual = expected, actual


class ShapeError(UnslothCupyError, ValueError):
    """An array's shape does not match the op's signature."""


class DTypeError(UnslothCupyError, TypeError):
    """An array's dtype does not match the op's signature."""


class RangeError(UnslothCupyError, IndexError, ValueError):
    """An integer (a token, a label, a position) is outside the axis that it selects from."""


class FrameworkError(UnslothCupyError, TypeError):
    """Arrays of one call belong to different frameworks or to different devices."""


class ConfigError(UnslothCupyError, ValueError):
    """An option, a configuration or a file is invalid."""


class ArgumentError(ConfigError, TypeError):
    """A call lacks an argument, or has one that the function does not take."""


class UnknownNameError(UnslothCupyError, AttributeError):
    """A package or an object does not have a name; what others name so is called otherwise."""


class NotFiniteError(ConfigError):
    """An array that a loss reads holds a NaN or an infinity."""


class GradientError(UnslothCupyError, RuntimeError):
    """A gradient was requested of an op, or for an input, that has none."""


class KernelError(UnslothCupyError, RuntimeError):
    """A kernel does not compile or was launched with the wrong arguments."""


class DeviceError(UnslothCupyError, RuntimeError):
    """The requested device does not exist."""


class DeviceMemoryError(UnslothCupyError, MemoryError):
    """There is not enough memory for a request.

    Attributes
    ----------
    required : int
        Bytes requested in all, including those that are in use already.
    available : int
        Bytes that could be used in all: a limit, the pages of a cache, the memory of a device.
    """

    def __init__(self, message: str = "", required: int = 0, available: int = 0) -> None:
        super().__init__(message, expected=available, actual=required)
        self.required, self.available = required, available


class CommunicationError(UnslothCupyError, RuntimeError):
    """A rank did not take part in an exchange, or ranks do not agree about it.

    Attributes
    ----------
    rank : int or None
        The rank that is missing, or whose call differs from the others'.
    told : bool
        Whether another rank prints what has happened.
    """

    def __init__(self, message: str = "", *, rank: int | None = None, told: bool = False) -> None:
        super().__init__(message)
        self.rank, self.told = rank, told


def naming(call: str, *others: str, **arguments: str) -> Callable[[_F], _F]:
    """Decorate a function that calls others, so that errors name the function.

    >>> @naming("gate", "linear", bias="gate_bias")
    ... def gate(x, weight, gate_bias):
    ...     return linear(x, weight, gate_bias)

    Where an error of ``linear`` says "linear: bias is int16", that of ``gate`` says "gate:
    gate_bias is int16": ``others`` are the functions that errors name in place of ``call``, and
    ``arguments`` maps the names of their arguments to those of the call.
    """
    pattern = re.compile(rf"(?:{'|'.join(map(re.escape, others))})(?=[:(])")

    def decorated(function: _F) -> _F:
        @functools.wraps(function)
        def named(*args: Any, **options: Any) -> Any:
            try:
                return function(*args, **options)
            except UnslothCupyError as error:
                if other := pattern.match(str(error)):
                    error.args = (_renamed(call + str(error)[other.end() :], arguments),)
                raise

        return cast(_F, named)

    return decorated


def _renamed(message: str, arguments: Mapping[str, str]) -> str:
    """Return a message with other names of arguments, and its table of arrays aligned again."""
    for name, own in arguments.items():
        message = re.sub(rf"\b{name}\b(?=[.(?=]| (?:is|has|holds) )", own, message)
    problem, *rows = message.split("\n")
    pairs = [row.rpartition(" = ") for row in rows]  # an array and its shape
    width = max((len(left.rstrip()) for left, _, _ in pairs), default=0)
    rows = [f"{left.rstrip():<{width}} = {right}" if left else right for left, _, right in pairs]
    return "\n".join([problem, *rows])
