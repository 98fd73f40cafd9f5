"""Fast CUDA kernels for transformers, each beside its NumPy definition."""

from ._version import __version__ as __version__

# Joining ops on a tape
from .ops.arithmetic import add as add
from .ops.arithmetic import columns as columns
from .ops.arithmetic import multiply as multiply
from .ops.arithmetic import reshape as reshape
from .ops.arithmetic import scale as scale

# Normalisation
from .ops.rms_norm import rms_norm as rms_norm
from .ops.rms_norm import rms_norm_backward as rms_norm_backward
from .ops.rms_norm import rms_norm_forward as rms_norm_forward

# Inference
from .kv_cache import KVCache as KVCache

# Training
from .gradients import clip_gradients as clip_gradients
from .optimizer import AdamW as AdamW
from .schedules import constant_schedule as constant_schedule
from .schedules import cosine_schedule as cosine_schedule
from .schedules import linear_schedule as linear_schedule
from .tape import Tape as Tape
from .tape import Var as Var
