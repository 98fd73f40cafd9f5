"""The exceptions of the package; each message shows the call and how to correct it."""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

# Characters that move the cursor of a terminal, start its commands or reorder its text, and lone
# surrogates, which cannot be encoded.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
MOST = 3000  # maximum characters of a message in a terminal
# A word longer than any file name (255 characters), such as a value from a file.
_ENDLESS = re.compile(r"[^\s/\\]{256,}")
_F = TypeVar("_F", bound=Callable[..., Any])


def printable(text: str) -> str:
    r"""Return a text with its control characters escaped: a carriage return becomes ``\r``.

    All printed text from a file, a model or another process passes through this function.  Line
    breaks and tabs are unchanged.
    """
    return _CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def shortened(text: str) -> str:
    """Return a text without the middle of very long words, and of text beyond ``MOST`` characters.

    A message may contain a value of any length from a file; its beginning (the problem) and its end
    (the cure) are preserved.
    """
    text = _ENDLESS.sub(lambda word: f"{word[0][:80]}...{word[0][-20:]}", text)
    return text if len(text) <= MOST else f"{text[: MOST - 1005]} ... {text[-1000:]}"


class UnslothCupyError(Exception):
    """Base class of the errors of this package; messages are ``printable`` and ``shortened``.

    Attributes
    ----------
    expected, actual : object
        The required and the actual value, if the error concerns a single value: a shape (a name
        stands for any size), a dtype or a number.  Else None.
    """

    def __init__(self, message: str = "", *, expected: Any = None, actual: Any = None) -> None:
        super().__init__(printable(shortened(message)))
        self.expected, self.actual = expected, actual


class ShapeError(UnslothCupyError, ValueError):
    """The shape of an array does not match the signature of the op."""


class DTypeError(UnslothCupyError, TypeError):
    """The dtype of an array does not match the signature of the op."""


class RangeError(UnslothCupyError, IndexError, ValueError):
    """An index (a token, a label, a position) is out of range."""


class FrameworkError(UnslothCupyError, TypeError):
    """Arrays of one call belong to different frameworks or to different devices."""


class ConfigError(UnslothCupyError, ValueError):
    """An option, a configuration or a file is invalid."""


class ArgumentError(ConfigError, TypeError):
    """A call lacks an argument, or has an unknown argument."""


class UnknownNameError(UnslothCupyError, AttributeError):
    """A package or an object has no such attribute; the message may name an equivalent."""


class NotFiniteError(ConfigError):
    """An input of a loss contains NaN or infinity."""


class GradientError(UnslothCupyError, RuntimeError):
    """A gradient was requested from an op, or for an input, without a gradient."""


class KernelError(UnslothCupyError, RuntimeError):
    """A kernel does not compile or was launched with the wrong arguments."""


class DeviceError(UnslothCupyError, RuntimeError):
    """The requested device does not exist, or refuses a request."""


class DeviceMemoryError(UnslothCupyError, MemoryError):
    """A request exceeds the available memory.

    Attributes
    ----------
    required : int
        Total bytes requested, including bytes already in use.
    available : int
        Total bytes that may be used: a limit, the pages of a cache, the memory of a device.
    """

    def __init__(self, message: str = "", required: int = 0, available: int = 0) -> None:
        super().__init__(message, expected=available, actual=required)
        self.required, self.available = required, available


class CommunicationError(UnslothCupyError, RuntimeError):
    """A rank did not join an exchange, or the calls of ranks differ.

    Attributes
    ----------
    rank : int or None
        The missing rank, or the rank whose call differs.
    told : bool
        Whether another rank prints the error.
    """

    def __init__(self, message: str = "", *, rank: int | None = None, told: bool = False) -> None:
        super().__init__(message)
        self.rank, self.told = rank, told


def naming(call: str, *others: str, **arguments: str) -> Callable[[_F], _F]:
    """Decorate a function so that errors of its inner calls name the function.

    >>> @naming("gate", "linear", bias="gate_bias")
    ... def gate(x, weight, gate_bias):
    ...     return linear(x, weight, gate_bias)

    The error "linear: bias is int16" becomes "gate: gate_bias is int16".  ``others`` are the inner
    functions, whose names are replaced by ``call``; ``arguments`` maps the names of their arguments
    to the argument names of the decorated function.
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
    """Rename arguments in a message, and realign its table of arrays."""
    for name, own in arguments.items():
        message = re.sub(rf"\b{name}\b(?=[.(?=]| (?:is|has|holds) )", own, message)
    problem, *rows = message.split("\n")
    pairs = [row.rpartition(" = ") for row in rows]  # an array and its shape
    width = max((len(left.rstrip()) for left, _, _ in pairs), default=0)
    rows = [f"{left.rstrip():<{width}} = {right}" if left else right for left, _, right in pairs]
    return "\n".join([problem, *rows])
