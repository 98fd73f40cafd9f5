"""Fine-tuning of models: training data, trainer, run folder.

run = Trainer("model", "chat.jsonl", Settings(epochs=2), lora=Lora(16)).train()
"""

import sys
from importlib.abc import MetaPathFinder
from pathlib import Path

from ..core import names as _names
from .data.sources import read_data as read_data
from .listener import Listener as Listener
from .lora import Lora as Lora
from .planning.choices import Fit as Fit
from .planning.choices import Fits as Fits
from .planning.choices import fit as fit
from .run.callbacks import Callback as Callback
from .run.callbacks import Control as Control
from .run.callbacks import State as State
from .run.data_report import inspect_data as inspect_data
from .run.evaluation import Evaluation as Evaluation
from .run.evaluation import evaluate as evaluate
from .run.settings import Settings as Settings
from .run.teaching import teach as teach
from .run.trainer import Run as Run
from .run.trainer import Trainer as Trainer


class _Moved(MetaPathFinder):
    """Raises an error that names the new module, if code imports a module from its old place."""

    def find_spec(self, name: str, *_: object) -> None:
        package, module = name.rpartition(".")[::2]
        if package == __name__:
            for file in Path(__file__).parent.glob(f"*/{module}.py"):
                raise ModuleNotFoundError(f"{name} is now {package}.{file.parent.name}.{module}")


sys.meta_path.append(_Moved())  # the last finder: Python uses it only if no module has the name

_names.publish(__name__)
