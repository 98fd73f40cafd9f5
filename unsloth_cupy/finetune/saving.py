"""Writes the checkpoints and the final model of a run, and resumes a run from a checkpoint.

A checkpoint holds whole arrays: it does not depend on the number or the grid of the ranks that
wrote it.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ..core.dtypes import Array
from ..errors import ConfigError
from ..files import atomic_path
from ..models.adapter import Adapter
from ..models.checkpoint_files import write_tensors
from ..parallel.zero import STATES, Zero1
from ..placement import to_device_of, to_numpy
from ..training.find_nan import fine
from ..training.optimizer import AdamW
from ..training.precision import DTYPES
from .engine import Engine
from .interrupt import Stop
from .ranks import Ranks
from .run_folder import RunFolder
from .settings import Settings

if TYPE_CHECKING:
    from ..models import Transformer
    from ..training.loss_scaler import LossScaler

SCALER = ("value", "good", "skipped")  # attributes that are the state of a LossScaler


class Saving:
    """The part of the Trainer that reads and writes files."""

    run: RunFolder
    ranks: Ranks
    engine: Engine
    model: "Transformer"
    tokenizer: Any
    files: Mapping[str, str]
    plan: Settings
    masters: dict[str, Array]
    optimizer: AdamW | Zero1
    scaler: "LossScaler"
    stop: Stop
    step: int
    seconds: float
    begun: int
    unproven: str | None
    find_nan: bool

    def _stop(self, problem: str, *, after: bool = False) -> NoReturn:
        """Raise for a value that is not finite, in the next step or (``after``) after this one."""
        when = f"after step {self.step}" if after else f"step {self.step + 1}"
        good = [path for path in self.run.checkpoints() if path.name != self.unproven]
        kept = f"; the last good state is {good[-1]}" if good else ""
        cure = f"try a smaller --lr than {self.plan.lr:g}"
        if self.step == 0:  # no step has changed a weight: the model itself is at fault
            cure = "copy the model again" + ", or try --dtype bfloat16" * self.scaler.dynamic
        more = "" if self.find_nan else "; --find-nan names the layer where it begins"
        raise ConfigError(f"{when}: {problem}; {cure}{more}{kept}")

    def save(self) -> Path:
        """Write a checkpoint of this step; the previous one is kept until the next step."""
        self.stop.uninterruptible(f"the checkpoint of step {self.step}")
        path = self.run.folder / f"checkpoint-{self.step:08d}"
        broken = [name for name, array in self._learned().items() if not fine(name, array)]
        if broken:
            self._stop(f"the weight {broken[0]} is not finite", after=True)
        if not self.ranks.broadcast(path.exists()):
            self._write(path)
            self.unproven = path.name  # until a step computes a loss from its weights
        return path

    def _write(self, path: Path) -> None:
        """Write a new checkpoint; all ranks take part, and return when it is complete."""
        state = self.optimizer.state()
        steps = state.pop("steps")
        averages = self.engine.gathered(state)
        with self._beside(path) as partial:
            self.save_model(partial)
            if partial is not None and averages is not None:
                named = {n: to_numpy(a) for n, a in {"steps": steps, **averages}.items()}
                write_tensors(partial / "optimizer.safetensors", named)
                progress = {
                    "step": self.step,
                    "seed": self.plan.seed,
                    "seconds": self.seconds,
                    "scaler": {name: getattr(self.scaler, name) for name in SCALER},
                }
                text = json.dumps(progress) + "\n"
                (partial / "trainer.json").write_text(text, encoding="utf-8")

    def _own(self) -> AdamW:
        """Return the optimizer of the parameters that this rank updates."""
        return self.optimizer.inner if isinstance(self.optimizer, Zero1) else self.optimizer

    def _learned(self) -> dict[str, Array]:
        """Return the parameters that this rank updates, in the precision of the updates."""
        return self._own().parameters

    @contextmanager
    def _beside(self, path: Path) -> Iterator[Path | None]:
        """Yield a temporary folder that replaces ``path`` at the end, on rank 0; None on others."""
        if self.ranks.first:
            with atomic_path(path) as partial:
                yield partial
        else:
            yield None
        self.ranks.comm.barrier()

    def save_result(self, path: Path, dtype: str) -> None:
        """Write the final model of a run."""
        with self._beside(path) as partial:
            self.save_model(partial, dtype)

    def save_model(self, folder: Path | None, dtype: str = "float32") -> None:
        """Write the master weights, or the adapter, and the tokenizer as a Hugging Face folder.

        All ranks take part; ``folder`` is None on all but rank 0.
        """
        model, optimizer = self.model, self.optimizer
        written = optimizer.masters() if isinstance(optimizer, Zero1) else self.masters
        if dtype != "float32":
            written = {name: array.astype(DTYPES[dtype]) for name, array in written.items()}
            broken = [name for name, array in written.items() if not fine(name, array)]
            if broken:
                raise ConfigError(f"{dtype} does not hold {broken[0]}; give another --save-dtype")
        whole = self.engine.gathered(written)
        if folder is None or whole is None:
            return
        if model.adapter is not None:
            Adapter(model.adapter.settings, whole).save(folder)
        else:
            own = model.parameters, model.division
            model.parameters, model.division = whole, None
            model.save(folder)
            model.parameters, model.division = own
        files = {"tokenizer.json": self.tokenizer.to_str(pretty=True)}
        # not by the tokenizer's own save: Python accepts folder names that are not UTF-8
        for name, text in (files | {**self.files}).items():
            (folder / name).write_text(text, encoding="utf-8")

    def resume(self, checkpoint: Path) -> None:
        """Load the states of optimizer and loss scaler, and the step, from a checkpoint.

        The model was loaded from the same checkpoint before.
        """
        from safetensors import SafetensorError, safe_open

        try:
            state = json.loads((checkpoint / "trainer.json").read_text(encoding="utf-8"))
            optimizer, table = self.optimizer, self.model.table
            tensors = self._own().tensors.items()
            narrow = {name for name, tensor in tensors if tensor.mean_scale is not None}
            narrow = optimizer.narrow if isinstance(optimizer, Zero1) else narrow
            averages = dict[str, Array]()
            with safe_open(checkpoint / "optimizer.safetensors", "np") as file:
                known = {*file.keys()} - {"steps"}
                # only one parameter's whole averages are in memory at a time
                for parameter in {name.partition(".")[2] for name in known}:
                    names = known & {f"{field}.{parameter}" for field in STATES}
                    own = self.engine.own({n: file.get_tensor(n) for n in names}, narrow)
                    averages |= {name: to_device_of(array, table) for name, array in own.items()}
                optimizer.load_state({"steps": file.get_tensor("steps"), **averages})
            self.step, self.seconds = int(state["step"]), float(state["seconds"])
            self.begun = self.step
            for name in SCALER:
                setattr(self.scaler, name, state["scaler"][name])
            self.unproven = checkpoint.name
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise ConfigError(
                f"{checkpoint} cannot be resumed from: {error}; delete it to start over"
            ) from None
