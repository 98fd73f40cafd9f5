"""The folder of a run: settings, numbers as JSON lines, checkpoints, the trained model.

    settings.json        the settings of the run; a resumed run must have the same settings
    log.jsonl            one line per step, one per evaluation
    checkpoint-000200/   the newest state: model, tokenizer, optimizer.safetensors, trainer.json;
                         the previous one is deleted after a successful step from the newest.
                         Weights or states of more than 5 GB are parts with an index
    model/               the result; it exists only if the run is finished.  The last checkpoint
                         remains, so that a run with more steps can continue from it
    best/                the model of the best step, if the run saves it
    rows.jsonl           the training data, if they were Python rows instead of files
    samples.jsonl        samples: continuations of the prompts of the settings
    reference.safetensors  log-probabilities of the data under the reference model, if the method
                         has one
    routing.jsonl        for a mixture of experts, per evaluation: tokens per layer and expert since
                         the previous evaluation
    curve.png, routing.png
    profile.txt, trace.json, if steps were profiled

Files and folders are written under a temporary name and then renamed, so they are always complete.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...core.call import is_integer, is_number
from ...core.dtypes import FLOAT32
from ...errors import ConfigError
from ...files import PARTIAL, atomic_path, folder_lock, missing_folder_advice, regular, remove
from ...models.adapters.adapter_base import ADAPTER, base_of, cached
from ...models.folders.stored import model_of_run
from ...models.gguf.opening import folder_of
from ...models.text.tokenizer import has_tokenizer
from ..listener import announce, reading
from ..methods.registry import METHODS
from ..naming import named
from .resume import differences, read_settings, requests_more

if TYPE_CHECKING:
    from ...models.adapters.adapter import Adapter
    from ...models.configs.config import Config
    from .settings import Plan

# model files whose fingerprints settings.json stores
HASHED = ("config.json", "gguf.json", "*.safetensors", "teach.json", "*.npy")
STOPPED = "stopped"  # key in the last line of a run that ended early: the reason
LINES = {  # key that marks a kind of log line, and other keys that this kind requires
    "loss": ("seconds", "tokens_per_second", "memory_bytes"),
    "held_out_loss": (),
}
# an evaluation line has one of these counts
COUNTED = {f"held_out_{method.unit}" for method in METHODS.values()}
BLOCK = 2**22  # bytes read at a time


class RunFolder:
    """The files of one run; ``has_log`` is whether this process writes the log."""

    def __init__(self, folder: Path, *, has_log: bool = True) -> None:
        self.folder, self.has_log = folder, has_log
        self.model, self.curve = folder / "model", folder / "curve.png"
        self.settings, self.log = folder / "settings.json", folder / "log.jsonl"
        self.best_model, self.samples = folder / "best", folder / "samples.jsonl"
        self.routing, self.routing_picture = folder / "routing.jsonl", folder / "routing.png"
        self.reference, self.rows = folder / "reference.safetensors", folder / "rows.jsonl"

    @contextmanager
    def claimed(self, settings: dict[str, Any]) -> Iterator[None]:
        """Lock the folder for this run inside a ``with`` block; raise if it holds another run."""
        if self.folder.is_file():
            raise ConfigError(f"{named(out=self.folder)} is a file; name a folder")
        if self.folder.is_dir() and any(self.folder.iterdir()) and not self.settings.is_file():
            raise ConfigError(
                f"{named(out=self.folder)} is not empty and holds no run; name a new folder"
            )
        created = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{named(out=self.folder)}: {error.strerror}; name another folder"
            ) from None
        busy = f"{named(out=self.folder)} is in use by another run; name a new folder"
        with folder_lock(self.folder, busy):
            if self.finished or self.newest_checkpoint():
                self._compare(settings)
            else:
                self._write(settings)
            for leftover in self.folder.glob("*" + PARTIAL):
                remove(leftover)
            try:
                yield
            finally:
                if not (self.lines() or self.newest_checkpoint() or self.finished):
                    self._leave(created)

    def _leave(self, created: list[Path]) -> None:
        """Remove the files and folders created for a run that never began."""
        for path in (self.settings, self.log, self.samples, self.reference, self.rows):
            path.unlink(missing_ok=True)
        if self.best_model.is_dir():
            remove(self.best_model)
        for folder in created:
            if any(folder.iterdir()):
                return
            folder.rmdir()

    def _compare(self, settings: dict[str, Any]) -> None:
        """Raise if the run in the folder has other settings; a finished run may get more steps."""
        before, newest = read_settings(self.settings), self.newest_checkpoint()
        last = int(newest.name.rpartition("-")[2]) if newest else 0
        ended = self.finished or last == before.get("steps")
        if changed := differences(before, settings, ended=ended):
            more = f" for more {named('steps')} or {named('epochs')}" if ended else ""
            raise ConfigError(
                f"{named(out=self.folder)} holds a run with {'; '.join(changed)}."
                f" To resume that run{more}, pass the same options; to start a new run, pass a new"
                f" folder with {named('out')}"
            )
        if ended and requests_more(before, settings):
            if newest is None:
                raise ConfigError(
                    f"{named(out=self.folder)} holds no checkpoint to resume from; name a new"
                    f" folder with {named('out')}"
                )
            if self.finished:
                remove(self.model)
            if "outlier" in settings:
                settings["outlier"] = before.get("outlier", 1.0)
            self._write(settings)

    def _write(self, settings: dict[str, Any]) -> None:
        """Write settings.json."""
        with atomic_path(self.settings) as partial:
            partial.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

    @property
    def outlier(self) -> float:
        """``resume.OUTLIER`` of the run; 1.0 for earlier versions (the 99th percentile)."""
        return float(read_settings(self.settings).get("outlier", 1.0))

    def known(self) -> dict[str, Any]:
        """Return the settings of the resumable or finished run in this folder; {} without one."""
        has_run = self.settings.is_file() and (self.finished or self.newest_checkpoint())
        return read_settings(self.settings) if has_run else {}

    @property
    def finished(self) -> bool:
        """Whether the run is finished."""
        return self.model.is_dir()

    def checkpoints(self) -> list[Path]:
        """Return the folders of the checkpoints, sorted by step."""
        paths = self.folder.glob("checkpoint-*")
        return sorted(path for path in paths if not path.name.endswith(PARTIAL))

    def newest_checkpoint(self) -> Path | None:
        """Return the checkpoint with the most steps, if there is one."""
        return max(self.checkpoints(), default=None)

    def drop_checkpoints(self, before: str = "checkpoint-~") -> None:
        """Remove the checkpoints whose names sort before ``before``."""
        for path in self.folder.glob("checkpoint-*"):
            if path.name < before:
                remove(path)

    def append(self, line: dict[str, Any]) -> None:
        """Add one line to the log, in one write."""
        _append(self.log, line)

    def append_sample(self, line: dict[str, Any]) -> None:
        """Add a line with the step, prompt and text of a sample."""
        _append(self.samples, line)

    def append_routes(self, line: dict[str, Any]) -> None:
        """Add a line with the step, and the tokens per layer and expert."""
        _append(self.routing, line)

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of the log; skip a last line that a crash left incomplete."""
        if not self.log.exists():
            return []
        lines = []
        for number, text in enumerate(regular(self.log).read_bytes().split(b"\n")[:-1], 1):
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                line = None
            if not _is_line(line):
                raise ConfigError(
                    f"{self.log}:{number} is broken; remove this line, or name a new folder with"
                    f" {named('out')}"
                )
            lines.append(line)
        return lines

    def best(self) -> dict[str, Any] | None:
        """Return the first line with the lowest evaluation loss; None without an evaluation."""
        held_out = (line for line in self.lines() if "held_out_loss" in line)
        return min(held_out, key=lambda line: line["held_out_loss"], default=None)

    @property
    def of_new_model(self) -> bool:
        """Whether the run created the model that it trains."""
        return read_settings(self.settings).get("model") is None

    @property
    def stopped(self) -> str | None:
        """Return from the log why the run ended early; None: it did not end early."""
        lines = [line for line in self.lines() if "loss" in line or STOPPED in line]
        return lines[-1].get(STOPPED) if lines else None

    def evaluated(self, step: int) -> bool:
        """Return whether the log has the evaluation after a step."""
        return any(line["step"] == step and "held_out_loss" in line for line in self.lines())

    def trim(self, step: int) -> None:
        """Remove the lines of later steps from the log: these steps will run again."""
        for path in (self.log, self.samples, self.routing):
            if path.exists():
                lines = self.lines() if path == self.log else self.beside(path)
                kept = [line for line in lines if line["step"] <= step]
                with atomic_path(path) as partial:
                    text = "".join(json.dumps(line) + "\n" for line in kept)
                    partial.write_text(text, encoding="utf-8")

    def beside(self, path: Path) -> Iterator[dict[str, Any]]:
        """Yield the lines of another file with steps; skip lines that are not complete."""
        for text in regular(path).read_bytes().split(b"\n")[:-1]:
            with suppress(ValueError, RecursionError):
                line = json.loads(text)
                if isinstance(line, dict) and is_integer(line.get("step")):
                    yield line


