"""Fast CUDA kernels for transformers, each next to its NumPy definition.

Models and training are imported on first access, so ``import unsloth_cupy`` is fast.
"""

import typing as _typing

from . import starting as _starting  # noqa: F401 -- before slow imports
from . import interop as interop
from . import losses as losses
from ._version import __version__ as __version__
from .core import names as _names

if _typing.TYPE_CHECKING:
    from .finetune import Lora as Lora
    from .finetune import Settings as Settings
    from .finetune import Trainer as Trainer
    from .finetune import fit as fit
    from .finetune import read_data as read_data
    from .interop.huggingface import patch as patch
    from .models import load as load
    from .serving import Engine as Engine

# Attention
from .models.layers.multi_head_attention import MultiHeadAttention as MultiHeadAttention
from .ops.attention.attention import attention as attention
from .ops.attention.attention import attention_backward as attention_backward
from .ops.attention.attention import attention_forward as attention_forward
from .ops.attention.attention_config import AttentionConfig as AttentionConfig
from .models.layers.attention_layer import attention_layer as attention_layer
from .models.layers.attention_layer import attention_layer_backward as attention_layer_backward
from .ops.attention.attention_paged import attention_paged as attention_paged
from .ops.attention.attention_paged import attention_paged_forward as attention_paged_forward
from .ops.attention.attention_varlen import attention_varlen as attention_varlen
from .ops.attention.attention_varlen import attention_varlen_backward as attention_varlen_backward
from .ops.attention.attention_varlen import attention_varlen_forward as attention_varlen_forward
from .ops.attention.latent_attention import latent_attention as latent_attention
from .ops.attention.latent_attention import latent_attention_forward as latent_attention_forward
from .ops.attention.merge_attention import merge_attention as merge_attention
from .ops.attention.merge_attention import merge_attention_backward as merge_attention_backward

# Position
from .ops.position.apply_rotary import apply_rotary_embedding as apply_rotary_embedding
from .ops.position.apply_rotary import (
    apply_rotary_embedding_backward as apply_rotary_embedding_backward,
)
from .ops.position.apply_rotary import (
    apply_rotary_embedding_forward as apply_rotary_embedding_forward,
)
from .ops.position.qk_norm_rope import qk_norm_rope as qk_norm_rope
from .ops.position.qk_norm_rope import qk_norm_rope_backward as qk_norm_rope_backward
from .ops.position.qk_norm_rope import qk_norm_rope_forward as qk_norm_rope_forward
from .ops.position.rope import rope as rope
from .ops.position.rope import rope_backward as rope_backward
from .ops.position.rope_qk import rope_qk as rope_qk
from .ops.position.rope_qk import rope_qk_ as rope_qk_
from .ops.position.rope_qk import rope_qk_backward as rope_qk_backward
from .ops.position.rope_tables import rope_tables as rope_tables

# Norms
from .ops.norms.gated_rms_norm import gated_rms_norm as gated_rms_norm
from .ops.norms.gated_rms_norm import gated_rms_norm_backward as gated_rms_norm_backward
from .ops.norms.gated_rms_norm import gated_rms_norm_forward as gated_rms_norm_forward
from .ops.norms.layer_norm import layer_norm as layer_norm
from .ops.norms.layer_norm import layer_norm_backward as layer_norm_backward
from .ops.norms.layer_norm import layer_norm_forward as layer_norm_forward
from .ops.norms.rms_norm import rms_norm as rms_norm
from .ops.norms.rms_norm import rms_norm_backward as rms_norm_backward
from .ops.norms.rms_norm import rms_norm_forward as rms_norm_forward

# Activations
from .ops.activations.geglu import geglu as geglu
from .ops.activations.geglu import geglu_backward as geglu_backward
from .ops.activations.geglu import geglu_backward_ as geglu_backward_
from .ops.activations.relu2 import relu2 as relu2
from .ops.activations.relu2 import relu2_backward as relu2_backward
from .ops.activations.relu2 import relu2_backward_ as relu2_backward_
from .ops.activations.softmax import softmax as softmax
from .ops.activations.softmax import softmax_backward as softmax_backward
from .ops.activations.swiglu import swiglu as swiglu
from .ops.activations.swiglu import swiglu_backward as swiglu_backward
from .ops.activations.swiglu import swiglu_backward_ as swiglu_backward_
from .ops.activations.swiglu_mlp import swiglu_mlp as swiglu_mlp
from .ops.activations.swiglu_mlp import swiglu_mlp_backward as swiglu_mlp_backward
from .ops.activations.xielu import xielu as xielu
from .ops.activations.xielu import xielu_backward as xielu_backward

