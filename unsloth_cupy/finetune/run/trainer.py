"""``Trainer``, which trains a model from Python as ``unsloth-cupy finetune`` does.

    run = Trainer("model", "chat.jsonl", Settings(epochs=2, out="runs/chat"), lora=Lora(16)).train()
    run.losses, run.best, run.model.generate(tokens, max_new_tokens=20)

A run prints what the command prints, unless it is ``quiet`` or has a ``Listener``, which then
receives messages, steps and evaluations.
"""

import dataclasses
import hashlib
import json
import shutil
from base64 import b64encode
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import cached_property
from html import escape
from io import BytesIO
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from ..._version import __version__
from ...errors import ConfigError, shortened
from ...files import atomic_path, path_of
from ...machine import blas_threads, device_title, on_device
from ...models.adapters.adapter_base import base_of
from ...models.folders.folder import load
from ...models.objective import Objective, next_token
from ...models.transformer import Transformer
from ...ops.quantized.weight import held_arrays
from ...placement import to_numpy
from ..data.iterables import is_rows, keep
from ..data.records import Records
from ..data.rows import KINDS, PAIRS, RATED, SCORED
from ..data.sources import DataFiles, find_data
from ..data.text import Text
from ..data.turns import end_tokens
from ..listener import Listener, announce, hearing
from ..lora import Lora
from ..methods.environments import environment_of, word_of
from ..methods.registry import METHODS
from ..methods.reward_pool import ending_workers, fingerprint
from ..methods.rewards import CalledFunction, rewards_of, words_of
from ..methods.taught import is_taught
from ..naming import named
from .callbacks import Callbacks, checked
from .curve import curve_of
from .evaluation import held_out_of
from .folder_copy import FolderCopy
from .interrupt import Stop
from .loop import Loop
from .preparation import device_name, dtype_of, in_place, prepare
from .printer import Printer
from .ranks import start
from .reference import folder_of
from .reporters import reporters
from .results import summary
from .resume import own_settings, read_settings, stored_settings
from .run_folder import RunFolder, fingerprints, model_folder, sampled_digest
from .settings import Settings

READS = dict.fromkeys((PAIRS, SCORED), "pairs of answers") | {RATED: "rated answers"}


class Run:
    """A run: its folder and its model.

    Attributes
    ----------
    name : str
        The names of model and data.
    files : RunFolder
        The files in the folder: settings, log, checkpoints, model.
    loop : Loop or None
        The training loop; None if an earlier run in the folder is finished.
    """

    def __init__(
        self,
        name: str,
        files: RunFolder,
        loop: Loop | None,
        transformer: Transformer | None = None,
        **place: Any,
    ) -> None:
        self.name, self.files, self.loop = name, files, loop
        self.transformer, self.place = transformer, place

    def __repr__(self) -> str:
        """Return a summary: folder, steps, losses before and after, and next calls."""
        return summary(self.files, self.name)

    def _repr_html_(self) -> str:
        """Return the summary and the loss curve as HTML for a notebook."""
        page, image = f"<pre>{escape(repr(self))}</pre>", BytesIO()
        with suppress(Exception):  # matplotlib fails, or the log is broken: show only the text
            if lines := self.files.lines():
                curve_of(lines, self.name).savefig(image, format="png")
                code = b64encode(image.getvalue()).decode("ascii")
                page += f'<img width="800" alt="losses" src="data:image/png;base64,{code}">'
        return page

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self.files.folder

    @cached_property
    def model(self) -> Transformer:
        """The trained model; if an earlier run is finished, it is loaded from the folder."""
        if self.loop is not None:
            return self.loop.model
        if self.transformer is not None:
            return in_place(self.transformer, self.files.model, self.place["quantize"])
        return load(self.files.model, **self.place)

    @property
    def losses(self) -> list[float]:
        """The loss of each step in the log, in nats per token."""
        return [line["loss"] for line in self.files.lines() if "loss" in line]

    @property
    def best(self) -> dict[str, Any] | None:
        """The first line of the log with the lowest evaluation loss."""
        return self.files.best()

    @property
    def stopped(self) -> str | None:
        """Why the run ended early, in a sentence; None: it did not end early."""
        return self.files.stopped


