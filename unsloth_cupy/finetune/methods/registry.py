"""All methods of training, by their names.

    method = METHODS["dpo"].bound(settings)

A new one is a row here: a class with other settings, or a small class of its own.  It names the
settings that it uses, so that any other is an error; ``data.rows`` says which rows it reads.
"""

from collections.abc import Mapping

from ...losses.preferences import KINDS
from ...losses.unpaired import KINDS as RATINGS
from ...ops.losses.divergence import KINDS as DIVERGENCES
from ..data.rows import listing
from .distillation import Distill
from .embedding_method import Embed
from .method import Method
from .policy_methods import REPEATED, Policy
from .preference_methods import Kto, Preference
from .scoring_methods import Classify, Reward

MEASURES = {  # what lines of the log say of answers: as TRL names it
    "accuracy": "rewards/accuracies", "margin": "rewards/margins",
    "reward_chosen": "rewards/chosen", "reward_rejected": "rewards/rejected",
    "reward_desirable": "rewards/chosen", "reward_undesirable": "rewards/rejected",
    "log_prob_chosen": "logps/chosen", "log_prob_rejected": "logps/rejected",
    "nll": "nll_loss", "kl": "kl",
    "f1": "f1", "mrr": "mrr", "error": "error",
    "reward_min": "min_reward", "reward_mean": "mean_reward", "reward_max": "max_reward",
    "reward": "reward", "entropy": "entropy", "clipped": "clip_ratio/region_mean", "ratio": "ratio",
    "length": "completions/mean_length",
}  # fmt: skip
DRAWING = (
    *("reward", "reward_seconds", "samples", "max_new_tokens", "temperature", "invariant"),
    *REPEATED,
)
CLIPPED = ("dapo", "grpo", "dr_grpo", "luspo")  # losses whose terms are those of tokens
METHODS: Mapping[str, Method] = {
    "sft": Method(),
    "dpo": Preference(
        uses=("loss", "beta", "smoothing", "reference"),
        losses=tuple(kind for kind in KINDS if kind not in ("ipo", "simpo", "orpo")),
    ),
    "ipo": Preference(uses=("beta", "reference"), losses=("ipo",)),
    "simpo": Preference(uses=("beta", "gamma", "smoothing", "nll"), losses=("simpo",)),
    "cpo": Preference(uses=("beta", "smoothing", "nll"), losses=("sigmoid",), nll=1.0),
    "orpo": Preference(uses=("beta",), losses=("orpo",), nll=1.0, whole=True),
    "kto": Kto(
        uses=("loss", "beta", "desirable_weight", "undesirable_weight", "reference"), losses=RATINGS
    ),
    "classify": Classify(),
    "reward": Reward(uses=("center",)),
    "embed": Embed(uses=("pooling", "temperature")),
    "grpo": Policy(uses=("loss", "beta", *DRAWING), losses=CLIPPED),
    "rloo": Policy(uses=DRAWING, losses=("rloo",)),
    "distill": Distill(uses=("loss", "beta", "temperature", "teacher"), losses=DIVERGENCES),
}
OPTIONS = tuple(dict.fromkeys(name for method in METHODS.values() for name in method.uses))


def using(option: str) -> str:
    """Return the names of the methods that use a setting."""
    return listing(name for name, method in METHODS.items() if option in method.uses)