# Linear
from .ops.linear.embedding import embedding as embedding
from .ops.linear.embedding import embedding_backward as embedding_backward
from .ops.linear.linear import linear as linear
from .ops.linear.linear import linear_backward as linear_backward
from .ops.linear.matmul import matmul as matmul
from .ops.linear.lora import lora_linear as lora_linear
from .ops.linear.lora import lora_linear_backward as lora_linear_backward
from .ops.linear.lora import lora_linear_forward as lora_linear_forward
from .ops.linear.lora_merge import lora_merge as lora_merge
from .ops.linear.lora_linears import LoraLayer as LoraLayer
from .ops.linear.lora_linears import lora_linears as lora_linears

# Experts
from .ops.experts.experts_mlp import experts_mlp as experts_mlp
from .ops.experts.experts_mlp import experts_mlp_backward as experts_mlp_backward
from .ops.experts.experts_mlp import experts_mlp_forward as experts_mlp_forward
from .ops.experts.grouped_linear import grouped_linear as grouped_linear
from .ops.experts.grouped_linear import grouped_linear_backward as grouped_linear_backward
from .ops.experts.route import Routes as Routes
from .ops.experts.route import route as route
from .ops.experts.route import route_backward as route_backward
from .ops.experts.route import route_forward as route_forward
from .ops.experts.router_losses import balance_loss as balance_loss
from .ops.experts.router_losses import balance_loss_backward as balance_loss_backward
from .ops.experts.router_losses import balance_loss_forward as balance_loss_forward
from .ops.experts.router_losses import router_z_loss as router_z_loss
from .ops.experts.router_losses import router_z_loss_backward as router_z_loss_backward
from .ops.experts.router_losses import router_z_loss_forward as router_z_loss_forward
from .ops.experts.sort_by_expert import sort_by_expert as sort_by_expert

# Recurrence
from .ops.recurrence.causal_conv import causal_conv as causal_conv
from .ops.recurrence.causal_conv import causal_conv_backward as causal_conv_backward
from .ops.recurrence.gated_delta_rule import gated_delta_rule as gated_delta_rule
from .ops.recurrence.gated_delta_rule import gated_delta_rule_backward as gated_delta_rule_backward
from .ops.recurrence.selective_scan import selective_scan as selective_scan
from .ops.recurrence.selective_scan import selective_scan_backward as selective_scan_backward
from .ops.recurrence.ssd import ssd as ssd
from .ops.recurrence.ssd import ssd_backward as ssd_backward

# Quantized
from .ops.quantized.int8 import Int8 as Int8
from .ops.quantized.int8 import int8_weight as int8_weight
from .ops.quantized.int8_linear import int8_linear as int8_linear
from .ops.quantized.int8_quantize import int8_quantize as int8_quantize
from .ops.quantized.mxfp4 import Mxfp4 as Mxfp4
from .ops.quantized.mxfp4 import mxfp4_quantize as mxfp4_quantize
from .ops.quantized.nf4 import Nf4 as Nf4
from .ops.quantized.nf4 import nf4_linear as nf4_linear
from .ops.quantized.nf4 import nf4_quantize as nf4_quantize
from .ops.quantized import rounded_sum as _rounded_sum  # noqa: F401 -- its ops register themselves
from .ops.quantized.ternary import Ternary as Ternary
from .ops.quantized.bit_linear import bit_linear as bit_linear
from .ops.quantized.bit_linear import bit_linear_backward as bit_linear_backward
from .ops.quantized.bit_linear import bit_linear_forward as bit_linear_forward
from .ops.quantized.ternary_linear import ternary_linear as ternary_linear
from .ops.quantized.ternary_quantize import ternary_quantize as ternary_quantize
from .ops.quantized.ternary_scores import ternary_scores as ternary_scores

# Losses
from .ops.losses.cross_entropy import cross_entropy as cross_entropy
from .ops.losses.cross_entropy import cross_entropy_backward as cross_entropy_backward
from .ops.losses.cross_entropy import cross_entropy_forward as cross_entropy_forward
from .ops.losses.cross_entropy_in_place import cross_entropy_ as cross_entropy_
from .ops.losses.linear_cross_entropy_gradients import (
    linear_cross_entropy_gradients as linear_cross_entropy_gradients,
)
from .ops.losses.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy
from .ops.losses.linear_cross_entropy import (
    linear_cross_entropy_backward as linear_cross_entropy_backward,
)
from .ops.losses.linear_cross_entropy import (
    linear_cross_entropy_forward as linear_cross_entropy_forward,
)
from .ops.losses.divergence import divergence as divergence
from .ops.losses.divergence import divergence_backward as divergence_backward
from .ops.losses.divergence import divergence_forward as divergence_forward
from .ops.losses.linear_divergence import linear_divergence as linear_divergence
from .ops.losses.linear_divergence import linear_divergence_backward as linear_divergence_backward
from .ops.losses.linear_divergence import linear_divergence_forward as linear_divergence_forward
from .ops.losses.linear_log_probs import LogProbs as LogProbs
from .ops.losses.linear_log_probs import linear_log_probs as linear_log_probs
from .ops.losses.linear_log_probs import linear_log_probs_backward as linear_log_probs_backward
from .ops.losses.linear_log_probs import linear_log_probs_forward as linear_log_probs_forward
from .ops.losses.linear_top_k_divergence import linear_top_k_divergence as linear_top_k_divergence
from .ops.losses.linear_top_k_divergence import (
    linear_top_k_divergence_backward as linear_top_k_divergence_backward,
)
from .ops.losses.linear_top_k_divergence import (
    linear_top_k_divergence_forward as linear_top_k_divergence_forward,
)

