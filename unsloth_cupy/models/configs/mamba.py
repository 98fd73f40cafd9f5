"""Layers with the recurrence of Mamba (selective scan)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# Keys of config.json for each size.
OF_MAMBA = {
    **{"state": "state_size", "rank": "time_step_rank", "taps": "conv_kernel"},
    **{"expand": "expand", "conv_bias": "use_conv_bias", "bias": "use_bias"},
    "inner": "intermediate_size",  # if it is there, expand does not count
}
OF_JAMBA = {
    **{"state": "mamba_d_state", "rank": "mamba_dt_rank", "taps": "mamba_d_conv"},
    **{"expand": "mamba_expand", "conv_bias": "mamba_conv_bias", "bias": "mamba_proj_bias"},
}
JAMBA_DEFAULTS: Mapping[str, Any] = {
    **{"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": "auto"},
    **{"mamba_conv_bias": True, "mamba_proj_bias": False},
    **{"attn_layer_period": 8, "attn_layer_offset": 4},
    **{"expert_layer_period": 2, "expert_layer_offset": 1},
}
JAMBA_FACTS: Mapping[str, Any] = {
    **dict.fromkeys(("use_mamba_kernels", "use_mambapy", "use_associative_scan"), ...),
}
NORMS = ("dt_layernorm", "b_layernorm", "c_layernorm")


@dataclass(frozen=True)
class Mamba:
    """Layers with a selective scan, after a convolution.

    inner           number of channels, each with ``state`` states
    rank            length of the short vectors from which time steps are computed
    taps            of the convolution
    conv_bias, bias whether the convolution, and the input and output projections, have a bias
    normed          whether the short vectors, b and c have RMS norms
    """

    inner: int
    state: int
    rank: int
    taps: int
    conv_bias: bool
    bias: bool
    normed: bool

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The numbers of rows in the projection of x: short vector, b and c."""
        return self.rank, self.state, self.state

    def shapes(self, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the names and shapes of a layer's parameters."""
        yield "in_proj.weight", (2 * self.inner, hidden)
        if self.bias:
            yield "in_proj.bias", (2 * self.inner,)
        yield "conv1d.weight", (self.inner, 1, self.taps)
        if self.conv_bias:
            yield "conv1d.bias", (self.inner,)
        yield "x_proj.weight", (sum(self.sizes), self.inner)
        yield "dt_proj.weight", (self.inner, self.rank)
        yield "dt_proj.bias", (self.inner,)
        yield "A_log", (self.inner, self.state)
        yield "D", (self.inner,)
        yield "out_proj.weight", (hidden, self.inner)
        if self.bias:
            yield "out_proj.bias", (hidden,)
        if self.normed:
            for name, size in zip(NORMS, self.sizes, strict=True):
                yield f"{name}.weight", (size,)
