"""Counts the tokens per expert in a run, for the log, for a picture, and for the routers' biases.

    load = largest / mean                      of the tokens per expert of a layer in a step
    bias += rate * sign(mean - tokens)         with a rate, after each step

Every token goes to its k experts: experts have no capacity limit, so no token is dropped.  A bias
changes which experts are chosen, but not their weights, and has no gradient (Wang et al. 2024,
"Auxiliary-loss-free load balancing", arXiv:2408.15664).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.dtypes import FLOAT32, Array
from ...ops.experts.sort_by_expert import sort_by_expert
from ...pictures import INK, SOFT, save_picture, write_title
from ...placement import to_numpy

if TYPE_CHECKING:
    from ...models import Transformer

REACH = 3.0  # range of the colours: 2**-3 to 2**3 times an equal share of tokens
WIDTH = 60  # characters of a title line


class Routing:
    """Counts the tokens of every expert in the passes of a step, on the device.

    ``rate``: of the update of the routers' biases.
    """

    def __init__(self, model: "Transformer", rate: float = 0.0) -> None:
        experts = model.config.experts
        self.model, self.count = model, 0 if experts is None else experts.choices
        sparse = () if experts is None else experts.sparse
        self.layers = [layer for layer, has_experts in enumerate(sparse) if has_experts]
        self.newest: Any = None  # (layers, experts), on the device; graphs add to it
        self.since: Any = 0  # tokens since the last ``line``, on the host
        self.rate = rate
        if rate:  # weights of a file may be read-only, and a reference model may share them
            own = {n: a.copy() for n in self.biases if (a := model.parameters.get(n)) is not None}
            model.parameters = model.parameters | own

    @property
    def biases(self) -> list[str]:
        """The names of the routers' biases, by layer."""
        experts: Any = self.model.config.experts
        prefixes = map(self.model.config.prefix_of, self.layers)
        return [prefix + experts.correction for prefix in prefixes]

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the tokens of the model's passes in a ``with`` block."""
        if not self.count:
            yield
            return
        if self.newest is None:
            shape = len(self.layers), self.count
            self.newest = np.zeros_like(self.model.table, np.int64, shape=shape)
        self.model.seen = self._add
        try:
            yield
        finally:
            del self.model.seen

    def _add(self, routed: Sequence[Any], before: int = 0) -> None:
        for place, each in enumerate(routed, before):
            offsets = sort_by_expert(each.experts, self.count + 1)[1]  # the last: of padding
            self.newest[place] += offsets[1:-1] - offsets[:-2]

    def counts(self, summed: Callable[[Array], Array]) -> Array | None:
        """Return the tokens of a step, (layers, experts); None without experts or tokens.

        ``summed`` sums over ranks.
        """
        if not self.layers:
            return None
        own: Any = np.zeros((len(self.layers), self.count)) if self.newest is None else self.newest
        counts = summed(to_numpy(own).astype(np.float64))
        if self.newest is not None:
            self.newest[...] = 0
        if not counts.any():
            return None
        self.since = self.since + counts
        return counts

    def bias_updates(self, counts: Array | None) -> dict[str, Array]:
        """Return what to add to the bias of each router, by parameter name."""
        if counts is None or not self.rate:
            return {}
        signs = np.sign(counts.mean(axis=1, keepdims=True) - counts)
        return dict(zip(self.biases, (self.rate * signs).astype(FLOAT32), strict=True))

    @staticmethod
    def measures(counts: Array | None) -> dict[str, float]:
        """Return the measures of a step for the log."""
        if counts is None:
            return {}
        return {
            "expert_tokens": float(counts.mean()),
            "expert_load": float((counts.max(axis=1) / counts.mean(axis=1)).max()),
            "idle_experts": int((counts == 0).sum()),
        }

    def line(self, step: int) -> dict[str, Any] | None:
        """Return a line with the tokens per layer and expert since the last call, or None."""
        counts, self.since = self.since, 0
        if np.ndim(counts) == 0:
            return None
        return {"step": step, "layers": self.layers, "tokens": counts.astype(int).tolist()}


def draw_routing(path: Path, lines: Sequence[Mapping[str, Any]], title: str) -> None:
    """Draw the share of tokens per layer and expert in the last line into a PNG file.

    Colours show the ratio of a share to an equal share.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    line = lines[-1]
    tokens = np.array(line["tokens"], float)
    shares = tokens / tokens.mean(axis=1, keepdims=True)
    doublings = np.log2(np.maximum(shares, 2.0 ** -(REACH + 1)))
    figure = Figure(figsize=(8, 1.8 + 0.16 * max(6, len(shares))), dpi=150, layout="constrained")
    axes = figure.subplots()
    image = axes.imshow(
        doublings, cmap="RdBu_r", vmin=-REACH, vmax=REACH, aspect="auto", interpolation="nearest"
    )
    write_title(axes, f"{title}: experts up to step {line['step']}", size=11, width=WIDTH)
    axes.set_xlabel("expert", color=INK)
    axes.set_ylabel("layer", color=INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    places = sorted({*np.linspace(0, len(shares) - 1, min(len(shares), 8)).astype(int).tolist()})
    axes.set_yticks(places, [str(line["layers"][place]) for place in places])
    axes.tick_params(colors=INK, labelsize=9)
    for side in axes.spines.values():
        side.set_color(SOFT)
    ticks = [-REACH, -1.0, 0.0, 1.0, REACH]
    bar = figure.colorbar(image, ax=axes, ticks=ticks)
    bar.set_label("tokens relative to an equal share", color=INK, fontsize=9)
    bar.set_ticklabels(["1/8 or less", "1/2", "1", "2", "8 or more"], fontsize=9, color=INK)
    save_picture(figure, path)
