"""Training and inference on many devices: communicators, sharded layers, pipelines and ZeRO."""

from ..core import names as _names
from .communicator import Communicator as Communicator
from .communicator import SingleCommunicator as SingleCommunicator
from .communicator import part as part
from .data import DataParallel as DataParallel
from .grid import Grid as Grid
from .grid import grid as grid
from .mpi import MpiCommunicator as MpiCommunicator
from .nccl import NcclCommunicator as NcclCommunicator
from .pipeline import Stage as Stage
from .pipeline import run_pipeline as run_pipeline
from .ring import ring_attention as ring_attention
from .ring import ring_order as ring_order
from .schedule import Step as Step
from .schedule import pipeline_schedule as pipeline_schedule
from .sockets import SocketCommunicator as SocketCommunicator
from .tensor import all_gather as all_gather
from .tensor import all_reduce as all_reduce
from .tensor import all_to_all as all_to_all
from .tensor import all_to_all_rows as all_to_all_rows
from .tensor import column_parallel_linear as column_parallel_linear
from .tensor import reduce_scatter as reduce_scatter
from .tensor import row_parallel_linear as row_parallel_linear
from .tensor import shard as shard
from .ulysses import ulysses_attention as ulysses_attention
from .vocabulary import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
from .vocabulary import vocab_parallel_embedding as vocab_parallel_embedding
from .vocabulary import vocab_parallel_linear_cross_entropy as vocab_parallel_linear_cross_entropy
from .vocabulary import vocab_parallel_linear_log_probs as vocab_parallel_linear_log_probs
from .zero import Zero1 as Zero1
from .zero3 import Zero3 as Zero3

_names.publish(__name__)
