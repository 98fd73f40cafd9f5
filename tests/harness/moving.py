"""Offload on a CPU: arrays of NumPy are copied to other memory and back, as those of a GPU are.

with moving() as moved:
    model.loss_and_gradients(tokens, labels, checkpoint=CheckpointConfig(offload=True))
assert moved
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from unsloth_cupy.training import checkpoint


class Moved:
    """An array that is stored as bytes until backward."""

    def __init__(self, array: np.ndarray) -> None:
        self.shape, self.dtype, self.bytes = array.shape, array.dtype, array.tobytes()

    def fetch(self) -> None:
        """Do nothing: the copy is made by ``back``."""

    def back(self) -> np.ndarray:
        """Return a new array with the stored values."""
        return np.frombuffer(self.bytes, self.dtype).reshape(self.shape).copy()


@contextmanager
def moving() -> Iterator[list[int]]:
    """Move the arrays of checkpoints with offload inside a ``with`` block; yield their sizes."""
    sizes: list[int] = []

    def to_host(array: Any) -> Any:
        if type(array) is not np.ndarray:
            return array
        sizes.append(array.nbytes)
        return Moved(array)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "to_host", to_host)
        yield sizes