def _append(path: Path, line: dict[str, Any]) -> None:
    """Add one line to a file of JSON lines, in one write."""
    with path.open("ab", buffering=0) as file:
        file.write((json.dumps(line) + "\n").encode())


def _is_line(line: Any) -> bool:
    """Return whether a value is a valid line of a log, with the numbers of its kind."""
    if not isinstance(line, dict) or not is_integer(line.get("step")):
        return False
    if "held_out_loss" in line and not line.keys() & COUNTED:
        return False
    needed = {name for kind, names in LINES.items() if kind in line for name in (kind, *names)}
    return needed <= line.keys() and all(
        isinstance(value, str)
        if name == STOPPED
        else is_number(value) or (value is None and name not in needed - {"tokens_per_second"})
        for name, value in line.items()
    )


def is_past_best(run: RunFolder, plan: "Plan") -> bool:
    """Return whether the last ``patience`` evaluations had no lower loss."""
    if plan.patience is None:
        return False
    best, waited = math.inf, 0
    for line in run.lines():
        if "held_out_loss" in line:
            loss = line["held_out_loss"]
            waited = 0 if best - loss > plan.min_delta else waited + 1
            best = min(best, loss)
    return waited >= plan.patience


def log_reason(run: RunFolder, plan: "Plan", step: int) -> None:
    """Log and announce why the run ends after a step, and which step its model has."""
    reason = "requested by a callback"
    if is_past_best(run, plan):
        what = "no lower evaluation loss"
        what += f" (by {plan.min_delta:g})" * bool(plan.min_delta)
        reason = f"{what} in {plan.patience} evaluation{'s' * (plan.patience != 1)}"
    text = f"stopped at step {step}: {reason}"
    if plan.keeps_best and (best := run.best()) is not None:
        text += (
            f"; the saved model is from step {best['step']}, which has the lowest evaluation loss"
            f" ({best['held_out_loss']:.3f})"
        )
    if run.stopped != text:  # else the run was killed before it saved its model
        run.append({"step": step, STOPPED: text})
    announce(text)


