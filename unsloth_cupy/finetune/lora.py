"""The adapters that a run trains: rank, scale, dropout, layers and kind of LoRA."""

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
    """Low-rank adapters, as peft's ``LoraConfig`` has them: y = x Wᵀ + scale (dropout(x) Aᵀ) Bᵀ.

    Parameters
    ----------
    rank : int
        Rows of A, and columns of B.
    alpha : float, optional
        scale = alpha / rank; None: 2 * rank.
    dropout : float
        Share of the elements of x that are 0 in a step of training, in 0 .. 1.
    targets : str or sequence of str
        "all" linear layers of the blocks, experts included, those of "attention", or the last
        components of the layers' names, as ("q_proj", "v_proj", "experts.down_proj").
    rslora : bool
        scale = alpha / sqrt(rank).
    dora : bool
        Train the norm of each row of W too (DoRA).

    Raises
    ------
    ConfigError
        An argument has another type; the message names it.
    """

    rank: int
    alpha: float | None = None
    dropout: float = 0.0
    targets: str | Sequence[str] = ALL
    rslora: bool = False
    dora: bool = False

    def __post_init__(self) -> None:
        """Check the types; the numbers are checked as settings."""
        check_fields(self)

    def settings(self) -> dict[str, Any]:
        """Return these as fields of ``Settings``."""
        own = {"rslora", "dora"}
        each = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)[1:]}
        return {"lora": self.rank} | {n if n in own else f"lora_{n}": v for n, v in each.items()}

    def options(self, config: "Config", tokens: Sequence[int] = ()) -> dict[str, Any]:
        """Return the arguments of ``models.create_adapter`` for a model of this config.

        Rows of these tokens are trained too, also those of a head of its own.

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
    """Return how many adapters have a gradient, in words; None if no adapter has one in this step.

    In the first step those of B: A's are 0 as long as B is.  Experts that no token chose are told.
    ``shapes`` are those of whole stacks, if ranks divide them.

    Raises
    ------
    ConfigError
        The gradient of an adapter is 0 everywhere, though others are not: it would learn nothing.
    """
    from ..models.adapters.adapter import UP, module_of

    ups = [name for name in gradients if name.endswith(UP)]
    if not ups:
        return ""
    learns = to_numpy(np.stack([gradients[name].any() for name in ups]))
    if not learns.any():
        return None
    if still := [name for name, any_of_it in zip(ups, learns, strict=True) if not any_of_it]:
        more = f", and of those of {len(still) - 1} more," if len(still) > 1 else ""
        problem = f"the gradient of the adapter of {module_of(still[0])}{more} is 0 everywhere"
        raise ConfigError(
            f"{problem}: it learns nothing; name other layers, {named('lora_targets')}"
        )
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
