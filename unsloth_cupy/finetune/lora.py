"""The adapters that a run trains: rank, scale, dropout, layers and kind of LoRA."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .naming import named

if TYPE_CHECKING:
    from ..models.config import Config

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
        "all" linear layers of the blocks, those of "attention", or the last components of the
        layers' names, as ("q_proj", "v_proj").
    rslora : bool
        scale = alpha / sqrt(rank).
    dora : bool
        Train the norm of each row of W too (DoRA).
    """

    rank: int
    alpha: float | None = None
    dropout: float = 0.0
    targets: str | Sequence[str] = ALL
    rslora: bool = False
    dora: bool = False

    def settings(self) -> dict[str, Any]:
        """Return these as fields of ``Settings``."""
        own = {"rslora", "dora"}
        each = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)[1:]}
        return {"lora": self.rank} | {n if n in own else f"lora_{n}": v for n, v in each.items()}

    def options(self, config: "Config") -> dict[str, Any]:
        """Return the arguments of ``models.create_adapter`` for a model of this config.

        Raises
        ------
        ConfigError
            A target is no linear layer of the blocks.
        """
        from ..models.adapter import linear_layers
        from ..models.heads import CLASSIFIERS

        names = [*linear_layers(config)]
        known = sorted({name.rpartition(".")[2] for name in names})
        targets: Any = self.targets
        if targets == ATTENTION:
            targets = sorted({n.rpartition(".")[2] for n in names if ".self_attn." in n})
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
        return dataclasses.asdict(self) | {"targets": targets, "modules": modules}