class Facts(NamedTuple):
    """The properties of a model that are known without its weights."""

    config: "Config"
    adapter: "Adapter | None"
    quantized: str | None  # the kind of its quantized weights


def model_without_weights(
    folder: Path, base: Any = None, head: str | None = None, labels: int | None = None
) -> Facts:
    """Return config, adapter if any, and kind of quantization of the model in a folder.

    ``base`` replaces the base model that an adapter names; ``head`` and ``labels`` are as in
    ``models.load``.
    """
    from ...models.adapters.adapter_folder import read_adapter
    from ...models.adapters.outer_folder import base_for, implied_head
    from ...models.configs.config_files import read_config
    from ...models.folders.quantized_weights import stored_kind

    home = base_of(folder, base)
    if home is not None and head is None:
        head, labels = implied_head(folder, home, None)
    config, texts, _ = read_config(home or folder, head, labels)
    config = config if home is None else base_for(folder, config, texts, {})
    adapter = None if home is None else read_adapter(folder, config, FLOAT32)
    return Facts(config, adapter, stored_kind(texts["config.json"]))


def words_folder(folder: Path, base: Any = None) -> Path:
    """Return the folder of a model's tokenizer; for an adapter without one, of its base model."""
    return folder if has_tokenizer(folder) else base_of(folder, base) or folder


