"""The keys of LongCat-Flash's config.json, and how its layers map to blocks.

A layer has two attentions, two dense MLPs and one mixture of experts, whose output is added last:

    h = x + attention_0(norm(x))        m = experts(norm(h))        y = h + mlp_0(norm(h))
    h = y + attention_1(norm(y))        z = h + mlp_1(norm(h)) + m

It is two usual blocks (``paired``), so caches, windows and plans have a part for each attention,
and need no other change.  The first block of a pair also has the experts, which read what its MLP
reads, and their output waits for the end of the second one (``shortcut``).  Parameters have the
names of the file: model.layers.0.self_attn.1.q_a_proj.weight belongs to block 1.  Checkpoints and
ranks that store parts (Zero3) treat a pair as one; a pipeline would cut pairs, and is refused.

Experts after the last real one return their input, times its weight (``zero``).  They have no
parameters; transformers writes gate and up of them, which compute nothing.
"""

from collections.abc import Mapping
from typing import Any

from ...errors import ConfigError
from .reading import MOST_OF

SAME = {  # names that transformers' class also reads
    "intermediate_size": "ffn_hidden_size",
    "moe_intermediate_size": "expert_ffn_hidden_size",
    "num_experts_per_tok": "moe_topk",
    "num_local_experts": "n_routed_experts",
}


def of_longcat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json with num_hidden_layers, the number of blocks: twice num_layers."""
    read = {SAME[key]: value for key, value in values.items() if key in SAME}
    read |= {key: value for key, value in values.items() if key not in (*SAME, "num_layers")}
    layers = values.get("num_layers")
    if type(read.get("num_hidden_layers")) is int:  # it wins, as in transformers
        layers = read["num_hidden_layers"] // 2
    most = MOST_OF["num_hidden_layers"] // 2
    if type(layers) is not int or not 1 <= layers <= most:
        raise ConfigError(f"config: num_layers is {layers!r}; it must be an integer in 1 .. {most}")
    return read | {"num_hidden_layers": 2 * layers}