# Elements
from .ops.elements.arithmetic import add as add
from .ops.elements.arithmetic import columns as columns
from .ops.elements.arithmetic import index as index
from .ops.elements.arithmetic import multiply as multiply
from .ops.elements.arithmetic import reshape as reshape
from .ops.elements.arithmetic import scale as scale
from .ops.elements.arithmetic import transpose as transpose
from .ops.elements.cast import accumulate_ as accumulate_
from .ops.elements.cast import cast as cast
from .ops.elements.elementwise import clip as clip
from .ops.elements.elementwise import clip_backward as clip_backward
from .ops.elements.elementwise import divide as divide
from .ops.elements.elementwise import exp as exp
from .ops.elements.elementwise import log as log
from .ops.elements.elementwise import power as power
from .ops.elements.elementwise import subtract as subtract
from .ops.elements.reductions import broadcast_to as broadcast_to
from .ops.elements.reductions import mean as mean
from .ops.elements.reductions import sum as sum

# Errors reported by kernels
from .ops.common.faults import check_errors as check_errors

# Inference
from .inference.kv_cache import KVCache as KVCache
from .inference.paged_kv_cache import PagedKVCache as PagedKVCache

# Memory
from .errors import DeviceMemoryError as DeviceMemoryError
from .memory.estimate import MemoryEstimate as MemoryEstimate
from .memory.estimate import estimate_attention_memory as estimate_attention_memory
from .memory.estimate import estimate_flash_attention_memory as estimate_flash_attention_memory
from .memory.estimate import estimate_forward_memory as estimate_forward_memory
from .memory.estimate import estimate_training_memory as estimate_training_memory
from .machine import format_bytes as format_bytes
from .memory.ledger import MemoryPlan as MemoryPlan
from .memory.plan import plan_memory as plan_memory
from .memory.pool import MemoryPool as MemoryPool
from .memory.pool import memory_pool as memory_pool
from .memory.transfer import to_device as to_device
from .memory.transfer import to_host as to_host

# Inspection of calls
from .profiling.explain import explain as explain
from .profiling.profile import profile as profile
from .profiling.shapes import shape as shape

# Training
from .training.gradients import clip_gradients as clip_gradients
from .training.gradients import measure_gradients as measure_gradients
from .training.loss_scaler import LossScaler as LossScaler
from .training.checkpoint import CheckpointConfig as CheckpointConfig
from .training.checkpoint import checkpoint as checkpoint
from .training.find_nan import NonFiniteError as NonFiniteError
from .training.find_nan import find_nan as find_nan
from .training.adafactor import Adafactor as Adafactor
from .training.adamw import AdamW as AdamW
from .training.lion import Lion as Lion
from .training.muon import Muon as Muon
from .training.schedule_free import ScheduleFreeAdamW as ScheduleFreeAdamW
from .training.precision import Autocast as Autocast
from .training.precision import MixedPrecisionConfig as MixedPrecisionConfig
from .training.precision import TrainingConfig as TrainingConfig
from .training.precision import compute_copies as compute_copies
from .training.schedules import constant_schedule as constant_schedule
from .training.schedules import cosine_schedule as cosine_schedule
from .training.schedules import inverse_sqrt_schedule as inverse_sqrt_schedule
from .training.schedules import linear_schedule as linear_schedule
from .training.schedules import polynomial_schedule as polynomial_schedule
from .training.schedules import warmup_stable_decay_schedule as warmup_stable_decay_schedule
from .training.tape import Tape as Tape
from .training.variable import Var as Var

_PACKAGES = "errors", "finetune", "interop", "losses", "models", "parallel", "serving"
_HOMES = {
    "Lora": "finetune",
    "Settings": "finetune",
    "Trainer": "finetune",
    "fit": "finetune",
    "read_data": "finetune",
    "patch": "interop.huggingface",
    "load": "models",
    "Engine": "serving",
    **{name: name for name in _PACKAGES},
}

_names.publish(__name__, _HOMES)