def config_file(path: Path) -> Path:
    """Return the path of config.json: of a file itself, a model, a run, or an adapter's base."""
    if path.is_file() and folder_of(path) == path:
        return path
    folder = model_folder(path)
    return (base_of(folder) or folder) / "config.json"


def model_folder(path: Path) -> Path:
    """Return the folder of a model's files: the path itself, or the result of the run in it.

    If no folder has this name, OWNER/MODEL is a model of huggingface.co in the local cache.
    """
    if not path.exists() and (known := cached(path.as_posix())):
        return known[0]
    if not path.exists():
        cure = missing_folder_advice(path, "pass a folder that contains config.json")
        raise ConfigError(f"{path} does not exist; {cure}")
    path = folder_of(path)
    if not path.is_dir():
        raise ConfigError(f"{path} is a file; name the folder that holds config.json")
    inside = model_of_run(path)
    if inside == path and not any((path / name).exists() for name in ("config.json", ADAPTER)):
        if RunFolder(path).settings.is_file():
            problem = f"{path} is a run that has not finished, and has saved no checkpoint yet"
            raise ConfigError(f"{problem}; resume it with the command that began it")
        raise ConfigError(f"{path} holds no config.json; name a Hugging Face model folder")
    return inside


def fingerprints(folder: Path, known: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the fingerprint of each config.json and safetensors file of a model, by file name.

    Fingerprints show whether the base model of an adapter has changed.  If a file has the size,
    change time and inode of its known fingerprint, the known digest is used and the file not read.
    """
    paths = sorted(path for pattern in HASHED for path in folder.glob(pattern))
    result: dict[str, dict[str, Any]] = {}
    for path in paths:
        stat = path.stat()
        state = {"bytes": stat.st_size, "changed": stat.st_ctime_ns, "inode": stat.st_ino}
        before = known.get(path.name, {})
        if any(before.get(key) != value for key, value in state.items()):
            digest = hashlib.sha256()
            for (data,) in reading(_blocks(path), stat.st_size, f"reading {path.name}"):
                digest.update(data)
            before = {"sha256": digest.hexdigest()}
        result[path.name] = {"sha256": before["sha256"], **state}
    return result


def sampled_digest(folder: Path) -> str:
    """Return a digest of the files of a model: their names and sizes, and 64 samples of each.

    It tells a copy of other weights at the cost of a few reads; ``fingerprints`` reads all bytes.
    """
    digest = hashlib.sha256()
    for path in sorted(
        {path for each in (*HASHED, "*.gguf", "tokenizer*") for path in folder.glob(each)}
    ):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with regular(path).open("rb") as file:
            for start in sorted({size * part // 64 for part in range(64)}):
                file.seek(start)
                digest.update(file.read(4096))
    return digest.hexdigest()


def _blocks(path: Path) -> Iterator[tuple[bytes]]:
    """Yield the bytes of a file in blocks."""
    with regular(path).open("rb") as file:
        while data := file.read(BLOCK):
            yield (data,)
