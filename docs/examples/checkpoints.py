"""Fine-tune on a text, stop, and resume from the checkpoint: the weights have the same bits."""

import signal
import tempfile
from pathlib import Path

import numpy as np

from unsloth_cupy.finetune import Listener, Settings, Trainer
from unsloth_cupy.finetune.run.interrupt import Interrupted, Stop

TEXT = "\n\n".join(f"{i} and {i + 1} make {2 * i + 1}." for i in range(200))
SIZES = {"batch": 2, "tokens": 16, "layers": 1, "hidden": 32, "vocabulary": 300}


class StopAfter(Listener):
    """Stops a run after a step, as Ctrl-C does."""

    def __init__(self, stop, last):
        self.stop, self.last = stop, last

    def step(self, line):
        """Request a stop."""
        if line["step"] == self.last:
            self.stop.request(signal.SIGINT)


class Resumed(Listener):
    """Prints the step at which a run resumes."""

    def began(self, step, steps):
        """Print the step."""
        print(f"the same settings resume after step {step} of {steps}")


with tempfile.TemporaryDirectory() as folder:
    text = Path(folder, "sums.txt")
    text.write_text(TEXT)

    def settings(name):
        """Return the settings of a run in this folder."""
        return Settings(**SIZES, steps=20, save_every=5, out=Path(folder, name))

    stop = Stop()
    try:
        Trainer(None, text, settings("stopped"), listener=StopAfter(stop, 12)).train(stop)
    except Interrupted:
        checkpoint = max(Path(folder, "stopped").glob("checkpoint-*"))
        print("stopped; the run folder has", checkpoint.name, "with")
        print(*sorted(path.name for path in checkpoint.iterdir()))
    stopped = Trainer(None, text, settings("stopped"), listener=Resumed()).train()
    whole = Trainer(None, text, settings("whole"), quiet=True).train()

    parameters = stopped.model.parameters, whole.model.parameters
    same = all(np.array_equal(parameters[0][name], parameters[1][name]) for name in parameters[0])
    print("the weights of both runs are equal:", same)
