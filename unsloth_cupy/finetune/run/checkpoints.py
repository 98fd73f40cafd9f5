"""Checkpoints of a run, and the trained model.

A checkpoint stores whole arrays, so it does not depend on the number or the grid of ranks.  Each
rank has a ``Part`` of the arrays; rank 0 writes the files.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...errors import ConfigError
from ...files import atomic_path, check_room, read_json, remove
from ...models.folders.checkpoint_files import opened, write_tensors
from ...parallel.zero import Zero1
from ...placement import to_device_of, to_numpy
from ...training.find_nan import fine
from ...training.precision import DTYPES
from ...training.schedule_free import ScheduleFreeAdamW
from ..data.text import Batch, batches_of, tensors_of
from ..naming import named
from .executor import Executor
from .run_folder import RunFolder
from .settings import Plan

if TYPE_CHECKING:
    from ...training.joined import Joined
    from ...training.loss_scaler import LossScaler
    from ...training.optimizer import Optimizer

ANSWERS = "answers.safetensors"  # sampled answers that later steps reuse
SCALER = ("value", "good", "skipped")  # the state of a LossScaler


class Part(NamedTuple):
    """The arrays of a run's state that a rank stores, whole or sliced, by parameter name."""

    trained: Mapping[str, Any]  # parameters, in the precision of the optimizer
    averages: Mapping[str, Any]  # optimizer states by "field.parameter", and counters

    @property
    def sizes(self) -> tuple[int, int]:
        """The bytes of the trained parameters, and of the optimizer states."""
        weights, averages = (sum(array.nbytes for array in arrays.values()) for arrays in self)
        return weights, averages


