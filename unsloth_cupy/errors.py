"""What can go wrong, by name; every message shows the call and the cure."""


class UnslothCupyError(Exception):
    """Base of every error raised on purpose by this package."""


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
    """A device has too little memory: ``required`` and ``available`` are in bytes."""

    def __init__(self, message: str, required: int = 0, available: int = 0) -> None:
        super().__init__(message)
        self.required, self.available = required, available
