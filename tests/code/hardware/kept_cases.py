"""The first failing case of each kind of test, kept: inputs, exact and actual result, and a map.

A file holds arrays for ``numpy.load``; bfloat16 is stored as the same values in float32.
"""

import contextlib
import io
import re
import traceback
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = "UNSLOTH_CUPY_FAILED_CASES"  # the variable that names the folder
MOST = 16 << 20  # bytes of a file
CELLS = 32  # of a map, at most, along each of its sides


def keep(folder: Path, test: str, error: BaseException) -> None:
    """Write the arrays of a failed comparison by the rule of parity, unless the kind has a file."""
    frames = {
        each.f_code.co_name: each.f_locals for each, _ in traceback.walk_tb(error.__traceback__)
    }
    path = folder / (re.sub(r"\W+", "_", test.partition("[")[0]) + ".npz")
    compared = frames.get("within_rule", {})
    exact, actual, budget = (compared.get(name) for name in ("expected", "actual", "budget"))
    if two_runs := frames.get("_equal_bits"):
        name, budget = two_runs["name"], 0.0
        exact, actual = (two_runs[run][name] for run in ("first", "second"))
    if budget is None or path.exists() or np.shape(actual) != np.shape(exact):
        return
    exact, actual = (np.asarray(a.get() if hasattr(a, "get") else a) for a in (exact, actual))
    shown = fault_map(actual, exact, budget)
    inputs = frames["judge_kernels"]["call"].arrays if "judge_kernels" in frames else {}
    arrays = {"exact": exact, "actual": actual, **{f"input {n}": a for n, a in inputs.items()}}
    size, kept = 0, {"test": np.array(test), "said": np.array(str(error)), "map": shown}
    for name, array in arrays.items():
        size += 0 if array is None else array.size * max(array.itemsize, 4)
        if array is not None and size < MOST - (1 << 20):
            kept[name] = array if array.dtype.kind != "V" else array.astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    data = io.BytesIO()
    np.savez_compressed(data, **kept)
    with contextlib.suppress(FileExistsError), path.open("xb") as file:  # of another process
        file.write(data.getvalue())


def fault_map(actual: Any, exact: Any, budget: float) -> np.ndarray:
    """Return lines of text: by blocks of rows and of columns, the share of wrong elements.

    A dot is none, a digit so many tenths, # all.
    """
    actual, exact = (np.asarray(each, np.float64) for each in (actual, exact))
    wrong = ~(np.abs(actual - exact) <= budget) & (actual != exact)
    wrong = np.atleast_2d(wrong).reshape(-1, wrong.shape[-1] if wrong.ndim else 1)
    sides = [np.linspace(0, n, min(n, CELLS) + 1).astype(int)[:-1] for n in wrong.shape]
    cells = np.ones(wrong.shape)
    shares = [
        np.add.reduceat(np.add.reduceat(each, sides[0], 0), sides[1], 1) for each in (wrong, cells)
    ]
    tenths = np.ceil(10 * shares[0] / shares[1]).astype(int)
    return np.array(["".join(".123456789#"[t] for t in line) for line in tenths])