class Trainer:
    """Trains a model, and saves it in a run folder.

    Calling with the same arguments resumes a stopped run; the result is bitwise equal to that of an
    uninterrupted run.

    Parameters
    ----------
    model : path or Transformer, optional
        The folder of a model, an adapter or a run; or a model from ``models.load``, which is
        trained in place, in float32; None: a new small Llama.
    data : path, list of paths, iterable of mappings, or what read_data returns, optional
        Texts, instructions or chats: see ``read_data``; None: Python's documentation.  Rows of an
        iterable are stored as rows.jsonl in the run folder; a resumed run checks that their hash is
        unchanged.
    settings : Settings, optional
        The settings of the run; None: the defaults.
    reward : callable, str, path, (one of these, weight), or list of these, optional
        The reward of grpo and rloo, in place of ``settings.reward``: FILE.py:FUNCTION, the folder
        of a reward model, or ``reward(completions, **columns)``.  The callable gets ``prompts``,
        ``completions``, ``completion_ids`` and columns of the data as keyword arguments, and
        returns a number per answer, or None for an answer without a reward.  The callable runs in
        this process; a resumed run checks that its name and source are unchanged.
    environment : callable or str, optional
        The environment of grpo and rloo, in place of ``settings.environment``: FILE.py:NAME, or a
        callable that returns an object for each answer.  See ``Transformer.rollouts``.  ``reset``
        receives the columns of the row that it names, and ``prompt``, its messages.
    ignore : collection of str, optional
        Columns of the data to ignore.
    lora : Lora, optional
        New adapters to train, in place of the LoRA fields of the settings.
    evaluate : path, float, iterable of mappings, Records or Text, optional
        Evaluation data, or the fraction of the data to hold out, in place of ``settings.eval``;
        None: a tenth.
    callbacks : sequence of Callback
        Callbacks, which handle the events of the run and may stop it: see ``Callback``.
    objective : callable, optional
        The mean loss to minimise, ``objective(model, tokens=, labels=, offsets=, count=)``: the sum
        over labels divided by ``count``.  Default: the cross-entropy of the next token.
    listener : Listener, optional
        Receives messages, steps and evaluations, which are then not printed.
    quiet : bool
        Whether to print nothing.

    Raises
    ------
    ConfigError
        Settings conflict with each other, with the model or with the data; the message names the
        fields.
    """

    def __init__(
        self,
        model: str | PathLike[str] | Transformer | None = None,
        data: Any = None,
        settings: Settings | None = None,
        *,
        reward: Any = None,
        environment: Any = None,
        ignore: Collection[str] = (),
        lora: Lora | None = None,
        evaluate: Any = None,
        callbacks: Sequence[Any] = (),
        objective: Objective = next_token,
        listener: Listener | None = None,
        quiet: bool = False,
    ) -> None:
        if type(quiet) is not bool:
            raise ConfigError(f"Trainer(quiet={quiet!r}): pass True or False")
        value: Any = settings
        if not (value is None or isinstance(value, Settings)):
            raise ConfigError(f"Trainer(settings={value!r}): pass Settings(...), or None")
        each = _with(settings or Settings(), lora, reward, environment, evaluate)
        self.evaluate: Any = each.eval
        if not isinstance(each.eval, int | float | Records | Text | None):
            self.evaluate = path_of("Trainer: evaluate", each.eval)
        self.transformer = model if isinstance(model, Transformer) else None
        if self.transformer is not None:
            each = dataclasses.replace(each, device=_place(self.transformer, each.device))
            model = _home(self.transformer)
        self.settings = each
        self.callbacks = checked(callbacks)
        self.objective = objective
        checked_listener: Any = listener
        if not isinstance(checked_listener, Listener | None):
            problem = f"listener={shortened(repr(listener))} is no Listener"
            raise ConfigError(f"Trainer: {problem}; derive a class from it")
        self.listener = listener or (Listener() if quiet else Printer())
        folder = None if model is None else path_of("Trainer: model", model)
        self.files: RunFolder | None = None  # set after the data are read
        self.ranks = start(
            tensor=each.tensor_parallel, pipeline=each.pipeline_parallel, data=each.data_parallel,
            context=each.context_parallel, expert=each.expert_parallel,
            device=each.device, zero=each.zero, timeout=each.timeout,
            schedule=each.pipeline_schedule, chunks=each.chunks,
            context_attention=each.context_attention,
        )  # fmt: skip
        with self.ranks.ending():
            self.source = None if folder is None else model_folder(folder)
            known = isinstance(data, Text | Records)
            if known and ignore:
                raise ConfigError("Trainer(ignore=) is for files; give it to read_data")
            if not self.ranks.alone and "-" in (data if isinstance(data, list) else [data]):
                raise ConfigError("ranks do not share standard input; name a file in place of -")
            self.text: Any = (
                data if known else find_data(data, ignore, "Trainer: data", each.method)
            )
            self.lines = isinstance(self.text, Records) or (
                isinstance(self.text, DataFiles) and self.text.lines
            )
            self._check()
            self.callbacks += reporters(each.report_to)
            own = self.transformer
            divided = own is not None and (own.division is not None or own.parts is not None)
            if own is not None and (divided or not self.ranks.alone):
                problem = "a model in memory is trained by one process"
                raise ConfigError(f"Trainer: {problem}; pass its folder, {self.source}")
            self.base = None if self.source is None else base_of(self.source, each.base)
        new = "small-bitnet" if each.train_weights else "small-llama"
        self.base_name = new if folder is None else folder.resolve().name.removesuffix(".gguf")

    def folder_of(self, text: Text | Records) -> Path:
        """Return the folder of a run on these data."""
        return Path(self.settings.out or Path("runs") / f"{self.base_name}-{text.name}")

    def _check(self) -> None:
        """Raise a ConfigError for settings that conflict with each other, the data or the ranks."""
        each = self.settings
        batch = each.batch * each.accumulate if each.by_text else each.batch
        each.check(self.source, lines=self.lines)
        self._check_method()
        self.ranks.check(
            batch, each.accumulate, limited=bool(each.limit_memory), find_nan=each.find_nan,
            packed=self.lines
            and each.pack is not False
            and not METHODS[each.method].is_on_policy,
        )  # fmt: skip

    def _resume(self, text: Text | Records) -> None:
        """Replace defaults by the settings of the run in this folder, if there is one."""
        own = dict[str, Any]()
        if self.files is not None and self.ranks.first and (before := self.files.known()):
            now = json.loads(json.dumps(stored_settings(self.settings, text, self.source, {})))
            own = own_settings(self.settings, now, before)
        own = json.loads(self.ranks.broadcast(json.dumps(own)))
        if own:
            self.settings = dataclasses.replace(self.settings, **own)
            self._check()
            listed = [f"{name} {value}" for name, value in own.items() if name != "dtype"]
            if listed:
                announce(f"settings taken from the earlier run: {', '.join(listed)}")

    def _join_batches(self) -> None:
        """Make the batches of a step one batch, if each text is computed alone anyway."""
        each = self.settings
        if each.by_text:
            rows = each.batch * each.accumulate
            self.settings = dataclasses.replace(each, batch=rows, accumulate=1)
            several = f", the {rows} rows of a step as one batch" * (each.accumulate > 1)
            announce(f"{named('invariant')}: each text is computed alone{several}")

    def _check_method(self) -> None:
        """Raise a ConfigError if data or objective do not fit the method."""
        method, reads = self.settings.method, KINDS[self.settings.method]
        if method == "sft":
            data_method = getattr(self.text, "method", "sft")
        elif not self.lines:
            if reads == KINDS["sft"] and not is_taught(Path(self.settings.teacher or "")):
                return
            what = READS.get(reads[0], reads[0])
            cure = f"give {named('text')}, a file of {what}"
            raise ConfigError(f"{named(method=method)} needs rows; {cure}")
        else:
            data_method = self.text.method
        if KINDS[data_method] != reads:
            cure = f"read it by read_data(..., method={method!r})"
            raise ConfigError(
                f"Trainer(data=...): the data were read for the method {data_method}; {cure}"
            )
        data = self.ranks.data.size  # also without --data-parallel
        self.settings.learning.check(dataclasses.replace(self.settings, data_parallel=data))
        if self.objective is not next_token and method != "sft":
            problem = f"{named(method=method)} has its own loss"
            raise ConfigError(f"Trainer(objective=...): {problem}; leave one of them out")

    def train(self, stop: Stop | None = None) -> Run:
        """Train to the end, save the model, and return the run.

        Parameters
        ----------
        stop : Stop, optional
            Object through which the caller can stop the run; ``interrupt.stop_request`` uses it on
            Ctrl-C.

        Raises
        ------
        ConfigError
            The model, data and settings are incompatible, a loss is not finite, or the folder
            contains another run.
        DeviceMemoryError
            A step does not fit in memory.
        Interrupted
            The run was stopped; the last complete step is saved.
        """
        stop, ranks = Stop() if stop is None else stop, self.ranks
        stop.together, stop.interruptible = not ranks.alone, ranks.alone
        with hearing(self.listener), ranks.ending(), ending_workers():
            text = self.text.read() if isinstance(self.text, DataFiles) else self.text
            if ranks.problem:
                announce(ranks.problem)
            if isinstance(text, Records) and text.note:
                announce(text.note)
            text, self.evaluated = held_out_of(text, self.evaluate)
            name = f"{self.base_name}-{text.name}"
            self.files = files = RunFolder(self.folder_of(text), has_log=ranks.first)
            self._join_batches()
            self._resume(text)
            dtype = dtype_of(self.settings, self.source, self.transformer, ranks)
            self.settings = dataclasses.replace(self.settings, dtype=dtype)
            ranks.check_equal({} if ranks.alone else self._facts(text))
            with on_device("finetune", ranks.device), ExitStack() as stack:
                if ranks.first:
                    stack.enter_context(files.claimed(self._stored_settings(text)))
                    if isinstance(self.text, DataFiles):
                        keep(self.text.files, files.rows)
                ranks.comm.barrier()  # all ranks see the folder as rank 0 leaves it
                copy = FolderCopy(files, ranks)
                stack.enter_context(copy.locked())
                is_finished, newest = ranks.broadcast(files.finished), files.newest_checkpoint()
                checkpoint = ranks.broadcast("" if newest is None else newest.name)
                read = ["model"] if is_finished else ["reference.safetensors", checkpoint]
                copy.bring("settings.json", "log.jsonl", *filter(None, read))
                self.files = files = copy.run
                if is_finished:
                    kind = None if self.settings.train_weights else self.settings.quantize
                    place = {"dtype": "float32", "device": ranks.device, **ranks.placing}
                    run = Run(name, files, None, self.transformer, quantize=kind, **place)
                    self.listener.finished(run)
                    return run
                announce(f"training on {device_title(ranks.device)}, {dtype}")
                loop = prepare(
                    files, self.settings, text, self.source, ranks, self.objective, self.transformer
                )
                if checkpoint:
                    copy.drop(checkpoint)  # model and optimizer are in memory
                run = Run(name, files, loop)
                # one thread of BLAS with by_text, as each number of threads adds in another order
                hidden = 0 if loop.plan.by_text else loop.model.config.hidden
                stack.enter_context(blas_threads(hidden))
                self._train(run, loop, stop, copy)
                return run

    def _train(self, run: Run, loop: Loop, stop: Stop, copy: FolderCopy) -> None:
        """Run the remaining steps, and save the model."""
        self.listener.prepared(run)
        try:
            loop.train(stop, self.listener, Callbacks(self.callbacks, loop, run.name))
        finally:
            self.listener.ended(run)
        stop.uninterruptible("after saving the model")
        if loop.plan.keeps_best:
            if self.ranks.first:
                with atomic_path(run.files.model) as partial:
                    shutil.copytree(run.files.best_model, partial)
            self.ranks.comm.barrier()
        else:
            loop.checkpoints.write_model(run.files.model, self.settings.save_dtype)
        newest = loop.save().name
        loop.checkpoints.averages().__enter__()  # for good
        if self.ranks.first:
            run.files.drop_checkpoints(before=newest)
        takes_best = loop.plan.keeps_best and self.ranks.whole
        copy.bring("model", weights=takes_best)
        copy.bring("settings.json", "log.jsonl")
        if takes_best:
            in_place(loop.model, run.files.model)
        loop.model.words = run.files.model
        if loop.model.adapter is None:
            loop.model.folder = run.files.model
        ends = end_tokens(loop.chat, loop.tokenizer, loop.model.config) if loop.chat else None
        if ends:  # as in the saved generation_config.json
            loop.model.config = dataclasses.replace(loop.model.config, end_tokens=tuple(ends))
        self.listener.finished(run)

    def _facts(self, text: Text | Records) -> dict[str, Any]:
        """Return what must be equal on all ranks: version, data, models, rewards and settings."""
        rows = f"{len(text.train) + len(text.held_out):,} rows" if isinstance(text, Records) else ""
        settings = stored_settings(self.settings, text, self.source, {})
        facts: dict[str, Any] = {"version": __version__}
        facts["data"] = f"{rows or f'{text.size:,} bytes'} (SHA-256 {text.digest[:12]})"
        each = self.settings
        for name, folder in (
            ("model", self.source), ("base model", self.base), ("teacher", each.teacher),
            ("reference model", each.reference),
        ):  # fmt: skip
            if folder is not None:
                digest = sampled_digest(folder_of(Path(folder)))
                facts[name] = f"files with the digest {digest[:12]}"
        for number, reward in enumerate(rewards_of(each.reward or ()), 1):
            if isinstance(reward, CalledFunction):
                own = reward.digest
            elif reward.path.is_file():
                own = fingerprint(reward.path)
            else:
                own = sampled_digest(model_folder(reward.path))
            facts[f"reward {number}"] = f"{reward.name} with the digest {own[:12]}"
        if (environment := environment_of(each.environment)) is not None:
            facts["environment"] = f"{environment.name} with the digest {environment.digest[:12]}"
        if each.new_tokens is not None:
            facts["new tokens"] = f"file with the digest {fingerprint(Path(each.new_tokens))[:12]}"
        facts["evaluation data"] = self.evaluated.get("eval_sha256", self.evaluated.get("eval"))
        return facts | {name: value for name, value in settings.items() if name not in OF_NODES}

    def _stored_settings(self, text: Text | Records) -> dict[str, Any]:
        """Return the content of settings.json, with fingerprints of files that must not change."""
        adapted, base = self.settings.lora is not None, dict[str, Any]()
        folder = self.source if adapted else self.base
        if self.transformer is not None:
            frozen = adapted or self.transformer.adapter is not None
            base = {"the model": digest_of(self.transformer.parameters)} if frozen else {}
        elif folder is not None and self.files is not None:
            path = self.files.settings
            known = read_settings(path) if path.is_file() else {}
            base = fingerprints(folder, known.get("base") or {})
        if self.settings.teacher is not None:
            files = fingerprints(folder_of(self.settings.teacher), {})
            base |= {f"teacher {name}": each for name, each in files.items()}
        rewards = rewards_of(self.settings.reward or ())
        functions = [each for each in rewards if isinstance(each, CalledFunction)]
        base |= {f"reward {each.name}": {"sha256": each.digest} for each in functions}
        for path in {each.path for each in rewards if each not in functions}:
            if path.is_file():
                base[f"reward {path.name}"] = {"sha256": fingerprint(path)}
                continue
            files = fingerprints(model_folder(path), {})
            base |= {f"reward {path.name}/{name}": each for name, each in files.items()}
        if (environment := environment_of(self.settings.environment)) is not None:
            base[f"environment {environment.name}"] = {"sha256": environment.digest}
        if self.settings.new_tokens is not None:
            base["new tokens"] = {"sha256": fingerprint(Path(self.settings.new_tokens))}
        return stored_settings(self.settings, text, self.source, base) | self.evaluated