class Checkpoints:
    """Reads and writes the state of a run: weights, optimizer, loss scaler, sampled answers.

    Attributes
    ----------
    fixed : {name: array}
        This rank's weights that are not trained but saved with the model, such as corrections of
        routers; empty in a run that trains adapters.
    answers : list of Batch
        The sampled answers that later steps reuse.
    resumed_step : int
        The step of the checkpoint from which the run was resumed: later lines of the log are
        removed.  -1: a new run.
    untested_checkpoint : str, optional
        The newest checkpoint, until a step from its weights has succeeded.
    """

    def __init__(
        self,
        run: RunFolder,
        executor: Executor,
        optimizer: "Optimizer | Joined | Zero1",
        scaler: "LossScaler",
        fixed: Mapping[str, Any],
        method: Any,
        plan: Plan,
        tokenizer: Any,
        files: Mapping[str, str],
    ) -> None:
        self.run, self.executor, self.model = run, executor, executor.model
        self.ranks, self.optimizer, self.scaler = executor.ranks, optimizer, scaler
        self.fixed = fixed if self.model.adapter is None else {}
        self.method, self.plan, self.tokenizer, self.files = method, plan, tokenizer, files
        self.answers: list[Batch] = []
        self.resumed_step = -1
        self.untested_checkpoint: str | None = None

    @property
    def own_optimizer(self) -> "Optimizer | Joined":
        """The optimizer of the parameters that this rank updates."""
        return self.optimizer.inner if isinstance(self.optimizer, Zero1) else self.optimizer

    def part(self) -> Part:
        """Return this rank's trained weights and optimizer states."""
        return Part(self.own_optimizer.parameters, self.own_optimizer.state())

    def check_room(self, step: int) -> None:
        """Raise a ConfigError if the disk has no room for the files after this step."""
        weights, averages = self.part().sizes
        parts = self.ranks.replicas.size if self.ranks.zero else 1
        models = 2 if self.plan.keeps_best else 1
        # a schedule-free optimizer also stores points
        averages += weights if isinstance(self.optimizer, ScheduleFreeAdamW) else 0
        needed = parts * ((2 - bool(step)) * (weights + averages) + models * weights)
        check_room("finetune", self.run.folder, needed, "the run, with two checkpoints,")

    def broken(self) -> str | None:
        """Return the name of a trained weight that is not finite, if there is one."""
        trained = self.own_optimizer.parameters.items()
        return next((name for name, array in trained if not fine(name, array)), None)

    def path(self, step: int) -> Path:
        """Return the folder of the checkpoint of a step."""
        return self.run.folder / f"checkpoint-{step:08d}"

    def last_good(self) -> Path | None:
        """Return the newest checkpoint from which a step has succeeded."""
        paths = [path for path in self.run.checkpoints() if path.name != self.untested_checkpoint]
        return paths[-1] if paths else None

    def tested(self) -> None:
        """Remove all older checkpoints, after a step from the newest one has succeeded."""
        if self.untested_checkpoint and self.ranks.first:
            self.run.drop_checkpoints(before=self.untested_checkpoint)
        self.untested_checkpoint = None

    def averages(self) -> AbstractContextManager[None]:
        """Return a context in which the weights of a schedule-free optimizer are averages."""
        own = self.optimizer
        return own.averages() if isinstance(own, ScheduleFreeAdamW) else nullcontext()

    def write(self, step: int, seconds: float) -> None:
        """Write a new checkpoint; all ranks take part, and return when it is complete."""
        path = self.path(step)
        with self.averages(), self._beside(path) as partial:
            state = self.optimizer.state()
            state.pop("groups", None)  # settings determine them
            numbers = {name: state.pop(name) for name in [*state] if "." not in name}
            averages = self.executor.gathered(state)
            self._write_model(partial, "float32")
            if partial is not None and averages is not None:
                arrays = {n: to_numpy(a) for n, a in {**numbers, **averages}.items()}
                write_tensors(partial / "optimizer.safetensors", arrays)
                if step % self.method.updates(self.plan.accumulate):
                    write_tensors(partial / ANSWERS, tensors_of(self.answers))
                progress = {
                    "step": step,
                    "seed": self.plan.seed,
                    "seconds": seconds,
                    "scaler": {name: getattr(self.scaler, name) for name in SCALER},
                }
                text = json.dumps(progress) + "\n"
                (partial / "trainer.json").write_text(text, encoding="utf-8")
        self.untested_checkpoint = path.name

    def read(self, checkpoint: Path) -> tuple[int, float]:
        """Load optimizer, loss scaler and answers; return the step and the seconds of training.

        The model is already loaded from the same checkpoint.

        Raises
        ------
        ConfigError
            The checkpoint is not complete.
        """
        from safetensors import SafetensorError

        try:
            progress = read_json(checkpoint / "trainer.json")
            self._read_averages(checkpoint / "optimizer.safetensors")
            step, seconds = int(progress["step"]), float(progress["seconds"])
            if step % self.method.updates(self.plan.accumulate):
                with opened(checkpoint / ANSWERS) as file:
                    each = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                self.answers[:] = batches_of(each)
            for name in SCALER:
                setattr(self.scaler, name, progress["scaler"][name])
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            ArithmeticError,
            SafetensorError,
        ) as error:
            raise ConfigError(
                f"{checkpoint} cannot be resumed from: {error}; delete it to start over"
            ) from None
        self.resumed_step, self.untested_checkpoint = step, checkpoint.name
        return step, seconds

    def _read_averages(self, path: Path) -> None:
        """Load this rank's part of the optimizer states."""
        optimizer, tensors = self.optimizer, self.own_optimizer.tensors.items()
        coded = (n for n, t in tensors if getattr(t, "mean_scale", None) is not None)
        narrow = optimizer.narrow if isinstance(optimizer, Zero1) else {*coded}
        averages = dict[str, Any]()
        with opened(path) as file:
            by_parameter: dict[str, list[str]] = {}
            for name in file.keys():  # noqa: SIM118 -- no mapping
                by_parameter.setdefault(name.partition(".")[2], []).append(name)
            numbers = {n: file.get_tensor(n) for n in by_parameter.pop("", [])}
            # only the whole states of one parameter are in memory at a time
            for names in by_parameter.values():
                own = self.executor.own({n: file.get_tensor(n) for n in names}, narrow)
                averages |= {n: to_device_of(array, self.model.table) for n, array in own.items()}
        optimizer.load_state(numbers | averages)

    @contextmanager
    def _beside(self, path: Path) -> Iterator[Path | None]:
        """Yield a temporary folder that replaces ``path`` at the end; None unless rank 0."""
        if self.ranks.first:
            with atomic_path(path, commit=_in_place_of) as partial:
                yield partial
        else:
            yield None
        self.ranks.comm.barrier()

    def write_model(self, path: Path, dtype: str) -> None:
        """Write model or adapter, and tokenizer, as a Hugging Face folder.

        The folder replaces an earlier one of this name.  All ranks take part.
        """
        with self.averages(), self._beside(path) as partial:
            self._write_model(partial, dtype)

    def _write_model(self, folder: Path | None, dtype: str) -> None:
        """Write weights and tokenizer; ``folder`` is None on all ranks but rank 0."""
        model, optimizer = self.model, self.optimizer
        trained = optimizer.masters() if isinstance(optimizer, Zero1) else optimizer.parameters
        written = {**self.fixed, **trained}
        if dtype != "float32":
            kinds = {name: model.config.dtype_of(name, DTYPES[dtype]) for name in written}
            with np.errstate(over="ignore"):  # the next line checks for it
                written = {name: array.astype(kinds[name]) for name, array in written.items()}
            broken = [name for name, array in written.items() if not fine(name, array)]
            if broken:
                cure = f"give another {named('save_dtype')}"
                raise ConfigError(f"{broken[0]} overflows in {dtype}; {cure}")
        tables = {} if model.adapter is None else model.grown_tables()
        whole = self.executor.gathered(written | tables)
        if folder is None or whole is None:
            return
        if model.adapter is not None:
            tables = {name: whole.pop(name) for name in tables}
            model.adapter.holding(whole).save(folder, tables)
        else:
            every = model.on_tape(whole, model.step)
            if model.division is not None:
                every.config, every.division = model.division.whole, None
            every.save(folder)
        files = {"tokenizer.json": self.tokenizer.to_str(pretty=True)}
        if model.adapter is not None and self.method.names:  # adapter files have no labels
            files["config.json"] = json.dumps(model.texts["config.json"], indent=2) + "\n"
        # tokenizer.save would fail: unlike Python, it accepts only folder names in UTF-8
        for name, text in (files | {**self.files} | self.method.files(model.config)).items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")


def _in_place_of(partial: Path, path: Path) -> None:
    """Rename a folder to a path; remove an earlier folder there."""
    if path.exists():
        remove(path)
    partial.replace(path)
