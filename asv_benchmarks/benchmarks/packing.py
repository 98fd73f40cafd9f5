"""Texts packed into one row compared with texts in padded rows; both have equal gradients.

    cd asv_benchmarks && python -m benchmarks.packing

prints the ratio of CPU times in docs/guide/training.md: the median over alternating pairs.
"""

from typing import Any

import numpy as np

from unsloth_cupy import models

from .savings import CONFIG, median_ratio, ratios

LAYERS, TEXTS, LONGEST = 4, 24, 128
IGNORE = -100


class Packing:
    """A forward and a backward pass over texts of 8 to 128 tokens, short ones more often."""

    version, timeout = "1", 600
    params = ("packed", "padded")
    param_names = ("rows",)

    def setup(self, rows: str = "") -> None:
        """Create the model, and the texts in both forms."""
        self.model = models.create(CONFIG | {"num_hidden_layers": LAYERS}, seed=0)
        draw = np.random.default_rng(0)
        lengths = np.exp(draw.uniform(np.log(8), np.log(LONGEST), TEXTS)).astype(int)
        ends = np.cumsum([0, *lengths])
        tokens = draw.integers(0, 1024, int(ends[-1]))
        padded = np.zeros((TEXTS, LONGEST), np.int64)
        labels = np.full_like(padded, IGNORE)
        for row, (start, length) in enumerate(zip(ends[:-1], lengths, strict=True)):
            padded[row, :length] = labels[row, :length] = tokens[start : start + length]
        self.forms: dict[str, dict[str, Any]] = {
            "packed": {"tokens": tokens[None], "labels": tokens[None], "offsets": ends},
            "padded": {"tokens": padded, "labels": labels},
        }

    def time_gradients(self, rows: str) -> None:
        """Compute the gradients of all weights."""
        self.model.loss_and_gradients(**self.forms[rows])


def main() -> None:
    """Print the time of padded rows divided by that of packed ones."""
    bench = Packing()
    bench.setup()
    losses = [float(bench.model.loss(**form)) for form in bench.forms.values()]
    if not np.isclose(*losses, rtol=1e-5):
        raise SystemExit(f"the losses differ: {losses}")
    steps = (lambda rows=rows: bench.time_gradients(rows) for rows in bench.params)
    pairs = list(ratios(*steps))
    sizes = [form["tokens"].size for form in bench.forms.values()]
    print(f"{sizes[0]} tokens of {TEXTS} texts; in rows of {LONGEST} with padding {sizes[1]}")
    print(f"padded rows take {median_ratio(pairs):.2f} times the time of packed ones")


if __name__ == "__main__":
    main()