# Entries of settings.json that may differ between machines: places of files, whose content counts.
OF_NODES = {"model", "text", "text_file", "text_bytes", "text_sha256", "base", "eval", "reference"}
OF_NODES |= {"teacher", "new_tokens", "reward", "environment"}


def digest_of(parameters: Mapping[str, Any]) -> dict[str, str]:
    """Return the fingerprint of a model in memory."""
    digest = hashlib.sha256()
    for name, array in held_arrays(parameters):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(to_numpy(array)).reshape(-1).view(np.uint8).data)
    return {"sha256": digest.hexdigest()}


def _with(settings: Settings, lora: Any, reward: Any, environment: Any, evaluate: Any) -> Settings:
    """Return settings with the arguments of a Trainer; raise if they conflict."""
    if not isinstance(lora, Lora | None):
        raise ConfigError(f"Trainer(lora={lora!r}): pass Lora(16), or None")
    words = None if reward is None else words_of(reward)
    word = None if environment is None else word_of(environment)
    for name, new, own in (
        ("lora", lora, settings.adapters),
        ("reward", words, tuple(settings.reward) or None),
        ("environment", word, settings.environment),
    ):
        if new is not None and own not in (None, new):
            raise ConfigError(
                f"Trainer: {name}={new} and the settings' {own} differ; leave one out"
            )
    values: dict[str, Any] = {} if lora is None else lora.settings()
    if words is not None:
        values["reward"] = words
    if word is not None:
        values["environment"] = word
    if evaluate is not None:
        if is_rows(evaluate):
            rows = find_data(evaluate, (), "Trainer: evaluate", settings.method)
            evaluate = rows.read(whole=True)
        values["eval"] = evaluate
    return dataclasses.replace(settings, **values)


def _place(model: Transformer, requested: str | None) -> str:
    """Return the device of a model in memory; raise if the settings request another device."""
    device = device_name(model)
    if requested not in (None, "auto", device) and f"{requested}:0" != device:
        cure = f"load it with models.load(folder, device={requested!r}), or leave device out"
        shown = named(device=requested)
        raise ConfigError(f"Trainer: {shown}, but the model is on {device}; {cure}")
    return device


def _home(model: Transformer) -> Path:
    """Return the folder of a model in memory; raise without one, because it has the tokenizer."""
    if model.folder is None:
        cure = "save it beside its tokenizer.json, and pass that folder, or load it from there"
        raise ConfigError(f"Trainer: the model has no folder, and no tokenizer; {cure}")
    return model.folder
