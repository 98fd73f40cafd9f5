"""All training methods by name.

    method = METHODS["dpo"].bound(settings)

To add a method, add an entry here: an existing class with other arguments, or a new class.
``uses`` names the settings that the method reads; any other method setting is an error.  The module
of the class declares new settings, and ``data.rows`` lists the kinds of rows of each method.
"""

import dataclasses
from collections.abc import Mapping

from ...losses.preferences import KINDS
from ...losses.unpaired import KINDS as RATINGS
from ...ops.losses.divergence import KINDS as DIVERGENCES
from ..data.rows import listing
from ..setting import setting
from .distillation import Distill, DistillOptions
from .embedding_method import Embed, EmbedOptions
from .method import Method, SharedOptions
from .policy_methods import Policy, PolicyOptions
from .preference_methods import Kto, Preference, PreferenceOptions
from .scoring_methods import Classify, Reward, RewardOptions

MEASURES = {  # metrics of the log, and the names that TRL gives them
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
DRAWING = ("temperature", *(each.name for each in dataclasses.fields(PolicyOptions)))
CLIPPED = ("dapo", "grpo", "dr_grpo", "luspo")  # losses that clip each token, not each answer
METHODS: Mapping[str, Method] = {
    "sft": Method(uses=("invariant",)),
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
LOSSES = tuple(dict.fromkeys(kind for method in METHODS.values() for kind in method.losses))
OPTIONS = tuple(dict.fromkeys(name for method in METHODS.values() for name in method.uses))


def using(option: str) -> str:
    """Return the names of the methods that read a setting, as text."""
    return listing(name for name, method in METHODS.items() if option in method.uses)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChosenMethod:
    """The training method of a run, and its loss."""

    method: str = setting(
        "method", "Training method.  sft: chats and texts.  dpo, ipo, simpo, cpo, orpo, reward:"
        " preference pairs.  kto: answers rated good or bad.  classify: labelled texts.  embed:"
        " related texts.  grpo, rloo: rewards of sampled answers.  distill: predictions of a"
        " teacher.",
        "sft", choices=(*METHODS,),
    )  # fmt: skip
    loss: str | None = setting(
        "method",
        f"Loss function of {using('loss')}.  [default: sigmoid for dpo, kto for kto, dapo for"
        " grpo, jsd for distill]",
        choices=LOSSES,
        rare=True,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(  # fields of the last base class come first, also in --help
    DistillOptions, PolicyOptions, EmbedOptions, RewardOptions, PreferenceOptions, SharedOptions,
    ChosenMethod,
):  # fmt: skip
    """The training method of a run, and the settings of all methods."""
