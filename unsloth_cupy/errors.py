"""What can go wrong, by name; every message shows the call and the cure."""

from typing import Any


class UnslothCupyError(Exception):
    """Base of every error raised on purpose by this package.

    Attributes
    ----------
    expected, actual : object
        What was asked for and what was given, where the error is about one thing: a shape (names
        stand for axes of any size), a dtype, a number.  None where the message alone tells.
    """

    def __init__(self, message: str = "", *, expected: Any = None, actual: Any = None) -> None:
        super().__init__(message)
        self.expected, self.actual = expected, actual


class ShapeError(UnslothCupyError, ValueError):
    """An array's shape breaks the op's contract."""


class DTypeError(UnslothCupyError, TypeError):
    """An array's dtype breaks the op's contract."""


class RangeError(UnslothCupyError, IndexError, ValueError):
    """An integer (a token, a label, a position) lies outside the axis it selects from."""


class FrameworkError(UnslothCupyError, TypeError):
    """Arrays of one call live in different frameworks or on different devices."""


class ConfigError(UnslothCupyError, ValueError):
    """An option, a configuration or a file does not make sense."""


class GradientError(UnslothCupyError, RuntimeError):
    """A gradient was asked of an op, or for an input, that has none."""


class KernelError(UnslothCupyError, RuntimeError):
    """A kernel does not compile or was launched with the wrong arguments."""


class DeviceError(UnslothCupyError, RuntimeError):
    """A device was asked for that is not there."""


class DeviceMemoryError(UnslothCupyError, MemoryError):
    """Memory does not hold what is asked for.

    Attributes
    ----------
    required : int
        Bytes asked for in all, together with what is held already.
    available : int
        Bytes that could be had in all: a limit, the pages of a cache, the memory of a device.
    """

    def __init__(self, message: str = "", required: int = 0, available: int = 0) -> None:
        super().__init__(message, expected=available, actual=required)
        self.required, self.available = required, available


class CommunicationError(UnslothCupyError, RuntimeError):
    """A rank did not come to an exchange, or ranks do not agree about it.

    Attributes
    ----------
    rank : int or None
        The rank that did not come, or whose call differs from the others'.
    told : bool
        Whether another rank prints what has happened.
    """

    def __init__(self, message: str = "", *, rank: int | None = None, told: bool = False) -> None:
        super().__init__(message)
        self.rank, self.told = rank, told
