"""Copies arrays between devices; ``memory_pool`` counts the bytes in ``transferred``.

x = to_device(x, "cuda:1")
y = to_host(y)
"""

from typing import Any, NamedTuple

from ..core.arrays import framework_of
from ..core.dtypes import Stored
from ..errors import ConfigError, FrameworkError
from ..machine import on_device
from ..placement import synchronize_stream, to_numpy
from ..training.offload import note
from ..training.tape import Gradients, add_up
from ..training.variable import Var


class Moved(NamedTuple):
    """A tape entry of a copy: backward moves the gradient to the device of the array."""

    values: dict[str, Any]
    inputs: dict[str, int]
    outputs: dict[str, int]

    def add_back(self, take: dict[str, Any], inputs: dict[str, int], grads: Gradients) -> None:
        """Add the gradient of the copy to the gradient of the array."""
        index, gradient = inputs["array"], take["moved"]
        grads[index] = add_up(grads.get(index), to_device(gradient, place_of(self.values["array"])))


def to_device(array: Any, device: Any) -> Any:
    """Copy an array to a device; return the array itself if it is already there.

    Parameters
    ----------
    array : array or Var
        An array of NumPy, CuPy or torch.  The copy of a ``Var`` is recorded on its tape, so its
        gradient moves back.
    device : str
        "cpu", "cuda" (the first GPU) or "cuda:1".

    Returns
    -------
    moved : array or Var
        A torch tensor stays a torch tensor; other arrays become NumPy arrays on the CPU and CuPy
        arrays on a GPU.

    Raises
    ------
    ConfigError
        The name of the device is invalid.
    DeviceError
        There is no such GPU, or CuPy is not installed.
    FrameworkError
        The array belongs to another library, or is quantized.
    """
    return _moved("to_device", array, device)


def to_host(array: Any) -> Any:
    """Copy an array to the memory of the host, as ``to_device(array, "cpu")`` does."""
    return _moved("to_host", array, "cpu")


def _moved(call: str, array: Any, device: Any) -> Any:
    if isinstance(array, Var):
        copy = Var(_moved(call, array.value, device), array.tape)
        values = {"array": array.value, "moved": copy.value}
        array.tape.note(Moved(values, {"array": array.index}, {"moved": copy.index}))
        return copy
    library = framework_of(array, f"{call}: array")
    if library not in ("numpy", "cupy", "torch") or isinstance(array, Stored):
        cure = "pass an array of NumPy, CuPy or torch; move others with their own library"
        raise FrameworkError(f"{call}: array is a {type(array).__name__} of {library}; {cure}")
    if not isinstance(device, str):
        cure = "choose 'cpu' (NumPy), 'cuda' or 'cuda:1'"
        raise ConfigError(f"{call}: device={device!r}; {cure}")
    with on_device(call, device) as copied:
        if place_of(array) == {"cuda": "cuda:0"}.get(device, device):
            return array
        note("to_host" if device == "cpu" else "to_device", array.nbytes)
        if library == "torch":
            return array.to(device)
        synchronize_stream(array)  # another stream may still compute it
        if device == "cpu":
            return to_numpy(array)
        return copied(array) if library == "numpy" else array.copy()  # on the current GPU


def place_of(array: Any) -> str:
    """Return the device of an array of NumPy, CuPy or torch: "cpu", "cuda:0" and so on."""
    library = framework_of(array, "to_device: array")
    if library == "torch":
        return str(array.device)
    return "cpu" if library == "numpy" else f"cuda:{array.device.id}"
