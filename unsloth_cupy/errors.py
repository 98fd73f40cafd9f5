"""The exceptions of the package; every message shows the call and how to correct it."""

from typing import Any


class UnslothCupyError(Exception):
    """Base of every error raised on purpose by this package.

    Attributes
    ----------
    expected, actual : object
        The required and the actual value, if the error is about a single one: a shape (names stand
        for axes of any size), a dtype, a number.  None if only the message explains the error.
    """

    def __init__(self, message: str = "", *, expected: Any = None, actual: Any = None) -> None:
        super().__init__(message)
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
