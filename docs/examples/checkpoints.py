"""Fine-tune on a text, stop in the middle, go on from the checkpoint: the bits are the same."""

import signal
import tempfile
from pathlib import Path

import numpy as np

from unsloth_cupy.finetune import Listener, Settings, Trainer
from unsloth_cupy.finetune.run.interrupt import Interrupted, Stop

TEXT = "\n\n".join(f"{i} and {i + 1} make {2 * i + 1}." for i in range(200))
SIZES = {"batch": 2, "tokens": 16, "layers": 1, "hidden": 32, "vocabulary": 300}


class Ctrlc(Listener):
    """Stops a run after a step, as Ctrl-C does."""

    def __init__(self, stop, last):
        self.stop, self.last = stop, last

    def step(self, line):
        """Ask the run to stop."""
        if line["step"] == self.last:
            self.stop.request(signal.SIGINT)


class Began(Listener):
    """Says which steps remain."""

    def began(self, step, steps):
        """Print where it begins."""
        print(f"the same settings go on after step {step} of {steps}")


with tempfile.TemporaryDirectory() as folder:
    text = Path(folder, "sums.txt")
    text.write_text(TEXT)

    def settings(name):
        """Return the settings of a run in this folder."""
        return Settings(**SIZES, steps=20, save_every=5, out=Path(folder, name))

    stop = Stop()
    try:
        Trainer(None, text, settings("stopped"), listener=Ctrlc(stop, 12)).train(stop)
    except Interrupted:
        checkpoint = max(Path(folder, "stopped").glob("checkpoint-*"))
        print("stopped; the folder has", checkpoint.name, "with")
        print(*sorted(path.name for path in checkpoint.iterdir()))
    stopped = Trainer(None, text, settings("stopped"), listener=Began()).train()
    whole = Trainer(None, text, settings("whole"), quiet=True).train()

    parameters = stopped.model.parameters, whole.model.parameters
    same = all(np.array_equal(parameters[0][name], parameters[1][name]) for name in parameters[0])
    print("the weights of both runs are equal:", same)
