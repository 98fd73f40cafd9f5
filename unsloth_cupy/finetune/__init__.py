"""Fine-tuning of a model on a text: training data, trainer, run folder.

run = Trainer("model", "chat.jsonl", Settings(steps=200, lora=16)).train()
"""

from .data import read_data as read_data
from .data_report import inspect_data as inspect_data
from .listener import Listener as Listener
from .settings import Settings as Settings
from .trainer import Run as Run
from .trainer import Trainer as Trainer
