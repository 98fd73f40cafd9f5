"""Losses for likelihood, preferences, policies, rewards and contrast, and their constants.

Each loss is a scalar: a sum over pairs, rows or tokens, divided by ``count``, by default by their
number.  For a part of a batch, pass the count of the whole batch: the losses and gradients of the
parts then add up.  The log-probabilities come from ``model.log_probs``.
"""

from ..core import names as _names
from .basic import contrastive as contrastive
from .basic import nll as nll
from .basic import reward as reward
from .constants import advantages as advantages
from .constants import high_entropy as high_entropy
from .constants import implicit_rewards as implicit_rewards
from .constants import sampler_ratio as sampler_ratio
from .constants import wpo_weights as wpo_weights
from .policies import policy as policy
from .preferences import preference as preference
from .unpaired import kto as kto

_names.publish(__name__)
