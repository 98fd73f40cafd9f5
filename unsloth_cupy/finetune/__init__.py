"""Fine-tuning of a model on a text: training data, trainer, run folder.

run = Trainer("model", "chat.jsonl", Settings(epochs=2), lora=Lora(16)).train()
"""

from .callbacks import Callback as Callback
from .callbacks import Control as Control
from .callbacks import State as State
from .data import read_data as read_data
from .data_report import inspect_data as inspect_data
from .evaluation import Evaluation as Evaluation
from .evaluation import evaluate as evaluate
from .listener import Listener as Listener
from .lora import Lora as Lora
from .settings import Settings as Settings
from .teaching import teach as teach
from .trainer import Run as Run
from .trainer import Trainer as Trainer
