"""Checkpoints of a run, and the trained model.

A checkpoint stores whole arrays, so it does not depend on the number or the grid of ranks.  Each
rank has a ``Part`` of the arrays.  Rank 0 writes small files; of larger ones, each rank writes a
part (``models.ranks.parts``).  All files are written in a temporary folder.  Its new name is the
commit: before, the earlier checkpoint is the newest, and a killed save leaves it as it was.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...core.arrays import Unwritten
from ...core.dtypes import Stored
from ...errors import ConfigError
from ...files import atomic_path, check_room, read_json, remove
from ...models.adapters.probe import check_saved
from ...models.configs.heads import NONE
from ...models.configs.names import TABLE
from ...models.folders.checkpoint_files import (
    find_tensors,
    opened,
    with_modules,
    write_tensors,
)
from ...models.folders.expert_files import saved_tensors
from ...models.folders.tensor_file import check_parts, data_digest, digests_in
from ...models.ranks.parts import Entry, is_one_file
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
MODEL, OPTIMIZER = "model", "optimizer"  # names of weight files, before .safetensors or -00001-of-
PARTS = "parts"  # key in trainer.json: the SHA-256 of each part
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
            parts = self._write_model(partial, "float32") | self._write_states(partial)
            if partial is not None:
                if step % self.method.updates(self.plan.accumulate):
                    write_tensors(partial / ANSWERS, tensors_of(self.answers))
                progress = {
                    "step": step,
                    "seed": self.plan.seed,
                    "seconds": seconds,
                    "scaler": {name: getattr(self.scaler, name) for name in SCALER},
                }
                if parts:
                    progress[PARTS] = parts
                text = json.dumps(progress) + "\n"
                (partial / "trainer.json").write_text(text, encoding="utf-8")
        self.untested_checkpoint = path.name

    def _write_states(self, folder: Path | None) -> dict[str, str]:
        """Write the optimizer states, gathered one by one; return the digests of parts."""
        optimizer = self.optimizer
        if isinstance(optimizer, Zero1):
            state = {**optimizer.numbers(), **optimizer.unwritten_state()}
        else:
            state = optimizer.state()
        state.pop("groups", None)  # settings determine them
        own = self.executor.whole(self.executor.unwritten(state))
        writing = self.executor.writing
        return writing.write(self._common(folder), OPTIMIZER, writing.entries(own), own)

    def _common(self, folder: Path | None) -> Path:
        """Return the folder that rank 0 creates and writes, as this rank sees it."""
        if folder is not None:
            folder.mkdir(exist_ok=True)
        return self.run.folder / self.ranks.broadcast("" if folder is None else folder.name)

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
            parts = progress.get(PARTS, {})
            self._check_parts(checkpoint, parts)
            if any(name.startswith(f"{MODEL}-") for name in parts):
                self.model.layout = {}  # a model that fits in one file is one file again
            self._read_averages(checkpoint)
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

    def _check_parts(self, checkpoint: Path, parts: Mapping[str, str]) -> None:
        """Raise a ConfigError on all ranks unless the checkpoint has the parts of one save.

        Each rank reads some of the parts, so that each part is read once.
        """
        comm, problems = self.ranks.comm, ""
        for stem in (MODEL, OPTIMIZER):
            index = checkpoint / f"{stem}.safetensors.index.json"
            digests = digests_in(read_json(index)) if index.exists() else {}
            listed = {name: each for name, each in parts.items() if name.startswith(f"{stem}-")}
            if digests != listed:
                problems = f"{index.name} is of another save than trainer.json"
        for name in sorted(parts)[comm.rank :: comm.size]:
            path = checkpoint / name
            if not path.is_file():
                problems = f"{name} is missing"
            elif data_digest(path) != parts[name]:
                problems = f"the SHA-256 of {name} is not the one in trainer.json"
        every = comm.all_gather(np.frombuffer(f"{problems}\n".encode(), np.uint8))
        problems = next(filter(None, bytes(every).decode().splitlines()), "")
        if problems:
            raise ConfigError(problems)

    def _read_averages(self, checkpoint: Path) -> None:
        """Load this rank's part of the optimizer states."""
        optimizer, tensors = self.optimizer, self.own_optimizer.tensors.items()
        coded = (n for n, t in tensors if getattr(t, "mean_scale", None) is not None)
        narrow = optimizer.narrow if isinstance(optimizer, Zero1) else {*coded}
        averages, index = dict[str, Any](), checkpoint / f"{OPTIMIZER}.safetensors.index.json"
        files = {f"{OPTIMIZER}.safetensors"}
        if index.exists():
            values = read_json(index)
            files = {*values["weight_map"].values()}
            check_parts(index, digests_in(values), files, opened)
        with ExitStack() as stack:
            handles = [stack.enter_context(opened(checkpoint / file)) for file in sorted(files)]
            places = {name: file for file in handles for name in file.keys()}  # noqa: SIM118
            by_parameter: dict[str, list[str]] = {}
            for name in sorted(places):
                by_parameter.setdefault(name.partition(".")[2], []).append(name)
            numbers = {n: places[n].get_tensor(n) for n in by_parameter.pop("", [])}
            # only the whole states of one parameter are in memory at a time
            for names in by_parameter.values():
                own = self.executor.own({n: places[n].get_tensor(n) for n in names}, narrow)
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

    def _write_model(self, folder: Path | None, dtype: str) -> dict[str, str]:
        """Write weights and tokenizer; return the digests of the weights' parts.

        ``folder`` is None on all ranks but rank 0.
        """
        model, optimizer, executor = self.model, self.optimizer, self.executor
        trained: Mapping[str, Any]
        if isinstance(optimizer, Zero1):
            trained = optimizer.unwritten_masters()
        else:
            trained = optimizer.parameters
        tables = {} if model.adapter is None else model.grown_tables()
        own = executor.unwritten({**self.fixed, **trained})
        if dtype != "float32":
            own = {name: self._narrowed(name, each, dtype) for name, each in own.items()}
        own |= executor.unwritten(tables)
        parts = dict[str, str]()
        # Quantized weights have several arrays, and peft reads an adapter from one file.
        one = model.adapter is not None or any(isinstance(a, Stored) for a in self.fixed.values())
        one = one or bool(model.config.modules)  # which have files of their own
        arrays = {} if one else executor.whole(own)
        entries = [] if one else sorted_as(model, executor.writing.entries(arrays))
        if not is_one_file(entries):
            parts = self._write_parts(self._common(folder), entries, arrays)
        else:
            self._write_whole(folder, executor.gathered(own), tables)
        if folder is None:
            return parts
        files = {"tokenizer.json": self.tokenizer.to_str(pretty=True)}
        if model.adapter is not None and self.method.names:  # adapter files have no labels
            files["config.json"] = json.dumps(model.texts["config.json"], indent=2) + "\n"
        # tokenizer.save would fail: unlike Python, it accepts only folder names in UTF-8
        for name, text in (files | {**self.files} | self.method.files(model.config)).items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text, encoding="utf-8")
        if model.adapter is not None and self.method.head == NONE:
            own_modules = [name for each in model.config.modules for name in each.shapes()]
            for file, names in with_modules({"": own_modules}).items():
                tensors = {name.partition(".")[2]: model.parameters[name] for name in names}
                write_tensors(folder / file, {n: to_numpy(a) for n, a in tensors.items()})
        return parts

    def _narrowed(self, name: str, each: Unwritten, dtype: str) -> Unwritten:
        """Return an array of the model in another dtype; reading it raises if it overflows."""
        kind = self.model.config.dtype_of(name, DTYPES[dtype])

        def read() -> Any:
            with np.errstate(over="ignore"):  # the next line checks for it
                narrow = each.read().astype(kind)
            if not fine(name, narrow):
                cure = f"give another {named('save_dtype')}"
                raise ConfigError(f"{name} overflows in {dtype}; {cure}")
            return narrow

        return each._replace(dtype=np.dtype(kind), read=read)

    def _write_whole(
        self, folder: Path | None, whole: dict[str, Any] | None, tables: Mapping[str, Any]
    ) -> None:
        """Write the model, or its adapter and grown tables, from the arrays on rank 0."""
        model = self.model
        if folder is None or whole is None:
            return
        if model.adapter is not None:
            own_tables = {name: whole.pop(name) for name in tables}
            model.adapter.holding(whole).save(folder, own_tables)
            return
        every = model.on_tape(whole, model.step)
        if model.division is not None:
            every.config, every.division = model.division.whole, None
        every.save(folder)

    def _write_parts(
        self, folder: Path, entries: Sequence[Entry], arrays: Mapping[str, Unwritten]
    ) -> dict[str, str]:
        """Write a model whose arrays are gathered one by one; return the digests of its parts."""
        model, ranks = self.model, self.ranks
        config = model.config if model.division is None else model.division.whole
        every = {each.name: each for each in entries}
        forms = saved_tensors(config, every, model.plain)
        digests = self.executor.writing.write(folder, MODEL, entries, arrays, forms)
        if ranks.first:
            for name, values in model.saved_texts({}, every[TABLE].dtype.name).items():
                text = json.dumps(values, indent=2) + "\n"
                (folder / name).write_text(text, encoding="utf-8")
            if ranks.whole and not isinstance(self.optimizer, Zero1):
                check_saved(model, Reading(arrays), folder)
            else:  # no rank can run the whole model: only names, shapes and dtypes are compared
                find_tensors(folder, config)
        ranks.comm.barrier()
        return digests


class Reading(dict[str, Any]):
    """Arrays that are read one by one, each time that they are used."""

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name).read()


def sorted_as(model: Any, entries: Sequence[Entry]) -> list[Entry]:
    """Return the arrays of a model in the order of its config."""
    config = model.config if model.division is None else model.division.whole
    order = {name: number for number, name in enumerate(config.shapes())}
    return sorted(entries, key=lambda each: order.get(each.name, len(order)))


def _in_place_of(partial: Path, path: Path) -> None:
    """Rename a folder to a path; remove an earlier folder there."""
    if path.exists():
        remove(path)
    partial.replace(path)
