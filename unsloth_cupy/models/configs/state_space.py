"""Layers with the recurrence of Mamba2 (state space duality)."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

# Keys of config.json for each size, in Bamba and the families that follow it.
MAMBA = {
    "heads": "mamba_n_heads",
    "dim": "mamba_d_head",
    "groups": "mamba_n_groups",
    "state": "mamba_d_state",
    "taps": "mamba_d_conv",
    "expand": "mamba_expand",
    "conv_bias": "mamba_conv_bias",
    "bias": "mamba_proj_bias",
}
MAMBA2 = {
    **{"heads": "num_heads", "dim": "head_dim", "groups": "n_groups", "state": "state_size"},
    **{"taps": "conv_kernel", "expand": "expand", "conv_bias": "use_conv_bias", "bias": "use_bias"},
}
NEMOTRON = {
    **{"heads": "mamba_num_heads", "dim": "mamba_head_dim", "groups": "n_groups"},
    **{"state": "ssm_state_size", "taps": "conv_kernel", "conv_bias": "use_conv_bias"},
    **{"bias": "use_bias", "activation": "mamba_hidden_act", "least": "time_step_min"},
}
MAMBA_DEFAULTS: Mapping[str, Any] = {
    **{"mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_n_groups": 1, "mamba_d_state": 256},
    **{"mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False},
    "time_step_limit": None,
}
MAMBA_FACTS: Mapping[str, Any] = {"mamba_chunk_size": ..., "num_logits_to_keep": ...}


@dataclass(frozen=True)
class StateSpace:
    """Layers with the recurrence of Mamba2, after a convolution.

    heads, state, dim       number of states, and the shape (state, dim) of each
    groups                  number of b and c, which heads share
    taps                    of the convolution
    conv_bias, bias, out_bias       whether convolution, input and output projection have a bias
    least, most             bounds of time steps; None: no upper bound
    norm                    "after" or "before" the gate, a norm of each group; None: no norm
    beside                  whether layers also have attention, and add both
    scale, scales, out_scale        factors of the input, of the parts of the input projection, and
                            of the output
    """

    heads: int
    dim: int
    groups: int
    state: int
    taps: int
    conv_bias: bool
    bias: bool
    out_bias: bool
    least: float = 0.0
    most: float | None = None
    norm: str | None = "after"
    beside: bool = False
    scale: float = 1.0
    scales: tuple[float, ...] = ()
    out_scale: float = 1.0

    @property
    def inner(self) -> int:
        """The channels of x, and of the gate."""
        return self.heads * self.dim

    @property
    def sizes(self) -> tuple[int, ...]:
        """The numbers of rows in the input projection: gate, x, b, c and dt."""
        each = self.groups * self.state
        return self.inner, self.inner, each, each, self.heads

    def shapes(self, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the names and shapes of a layer's parameters."""
        rows, channels = sum(self.sizes), sum(self.sizes[1:4])
        yield "in_proj.weight", (rows, hidden)
        if self.bias:
            yield "in_proj.bias", (rows,)
        yield "conv1d.weight", (channels, 1, self.taps)
        if self.conv_bias:
            yield "conv1d.bias", (channels,)
        yield from ((name, (self.heads,)) for name in ("dt_bias", "A_log", "D"))
        if self.norm:
            yield "norm.weight", (self.inner,)
        yield "out_proj.weight", (hidden, self.inner)
        if self.out_bias:
            yield "out_proj.bias", (hidden,)
