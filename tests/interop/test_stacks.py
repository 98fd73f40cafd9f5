"""Arrays of libraries without a handler of their own: a recipe, and those that are refused."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from unsloth_cupy import relu2
from unsloth_cupy.errors import FrameworkError

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "stacks.md"


def test_recipe_runs():
    if importlib.util.find_spec("numba") is None:
        pytest.skip("numba is not there: it is large, and in no extra")
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    (recipe,) = (block for block in blocks if block.startswith("# needs numba\n"))
    subprocess.run([sys.executable, "-c", recipe], check=True)


class Exported:
    """An array that NumPy could take by DLPack."""

    shape, dtype = (3,), np.dtype("float32")

    def __dlpack__(self, **options):
        return np.ones(3, np.float32).__dlpack__(**options)

    def __dlpack_device__(self):
        return (1, 0)


@pytest.mark.parametrize(
    "module", ["tensorflow.python.framework.ops", "paddle", "mlx.core", "elsewhere"]
)
def test_libraries_that_would_lose_their_gradient_are_refused(module):
    array = type("Tensor", (Exported,), {"__module__": module})()
    if module == "elsewhere":
        assert relu2(array).tolist() == [1, 1, 1]
        return
    library = module.partition(".")[0]
    with pytest.raises(FrameworkError, match=rf"relu2: x would lose its {library} gr"):
        relu2(array)
