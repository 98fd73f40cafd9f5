"""Copies of arrays on other devices, counted by ``memory_pool`` in ``transferred``.

x = to_device(x, "cuda:1")
y = to_host(y)
"""

from typing import Any, NamedTuple

from ..core.arrays import framework_of
from ..core.dtypes import Stored
from ..errors import ConfigError, FrameworkError
from ..placement import synchronize_stream, to_numpy
from ..training.offload import note
from ..training.tape import Gradients, add_up
from ..training.variable import Var


class Moved(NamedTuple):
    """A copy on a tape: its gradient goes back to where the array came from."""

    values: dict[str, Any]
    inputs: dict[str, int]
    outputs: dict[str, int]

    def add_back(self, take: dict[str, Any], inputs: dict[str, int], grads: Gradients) -> None:
        """Add the gradient of the copy to that of the array."""
        index, gradient = inputs["array"], take["moved"]
        grads[index] = add_up(grads.get(index), to_device(gradient, place_of(self.values["array"])))


def to_device(array: Any, device: Any) -> Any:
    """Return an array on a device; itself if it is there already.

    Parameters
    ----------
    array : array or Var
        Of NumPy, CuPy or torch.  The copy of a ``Var`` is on its tape: its gradient moves back.
    device : str
        "cpu", "cuda" (the first GPU) or "cuda:1".

    Returns
    -------
    moved : array or Var
        A torch tensor is one of torch; other arrays are NumPy's on the CPU, CuPy's on a GPU.

    Raises
    ------
    ConfigError
        There is no device of this name.
    DeviceError
        There is no such GPU, or no CuPy.
    FrameworkError
        The array is of another library, or quantized.
    """
    return _moved("to_device", array, device)


def to_host(array: Any) -> Any:
    """Return an array in the memory of the host, as ``to_device(array, "cpu")`` does."""
    return _moved("to_host", array, "cpu")


def _moved(call: str, array: Any, device: Any) -> Any:
    from ..machine import on_device  # a program without models does not import them

    if isinstance(array, Var):
        copy = Var(_moved(call, array.value, device), array.tape)
        values = {"array": array.value, "moved": copy.value}
        array.tape.note(Moved(values, {"array": array.index}, {"moved": copy.index}))
        return copy
    library = framework_of(array, f"{call}: array")
    if library not in ("numpy", "cupy", "torch") or isinstance(array, Stored):
        cure = "pass one of NumPy, CuPy or torch; others move by functions of their own"
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
        synchronize_stream(array)  # what computes it may be on another stream
        if device == "cpu":
            return to_numpy(array)
        return copied(array) if library == "numpy" else array.copy()  # on the current GPU


def place_of(array: Any) -> str:
    """Return the device of an array of NumPy, CuPy or torch: "cpu", "cuda:0" and so on."""
    library = framework_of(array, "to_device: array")
    if library == "torch":
        return str(array.device)
    return "cpu" if library == "numpy" else f"cuda:{array.device.id}"
