"""LoRA settings of a run: rank, scale, dropout, target layers and variant."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.call import check_fields
from ..errors import ConfigError
from ..placement import to_numpy
from .naming import named

if TYPE_CHECKING:
    from ..models.adapters.adapter import Adapter
    from ..models.configs.config import Config

ALL, ATTENTION = "all", "attention"


@dataclasses.dataclass(frozen=True)
class Lora:
    """Settings of LoRA adapters, as in peft's ``LoraConfig``: y = x Wᵀ + scale (dropout(x) Aᵀ) Bᵀ.

    Parameters
    ----------
    rank : int
        Rows of A, and columns of B.
    alpha : float, optional
        scale = alpha / rank; None: 2 * rank.
    dropout : float
        Dropout probability of x in training, in 0 .. 1.
    targets : str or sequence of str
        "all" (all linear layers of the blocks, including experts), "attention", or last components
        of layer names, such as ("q_proj", "v_proj", "experts.down_proj").
    rslora : bool
        scale = alpha / sqrt(rank).
    dora : bool
        Also train the norm of each row of W (DoRA).

    Raises
    ------
    ConfigError
        An argument has a wrong type; the message names the argument.
    """

    rank: int
    alpha: float | None = None
    dropout: float = 0.0
    targets: str | Sequence[str] = ALL
    rslora: bool = False
    dora: bool = False

    def __post_init__(self) -> None:
        """Check the types; ``Settings`` checks the numbers."""
        check_fields(self)

    def settings(self) -> dict[str, Any]:
        """Return the values as fields of ``Settings``."""
        own = {"rslora", "dora"}
        each = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)[1:]}
        return {"lora": self.rank} | {n if n in own else f"lora_{n}": v for n, v in each.items()}

    def options(self, config: "Config", tokens: Sequence[int] = ()) -> dict[str, Any]:
        """Return the arguments of ``models.create_adapter`` for a model with this config.

        The adapter also trains the rows of ``tokens`` in the embedding, and in an untied head.

        Raises
        ------
        ConfigError
            A target is not a linear layer of the blocks.
        """
        from ..models.adapters.adapter import linear_layers
        from ..models.adapters.adapter_stacks import targets_of
        from ..models.configs.heads import CAUSAL, CLASSIFIERS
        from ..models.configs.names import is_attention

        names = [*linear_layers(config)]
        known = [*sorted({name.rpartition(".")[2] for name in names}), *targets_of(config)]
        targets: Any = self.targets
        if targets == ATTENTION:
            targets = sorted({n.rpartition(".")[2] for n in names if is_attention(config, n)})
        elif targets == ALL:
            targets = None
        elif isinstance(targets, str):
            targets = [name.strip() for name in targets.split(",")]
        listed = targets is None or (isinstance(targets, Collection) and len(targets) > 0)
        if not listed or not {*(targets or ())} <= {*known}:
            raise ConfigError(
                f"{named(lora_targets=self.targets)}: give {ALL}, {ATTENTION}, or some of"
                f" {', '.join(known)}"
            )
        modules = ["score"] if config.head in CLASSIFIERS else []  # the head is trained too
        own_head = config.head == CAUSAL and not config.tied
        tables = ["embed_tokens"] + ["lm_head"] * own_head if tokens else []
        rows = dict.fromkeys(tables, tuple(tokens))
        chosen = dataclasses.asdict(self) | {"targets": targets, "modules": modules}
        return chosen | {"tokens": rows} if rows else chosen


def check_learns(
    adapter: "Adapter",
    gradients: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> str | None:
    """Return in words how many adapters have a gradient; None if none has one in this step.

    In the first step only B has a gradient, because B is 0.  The text also reports experts that no
    token chose.  ``shapes`` are the shapes of whole stacks, if ranks split the stacks.

    Raises
    ------
    ConfigError
        The gradient of an adapter is 0 everywhere, although others are not: it would not train.
    """
    from ..models.adapters.adapter import UP, module_of

    ups = [name for name in gradients if name.endswith(UP)]
    if not ups:
        return ""
    has_gradient = to_numpy(np.stack([gradients[name].any() for name in ups]))
    if not has_gradient.any():
        return None
    if zero := [name for name, some in zip(ups, has_gradient, strict=True) if not some]:
        more = f" (and {len(zero) - 1} more)" if len(zero) > 1 else ""
        problem = f"the gradient of the adapter of {module_of(zero[0])}{more} is 0 everywhere"
        cure = f"choose other layers with {named('lora_targets')}"
        raise ConfigError(f"{problem}, so the adapter does not train; {cure}")
    chosen: dict[str, Any] = {}
    for name, adapted in adapter.stacks.items():
        count, outputs, _ = adapted.stack.shape if shapes is None else shapes[name]
        of_experts = gradients[adapted.up].reshape(outputs, -1, count).any(axis=(0, 1))
        chosen.setdefault(adapted.stack.parameter.rpartition(".")[0], of_experts)
    report = f"adapters of {len(ups)} layers, all with a gradient"
    if not chosen:
        return report
    flags = to_numpy(np.stack([*chosen.values()]))
    report += f", {len(adapter.stacks)} of them of stacks of experts"
    idle = flags.size - int(flags.sum())
    return report + f"; no token of this step chose {idle} of the {flags.size} experts" * (idle > 0)
