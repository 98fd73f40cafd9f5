"""Names for type checkers."""

from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]  # or anything that quacks like one
