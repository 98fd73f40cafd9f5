"""``finetune`` from Python: without click, heard by a listener, with errors that name fields."""

import dataclasses
import hashlib
import json
import math
import os
import platform
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import pytest

from unsloth_cupy import AdamW, cosine_schedule, linear_schedule
from unsloth_cupy.cli.finetune import finetune
from unsloth_cupy.errors import CommunicationError, ConfigError
from unsloth_cupy.finetune import Listener, Lora, Run, Settings, Trainer
from unsloth_cupy.finetune.data.records import Records
from unsloth_cupy.finetune.data.text import Batch, Text
from unsloth_cupy.finetune.listener import announce, hearing
from unsloth_cupy.finetune.naming import named
from unsloth_cupy.finetune.run import checkpoints, trainer
from unsloth_cupy.finetune.run import executor as module
from unsloth_cupy.finetune.run import ranks as ranks_module
from unsloth_cupy.finetune.run.checkpoints import Checkpoints
from unsloth_cupy.finetune.run.executor import Executor, noisy, share_of
from unsloth_cupy.finetune.run.interrupt import Interrupted, Stop
from unsloth_cupy.finetune.run.loop import Loop
from unsloth_cupy.finetune.run.ranks import Ranks, alone, check_options, start
from unsloth_cupy.finetune.run.rates import rate_of
from unsloth_cupy.finetune.run.run_folder import RunFolder
from unsloth_cupy.models import Transformer, create
from unsloth_cupy.models.folders.checkpoint_files import opened
from unsloth_cupy.models.objective import next_token
from unsloth_cupy.models.optimizers import undecayed
from unsloth_cupy.parallel import SingleCommunicator
from unsloth_cupy.parallel.grid import Grid
from unsloth_cupy.training.precision import DTYPES

from ..cli.test_cli import ROOT, assert_one_clear_error, numbers, run, weights
from ..models.peers import CONFIGS, SIZES
from ..parallel.threads import by_threads

TINY: dict[str, Any] = {"batch": 2, "tokens": 16, "layers": 1, "hidden": 32, "vocabulary": 300}
FLAGS = [word for name, value in TINY.items() for word in (f"--{name}", value)]
GROUPS = [
    "data",
    "method",
    "model",
    "adapters",
    "training",
    "evaluation",
    "memory",
    "ranks",
    "output",
]
WITHOUT_CLICK = """
import sys
import numpy
for name in ("click", "matplotlib", "rich", "tqdm"):
    sys.modules[name] = None  # an import of it fails
from unsloth_cupy.finetune import Settings, Trainer
trainer = Trainer(None, sys.argv[1], Settings(steps=2, out=sys.argv[2], **{tiny}), quiet={quiet})
tokens = numpy.array([[1, 2]])
print(*trainer.train().model.generate(tokens, max_new_tokens=2, stop=()).shape)
"""


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_of_a_context_add_up_to_one(size: int) -> None:
    """Each has its share of loss and sums, and the maxima of all."""

    class Sums:
        largest = 1

        def __call__(self, model: Any, *, sink: list[Any] | None = None, x: float) -> float:
            if sink is not None:
                sink.append(np.array([3.0, 6.0, 9.0]) * x)
            return 12.0 * x

    method: Any = Sums()
    sink: list[Any] = []
    losses = [share_of(method, size, None, sink, x=2.0) for _ in range(size)]
    assert sum(losses) == pytest.approx(24.0)
    np.testing.assert_allclose(sum(each[:2] for each in sink), [6, 12])
    assert [each[2] for each in sink] == [18.0] * size
    assert share_of(method, size, None, x=1.0) == pytest.approx(12.0 / size)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_context_has_more_than_one_rank(size: int) -> None:
    context = SimpleNamespace(size=size)
    ranks: Any = SimpleNamespace(
        groups=SimpleNamespace(context=context), data=None, replicas=SimpleNamespace(size=1),
        zero=0, context_attention=None,
    )  # fmt: skip
    model = create(CONFIGS["llama"] | SIZES, seed=0)
    method = Settings(method="reward").learning
    executor = Executor(ranks, model, method, graph=True)
    assert (model.context is context) == (size > 1)
    assert (executor.objective is method) == (size == 1)
    assert executor.largest == (method.largest if size > 1 else 0)
    assert (executor.data_parallel, executor.parts, executor.states) == (None, None, None)
    assert executor.graph
    assert not executor.together


@pytest.mark.parametrize("holder", [None, "parts", "states"])
def test_a_gradient_is_measured_by_what_holds_it(
    holder: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor: Any = SimpleNamespace(
        model=SimpleNamespace(division=None), parts=None, states=None
    )  # fmt: skip
    measures = dict.fromkeys(("parts", "states"), 0)
    for name in measures:
        of = SimpleNamespace(measure_gradients=lambda *given, scaler, name=name: (name, *given))
        if name == holder:
            setattr(executor, name, of)
    monkeypatch.setattr(module, "measure_gradients", lambda *given, scaler: (None, *given))
    scaler: Any = object()
    assert Executor.measured(executor, {}, 0.5, scaler) == (holder, {}, 0.5)


@pytest.mark.parametrize("more", [{}, {"keep_best": True}, {"optimizer": "schedulefree"}])
def test_a_run_says_how_much_room_it_needs(
    more: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of its arrays: two checkpoints, while a new one is written, and its models."""
    needed = list[int]()
    monkeypatch.setattr(checkpoints, "check_room", lambda *given: needed.append(given[2]))
    (tmp_path / "a.txt").write_text("\n\n".join(f"{i} is a number." for i in range(99)))
    settings = Settings(
        steps=2, save_every=1, evaluate_every=1, out=tmp_path / "run", **TINY, **more
    )
    Trainer(None, tmp_path / "a.txt", settings).train()
    sizes = Counter[str]()
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file() and path.suffix not in (".json", ".jsonl", ".png", ".txt"):
            folder = path.relative_to(tmp_path / "run").parts[0]
            sizes["checkpoint" if folder.startswith("checkpoint") else "models"] += (
                path.stat().st_size
            )
    arrays = 2 * sizes["checkpoint"] + sizes["models"]
    assert needed[0] == pytest.approx(arrays, rel=0.02)  # headers of files
    assert all(later == needed[1] < needed[0] for later in needed[1:])


# ---- ranks --------------------------------------------------------------------------------------
class Comm(SingleCommunicator):
    """A communicator of this size, of which only this rank exists; it records its splits."""

    def __init__(self, size: int = 1, rank: int = 0) -> None:
        self.size, self.rank, self.splits = size, rank, list[int]()  # type: ignore[misc]
        self.barriers, self.timeout = list[object](), 9.0

    def split(self, color: int) -> "Comm":
        self.splits.append(color)
        return Comm()

    def broadcast(self, x: Any, root: int = 0) -> Any:
        return x + 1

    def barrier(self) -> None:
        self.barriers.append(self.timeout)


def ranks_of(comm: Any = None, options: Any = (), **axes: tuple[int, int]) -> Ranks:
    """Return the ranks of a grid whose axes have these sizes, at these places."""
    each = {name: Comm(*axes.get(name, (1, 0))) for name in Grid._fields}
    comm = comm or Comm(math.prod(axis.size for axis in each.values()), int(bool(axes)))
    return Ranks(comm, Grid(**each), **dict(options))


def test_groups_of_a_grid() -> None:
    for axes, losses, judges, whole in (
        ({}, True, True, True),
        ({"data": (2, 1)}, True, True, True),
        ({"context": (2, 1)}, True, True, True),
        ({"pipeline": (2, 0)}, False, True, False),
        ({"pipeline": (2, 1)}, True, False, False),
        ({"tensor": (2, 0)}, True, True, False),
        ({"tensor": (2, 1)}, True, False, False),
        ({"expert": (2, 1)}, True, True, False),
    ):
        ranks = ranks_of(**axes)
        assert (ranks.losses, ranks.judges, ranks.whole) == (losses, judges, whole), axes
        groups, names = ranks.groups, {"experts": "expert", "communicator": "tensor"}
        for option in ("experts", "communicator", "pipeline"):
            axis = names.get(option, option)
            expected = getattr(groups, axis) if axis in axes else None
            assert ranks.placing[option] is expected
        assert (ranks.placing["chunks"], ranks.placing["parts"]) == (1, None)
        assert (ranks.alone, ranks.first) == (not axes, not axes)
        assert (ranks.failing is None) == (not axes)
        assert ranks.comm.splits[-1:] == [0] * bool(axes)
        assert (ranks.replicas is groups.data) == (not {"context", "expert"} & {*axes})
    for zero, whole in ((0, True), (1, True), (3, False)):
        ranks = ranks_of(options={"zero": zero}, data=(2, 0))
        assert ranks.whole == whole
        assert ranks.placing["parts"] is (ranks.replicas if zero == 3 else None)
    for schedule, chunks, expected in (
        (None, None, 1), ("1f1b", None, 1), ("interleaved", None, 2), ("interleaved", 3, 3),
    ):  # fmt: skip
        options = {"schedule": schedule, "chunks": chunks}
        assert ranks_of(options=options).placing["chunks"] == expected


def test_replicas_have_the_same_weights_and_data_ranks_other_rows() -> None:
    """Colors of a split: equal for those that differ in data, context and experts alone."""
    inner = {"tensor": (2, 1), "pipeline": (3, 2)}
    assert ranks_of(**inner, context=(2, 1)).comm.splits == [5, 0]
    ranks = ranks_of(**inner, context=(4, 3), expert=(2, 1))
    assert ranks.comm.splits == [5, 5 * 4 + 3, 0]
    assert ranks.replicas.splits == [1]  # type: ignore[attr-defined]


def test_arrays_come_from_the_rank_that_judges() -> None:
    assert ranks_of().judged(np.zeros(1)) == 0
    assert ranks_of(tensor=(2, 1)).judged(np.zeros(1)) == 1
    assert ranks_of(tensor=(2, 1), pipeline=(2, 0)).judged(np.zeros(1)) == 2
    assert ranks_of(data=(2, 1)).judged(np.zeros(1)) == 0


def test_values_and_requests_are_those_of_all_ranks() -> None:
    values = (True, False, 7, -2.5, "", "\u00e9 of rank 0")

    def rank(comm: Any) -> tuple[Any, ...]:
        one = SingleCommunicator()
        ranks, stop = Ranks(comm, Grid(comm, one, one, one, one)), Stop()
        own = [ranks.broadcast(value if ranks.first else type(value)()) for value in values]
        ranks.agree(stop)
        stop.signal = 15 if comm.rank == 1 else None
        try:
            ranks.agree(stop)
        except Interrupted:
            return own, stop.signal
        return own, None

    for own, signal in by_threads(3, rank):
        assert own == [*values]
        assert [*map(type, own)] == [*map(type, values)]
        assert signal == 15
    stop = Stop()
    stop.signal = 2
    alone().agree(stop)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("error", "all_fail", "others"),
    [
        (ConfigError("wrong"), True, ()), (ConfigError("wrong"), False, ()),
        (OSError("wrong"), True, ()), (MemoryError("wrong"), True, ()),
        (KeyError("wrong"), True, ()), (KeyError("wrong"), True, (KeyError,)),
        (CommunicationError("wrong"), True, ()), ("told", True, ()),
    ],
)  # fmt: skip
def test_an_error_of_a_rank_ends_all(
    error: Any, all_fail: bool, others: Any, rank: int, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Rank 0 raises what all ranks raise, if the user can mend it; else the hook prints it."""
    hooked, told = list[Any](), error == "told"
    if told:
        error = CommunicationError("wrong")
        error.told = True
    monkeypatch.setattr(sys, "excepthook", lambda *given: hooked.append((*given, sys.stderr)))
    ranks = ranks_of(Comm(2, rank))
    if not all_fail:
        monkeypatch.setattr(ranks.failing, "barrier", raises(CommunicationError("late")))
    mendable = not isinstance(error, KeyError) or bool(others)
    on_all = mendable and all_fail and not isinstance(error, CommunicationError)
    expected = type(error) if on_all and rank == 0 else SystemExit
    stderr = sys.stderr

    def work() -> None:
        with ranks.ending(*others):
            print("said")
            print("said", file=sys.stderr)
            raise error

    with pytest.raises(expected) as caught:
        work()
    assert capsys.readouterr() == (("said\n", "said\n") if rank == 0 else ("", ""))
    if expected is SystemExit:
        assert caught.value.code == 1
    assert len(hooked) == (not on_all)
    for kind, value, trace, stream in hooked:
        assert (kind, value) == (type(error), error)
        assert (trace is None) == mendable
        assert (stream is stderr) == (rank == 0 or not told), "another rank has printed it"
    asked = mendable and not isinstance(error, CommunicationError)
    assert ranks.failing.barriers == [1.0] * (asked and all_fail)
    assert ranks.failing.timeout == (1.0 if asked else 9.0)


def raises(error: Exception) -> Any:
    def call(*_: Any, **__: Any) -> None:
        raise error

    return call


def test_a_process_alone_raises_its_own_errors() -> None:
    with pytest.raises(KeyError), alone().ending():
        raise KeyError


def test_rows_of_a_group_are_of_one_rank() -> None:
    """With the rows before them: all ranks together have the batch."""
    tokens = np.arange(12).reshape(6, 2)
    rows = Batch(tokens, tokens + 50, None, 6, 12, 2, {"value": tokens + 90}, {"texts": tokens[0]})
    packed = Batch(
        np.arange(12)[None], np.arange(12)[None] + 50, np.array([0, 1, 2, 7, 9, 11, 12]), 6, 12, 2,
        {"value": np.arange(12)[None] + 90}, {"texts": tokens[0]},
    )  # fmt: skip
    cuts = {id(rows): (0, 8, 12), id(packed): (0, 9, 12)}
    for batch in (rows, packed):
        for rank in range(2):
            ranks = ranks_of(data=(2, rank))
            start, stop = cuts[id(batch)][rank : rank + 2]
            for own, first, last in (
                (ranks.rows(batch), start, stop),
                (ranks.rows(batch, before=True), 0, start),
            ):
                assert own.tokens.reshape(-1).tolist() == [*range(first, last)]
                assert own.labels.reshape(-1).tolist() == [*range(first + 50, last + 50)]
                assert own.beside["value"].reshape(-1).tolist() == [*range(first + 90, last + 90)]
                assert own.facts is batch.facts
                assert own.tokens.ndim == 2
        assert alone().rows(batch) is batch
        assert alone().rows(batch, before=True).tokens.size == 0
    assert ranks_of(data=(2, 0)).rows(packed).offsets.tolist() == [0, 1, 2, 7, 9]  # type: ignore[union-attr]
    assert ranks_of(data=(2, 1)).rows(packed).offsets.tolist() == [0, 2, 3]  # type: ignore[union-attr]


def test_what_several_ranks_do_not_support() -> None:
    fine: dict[str, Any] = {"limited": False, "find_nan": False}
    two, three = ranks_of(data=(2, 1)), ranks_of(options={"zero": 3}, data=(2, 1))
    two.check(2, 1, **fine | {"find_nan": True})
    three.check(2, 1, **fine)
    alone().check(1, 1, limited=True, find_nan=True)
    for ranks, batch, options, said in (
        (two, 1, {}, "batch=1 is too small for 2 ranks of data_parallel; give batch=2 or more"),
        (two, 2, {"limited": True}, "limit_memory is not supported on several ranks"),
        (three, 2, {"find_nan": True}, "zero=3 does not support find_nan: "),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            ranks.check(batch, 1, **fine | options)
    experts = ranks_of(expert=(2, 1))
    experts.data = Comm(2, 1)
    for options, said in (
        ((None, 2, None), "chunks=2 needs the interleaved schedule"),
        (("1f1b", None, None), "pipeline_schedule=1f1b needs several stages"),
        ((None, None, "ring"), "context_attention=ring needs several context ranks"),
    ):
        given = dict(zip(("schedule", "chunks", "context_attention"), options, strict=True))
        with pytest.raises(ConfigError, match=said):
            ranks_of(options=given).check(1, 1, **fine)
    with pytest.raises(ConfigError, match="zero=3 does not support expert_parallel"):
        ranks_of(options={"zero": 3}, expert=(2, 1)).check(2, 1, **fine)
    with pytest.raises(ConfigError, match="accumulate=3 is not a multiple of 2"):
        ranks_of(options={"schedule": "interleaved"}, pipeline=(2, 1)).check(2, 3, **fine)
    assert ranks_of(options={"problem": "one GPU"}).problem == "one GPU"
    with pytest.raises(ConfigError, match="too small for 2 ranks of expert_parallel"):
        experts.check(1, 1, **fine)
    experts.check(1, 1, **fine, packed=True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((1, 1, 0, None, None, None, 1, 1), ""), ((1, 1, 3, None, None, None, 1, 1), ""),
        ((2, 2, 1, "1f1b", None, "ring", 3, 2), ""),
        ((2, 1, 0, "interleaved", 3, None, 4, 1), ""),
        ((1, 1, 3, None, None, None, 1, 2), "zero=3 does not support expert_parallel"),
        ((1, 1, 0, "1f1b", None, None, 1, 1), "pipeline_schedule=1f1b needs several stages; give"),
        ((2, 1, 0, "1f1b", 2, None, 2, 1), "chunks=2 needs the interleaved schedule; give"),
        ((2, 1, 0, None, 2, None, 2, 1), "chunks=2 needs the interleaved schedule; give"),
        ((3, 1, 0, "interleaved", None, None, 4, 1), "accumulate=4 is not a multiple of 3 ranks of"
         " pipeline_parallel, as interleaved requires; give accumulate=6"),
        ((1, 1, 0, None, None, "ring", 1, 1), "context_attention=ring needs several context ranks;"
         " give context_parallel=2 or more"),
        ((2, 1, 3, None, None, None, 2, 1), "zero=3 does not support pipeline_parallel: each"),
    ],
)  # fmt: skip
def test_options_of_a_grid(options: Any, said: str) -> None:
    if not said:
        check_options(*options)
        return
    with pytest.raises(ConfigError, match=re.escape(said)):
        check_options(*options)


LAUNCHERS = ("RANK", "WORLD_SIZE", "SLURM_PROCID", *ranks_module.MPI_RANKS, *ranks_module.UNDER_MPI)


@pytest.mark.parametrize(
    ("variables", "parallel", "kind", "prints"),
    [
        ({}, False, "single", True), ({}, True, "single", True),
        ({"RANK": 1}, True, "single", True),
        ({"RANK": 1, "WORLD_SIZE": 2}, False, "sockets", False),
        ({"RANK": 0, "WORLD_SIZE": 2}, False, "sockets", True),
        ({"SLURM_PROCID": 1}, False, "single", True), ({"SLURM_PROCID": 1}, True, "sockets", False),
        ({"PMI_RANK": 1, "PMI_SIZE": 2}, False, "mpi", False),
        ({"PMI_RANK": 0, "PMI_SIZE": 2}, False, "mpi", True),
        ({"RANK": 0, "WORLD_SIZE": 2, "PMI_RANK": 1, "PMI_SIZE": 2}, False, "sockets", True),
    ],
)  # fmt: skip
def test_a_launcher_starts_ranks(
    variables: Any, parallel: bool, kind: str, prints: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Variables of Slurm count only for a command that asks for ranks."""
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(ranks_module, "MpiCommunicator", lambda timeout: ("mpi", timeout))
    monkeypatch.setattr(
        ranks_module.SocketCommunicator, "from_environment",
        staticmethod(lambda timeout: ("sockets", timeout)),
    )  # fmt: skip
    started: Any = ranks_module._started(parallel, 3.0)
    if kind == "single":
        assert isinstance(started, SingleCommunicator)
    else:
        assert started == (kind, 3.0)
    assert ranks_module.prints_errors(parallel=parallel) == prints


@pytest.mark.parametrize("rank", [None, 0, 1])
@pytest.mark.parametrize("asks", [False, True])
def test_one_rank_says_why_ranks_do_not_start(
    rank: int | None, asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: the error is one of the launcher, and variables tell which rank this is."""
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    seen = list[Any]()

    def started(parallel: bool, timeout: float) -> Comm:
        seen.append((parallel, timeout))
        if rank is None:
            raise ConfigError("no launcher")
        return Comm(3, rank)

    monkeypatch.setattr(ranks_module, "_started", started)
    sizes: Any = dict.fromkeys(("tensor", "pipeline", "data"))
    sizes |= {"tensor": 2} if asks else {"data": 2}
    with pytest.raises(SystemExit if rank else ConfigError) as caught:
        start(**sizes, device="cpu", timeout=7.0)
    assert seen == [(True, 7.0)]
    if rank == 0:
        grid = "tensor_parallel=2, pipeline_parallel=1, context_parallel=1, expert_parallel=1, "
        grid += "data_parallel=1" if asks else ""
        assert (grid if asks else "data_parallel=2") in str(caught.value)
        assert "needs 2 ranks, but 3 run; start the run with mpiexec -n 2 " in str(caught.value)


def test_ranks_of_a_grid_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def started(parallel: bool, _: float) -> Comm:
        seen.append(parallel)
        return Comm(4, 1)

    monkeypatch.setattr(ranks_module, "_started", started)
    monkeypatch.setattr(ranks_module, "grid", lambda comm, **sizes: ranks_of(comm).groups)
    none: Any = dict.fromkeys(("tensor", "pipeline", "data"))
    for sizes in ({}, {"tensor": 2}, {"data": 4}, {"context": 4}, {"expert": 2, "pipeline": 2}):
        assert start(**none | sizes, device="cpu").comm.size == 4
    assert seen == [False, *[True] * 4]
    with pytest.raises(SystemExit):
        start(**none | {"data": 2}, device="cpu")
    with pytest.raises(SystemExit):
        start(**none, zero=1, device="cpu")


@pytest.mark.parametrize(
    ("asked", "usable", "others", "device", "said"),
    [
        ("auto", [True, True], [1], "cuda", "why"), ("auto", [True], [0], None, "2 ranks have 1"),
        ("auto", [True, True], [], None, "2 ranks have 1 GPU; start one rank per GPU, or set dev"),
        ("auto", [False, False], [], None, "why"), ("auto", [], [], None, "why"),
        ("cpu", [True], [1], "told", "why"), ("alone", [True], [1], "told", "why"),
    ],
)  # fmt: skip
def test_each_rank_has_a_gpu_or_none_has(
    asked: str, usable: Any, others: Any, device: str | None, said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    devices = [SimpleNamespace(is_usable=each, address=n) for n, each in enumerate(usable)]
    monkeypatch.setattr(ranks_module, "gpus", lambda: (devices, "none"))
    monkeypatch.setattr(ranks_module, "local_rank", lambda _: 2)
    monkeypatch.setattr(ranks_module, "resolve_device", lambda _: ("told", "why"))
    comm = Comm(2, 0)
    monkeypatch.setattr(ranks_module, "MpiCommunicator", Socket if asked == "alone" else Comm)
    asked = "auto" if asked == "alone" else asked
    sent = list[Any]()

    def all_gather(own: Any, axis: int = 0) -> Any:
        sent.append(own)
        return np.array([*own, *others])

    monkeypatch.setattr(comm, "all_gather", all_gather, raising=False)
    result = ranks_module._device(asked, comm)
    assert result[0] == device
    assert said in result[1]
    assert all(own.shape == (1,) for own in sent)
    place = (
        hashlib.sha256(f"{platform.node()} 0".encode()).digest()[:8] if any(usable) else bytes(8)
    )
    assert [own.tobytes() for own in sent] == [place] * len(sent)


class Socket:
    """A communicator that is not the one of the test."""


@pytest.mark.parametrize(("size", "device", "placed"), [
    (1, None, None), (1, "cuda:1", "cuda:1"), (2, None, None), (2, "cuda", "cuda:7"),
])  # fmt: skip
def test_a_rank_is_on_the_gpu_of_its_process(
    size: int, device: str | None, placed: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cupy = SimpleNamespace(cuda=SimpleNamespace(runtime=SimpleNamespace(getDevice=lambda: 7)))
    monkeypatch.setattr(ranks_module.gpu, "cupy", lambda: cupy)
    monkeypatch.setattr(ranks_module, "grid", lambda comm, **sizes: ranks_of(data=(2, 0)).groups)
    sizes = dict.fromkeys(("tensor", "pipeline", "context", "expert"), 1)
    ranks = ranks_module._ranks(Comm(size), sizes, None, device, 1, {})
    assert (ranks.device, ranks.zero) == (placed, 1)
    for axes in (("context",), ("expert",), ("data", "context"), ("data", "expert")):
        groups = ranks_of(**dict.fromkeys(axes, (2, 0))).groups
        monkeypatch.setattr(ranks_module, "grid", lambda comm, groups=groups, **sizes: groups)
        assert ranks_module._ranks(Comm(size), sizes, None, None, 1, {}).zero == 1
    monkeypatch.setattr(ranks_module, "grid", lambda comm, **sizes: ranks_of(tensor=(2, 0)).groups)
    with pytest.raises(
        ConfigError, match="zero=1 needs several data ranks; start more ranks, with"
    ):
        ranks_module._ranks(Comm(size), sizes, None, None, 1, {})


# ---- checkpoints --------------------------------------------------------------------------------
def checkpoints_of(folder: Path, **values: Any) -> Any:
    """Return the checkpoints of a run that trains two arrays; values are those of its parts."""
    parameters = {"a": np.ones((2, 3), np.float32), "b": np.ones(4, np.float32)}
    saved = list[Any]()

    def on_tape(whole: Any, step: Any) -> Any:
        return SimpleNamespace(save=lambda path: saved.append(whole) or path.mkdir(exist_ok=True))

    model = SimpleNamespace(
        adapter=None, division=None, table=parameters["a"], step=None, on_tape=on_tape, saved=saved,
        config=SimpleNamespace(dtype_of=lambda name, dtype: dtype, shapes=dict, modules=()),
    )  # fmt: skip
    executor: Any = object.__new__(Executor)
    executor.model, executor.ranks, executor.parts = model, alone(), None
    executor.own, executor.ranks.replicas = lambda named, narrow: named, Comm(4)
    each = {
        "run": RunFolder(folder), "executor": executor, "optimizer": AdamW(
            parameters, lr=0.1, groups=[{"names": ["b"], "weight_decay": 0.0}]
        ),
        "scaler": SimpleNamespace(value=8.0, good=3, skipped=2), "fixed": {"c": np.zeros(1)},
        "method": SimpleNamespace(updates=lambda accumulate: 2, files=lambda _: {}, names=()),
        "plan": Settings(seed=5).decided(new=True),
        "tokenizer": SimpleNamespace(to_str=lambda pretty: "{}"), "files": {"x/y.json": "y"},
    }  # fmt: skip
    return Checkpoints(**each | values)


def on_rank_1(each: Any) -> None:
    each.ranks.first, each.ranks.comm, each.ranks.same = False, Comm(2, 1), Comm(2, 1)


@pytest.mark.parametrize("bits", [32, 8])
def test_narrow_averages_stay_narrow(bits: int, tmp_path: Path) -> None:
    each = checkpoints_of(tmp_path)
    narrow = list[Any]()
    each.executor.own = lambda named, names: narrow.append({*names}) or named
    parameters = {"a": np.ones((64, 64), np.float32), "b": np.ones(4, np.float32)}
    each.optimizer = AdamW(parameters, lr=0.1, state_bits=bits)
    each.write(4, 1.0)
    each.read(each.path(4))
    assert narrow == [{"a"} if bits == 8 else set()] * 2


@pytest.mark.parametrize("step", [3, 4])
def test_a_checkpoint_is_read_as_it_was_written(step: int, tmp_path: Path) -> None:
    """Answers too, while later steps reuse them."""
    one = checkpoints_of(tmp_path)
    one.optimizer.step({"a": np.ones((2, 3), np.float32), "b": np.arange(4, dtype=np.float32)})
    tokens = np.arange(6).reshape(2, 3)
    answers = [Batch(tokens + n, tokens, None, 4, 6, 2, {"value": tokens}) for n in range(2)]
    one.answers += answers
    one.write(step, 12.5)
    path = tmp_path / f"checkpoint-0000000{step}"
    assert one.path(step) == path
    assert one.untested_checkpoint == path.name
    (whole,) = one.model.saved
    assert whole.keys() == {"a", "b", "c"}, "with arrays that are not trained"
    assert (path / "x" / "y.json").read_text() == "y"
    progress = json.loads((path / "trainer.json").read_text())
    scaler = {"value": 8.0, "good": 3, "skipped": 2}
    assert progress == {"step": step, "seed": 5, "seconds": 12.5, "scaler": scaler}
    assert (path / "answers.safetensors").exists() == (step == 3)
    other = checkpoints_of(tmp_path, scaler=SimpleNamespace(value=0, good=0, skipped=0))
    assert other.read(path) == (step, 12.5)
    assert vars(other.scaler) == scaler
    assert (other.resumed_step, other.untested_checkpoint) == (step, path.name)
    assert len(other.answers) == (2 if step == 3 else 0)
    for actual, expected in zip(other.answers, answers, strict=False):
        np.testing.assert_array_equal(actual.tokens, expected.tokens)
        assert actual[3:6] == expected[3:6]
    states = (each.optimizer.state() for each in (one, other))
    for (name, actual), (_, expected) in zip(*(state.items() for state in states), strict=True):
        np.testing.assert_array_equal(actual, expected, err_msg=name)
    one.write(step, 13.0)
    assert json.loads((path / "trainer.json").read_text())["seconds"] == 13.0, "in its place"
    for name, content in (("trainer.json", "{}"), ("trainer.json", "["),
                          ("optimizer.safetensors", "x"), ("trainer.json", None)):  # fmt: skip
        before = (path / name).read_bytes()
        (path / name).unlink()
        if content is not None:
            (path / name).write_text(content)
        with pytest.raises(ConfigError, match=f"{path} cannot be resumed from: .*; delete it to"):
            checkpoints_of(tmp_path).read(path)
        (path / name).write_bytes(before)
    with opened(path / "optimizer.safetensors") as file:
        assert "groups" not in file.keys()  # noqa: SIM118 -- no mapping
    on_rank_1(one)
    one.write(6, 14.0)
    assert not one.path(6).exists(), "rank 0 writes it"
    assert one.untested_checkpoint == "checkpoint-00000006"
    fresh = checkpoints_of(tmp_path)
    assert (fresh.resumed_step, fresh.untested_checkpoint, fresh.answers) == (-1, None, [])


def test_older_checkpoints_stay_until_a_step_succeeds(tmp_path: Path) -> None:
    each = checkpoints_of(tmp_path)
    assert each.last_good() is None
    each.tested()
    for step in (1, 2):
        each.path(step).mkdir()
    each.untested_checkpoint = "checkpoint-00000002"
    assert each.last_good() == each.path(1)
    each.ranks.first = False
    each.tested()
    assert each.path(1).exists()
    assert each.last_good() == each.path(2)
    each.ranks.first, each.untested_checkpoint = True, "checkpoint-00000002"
    each.tested()
    assert (each.path(1).exists(), each.path(2).exists()) == (False, True)
    assert each.untested_checkpoint is None


def test_arrays_of_other_ranks_need_room_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = list[Any]()
    monkeypatch.setattr(checkpoints, "check_room", lambda *given: needed.append(given))
    each = checkpoints_of(tmp_path)
    weights_, averages = each.part().sizes
    assert weights_ == 4 * (6 + 4)
    assert averages == sum(array.nbytes for array in each.optimizer.state().values())
    assert averages >= 2 * weights_
    for zero, step, best, expected in (
        (0, 0, False, 2 * (weights_ + averages) + weights_),
        (0, 3, False, weights_ + averages + weights_),
        (0, 3, True, weights_ + averages + 2 * weights_),
        (1, 3, False, 4 * (weights_ + averages + weights_)),
    ):
        each.ranks.zero = zero
        each.plan = Settings(keep_best=best).decided(new=True)
        each.check_room(step)
        call = ("finetune", tmp_path, expected, "the run, with two checkpoints,")
        assert needed.pop() == call
    assert each.broken() is None
    each.optimizer.parameters["b"][1] = np.inf
    assert each.broken() == "b"


@pytest.mark.parametrize("adapted", [False, True])
def test_a_model_is_saved_in_the_dtype_of_the_settings(adapted: bool, tmp_path: Path) -> None:
    each = checkpoints_of(tmp_path)
    saved = list[Any]()
    files = {"more.txt": "m"}
    each.method = SimpleNamespace(files=lambda _: files, names=("one", "two"), head=None)
    each.model.texts = {"config.json": {"id2label": 1}}
    if adapted:

        def holding(whole: Any) -> Any:
            return SimpleNamespace(
                save=lambda path, tables: saved.append((whole, tables)) or path.mkdir()
            )

        each.model.adapter = SimpleNamespace(holding=holding)
        each.model.grown_tables = lambda: {"table": np.ones(2, np.float32)}
        each.fixed = {}
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "old").touch()
    each.write_model(folder, "bfloat16")
    whole = saved[0][0] if adapted else each.model.saved[0]
    assert {array.dtype.name for array in whole.values()} == {"bfloat16"}
    assert whole.keys() == ({"a", "b"} if adapted else {"a", "b", "c"})
    if adapted:
        assert saved[0][1].keys() == {"table"}
    assert (folder / "config.json").exists() == adapted, "an adapter has no labels of its own"
    assert not (folder / "old").exists()
    assert (folder / "more.txt").read_text() == "m"
    assert (folder / "x" / "y.json").read_text() == "y"
    each.optimizer.parameters["b"][1] = 1e30
    with pytest.raises(ConfigError, match="b overflows in float16; give another save_dtype"):
        each.write_model(folder, "float16")
    on_rank_1(each)
    each.write_model(folder, "float32")
    assert each.ranks.comm.barriers == [9.0], "ranks wait until a model is written"
    assert len(saved if adapted else each.model.saved) == 1


# ---- what the executor computes -----------------------------------------------------------------
def test_several_weights_in_a_norm_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ranks that split a model: parts are summed, and whole arrays have their shares."""
    squared = {"whole": 9.0, "part": 16.0, "expert": 144.0}
    monkeypatch.setattr(module, "squares", lambda flat, *_: squared[flat])

    class Group:
        def __init__(self, factor: float) -> None:
            self.factor = factor

        def all_reduce(self, array: Any) -> Any:
            return array * self.factor

    replicas, same, outer, stage = Group(2.0), Group(3.0), Group(4.0), Group(5.0)
    places = {"part": (0, (1,)), "expert": (0, (1,)), "whole": None}
    names = {**squared}
    gradients: Any = {name: name for name in names}

    class Name(str):
        shape = (1,)

        def reshape(self, *_: int) -> str:
            return str(self)

    gradients = {name: Name(name) for name in names}
    for stages, experts, norm in (
        (None, None, (9 + 2 * 160) * 4), (SimpleNamespace(comm=stage), None, (9 + 2 * 160) * 20),
        (None, 1, (9 + 2 * 16 + 3 * 144) * 4),
    ):  # fmt: skip
        division = SimpleNamespace(
            groups=[outer], stages=stages, experts=experts, shares=lambda name: [],
            of_experts=lambda name: name == "expert",
        )  # fmt: skip
        executor: Any = SimpleNamespace(
            model=SimpleNamespace(division=division), parts=1, states=None, replicas=replicas,
            ranks=SimpleNamespace(same=same), _place=places.get,
        )  # fmt: skip
        size = math.sqrt(norm)
        for most, scale in ((2 * size, 1.0), (size / 4, 1.0), (size / 4, 8.0), (size / 8, 8.0)):
            scaler: Any = SimpleNamespace(value=scale)
            measure = Executor.measured(executor, gradients, most, scaler)
            assert measure.norm == pytest.approx(size / scale)
            clipped = min(1.0, most / (size / scale))
            assert measure.factor == pytest.approx(clipped / scale)
            assert measure.finite
    executor.parts = None
    measure = Executor.measured(executor, gradients, 1e9, scaler)
    assert measure.norm == pytest.approx(math.sqrt(9 * 4) / 8), "no rank holds parts"


@pytest.mark.parametrize("stages", [None, 1])
@pytest.mark.parametrize("parts", [None, 1])
def test_who_makes_the_copies_of_a_dtype(
    parts: Any, stages: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "compute_copies", lambda weights, dtype: (weights, dtype))
    own = parts and SimpleNamespace(compute_copies=lambda dtype: ("parts", dtype))
    stage = stages and SimpleNamespace(dtype=None)
    model = SimpleNamespace(narrowed=lambda dtype: f"narrowed {dtype.name}")
    executor: Any = SimpleNamespace(stages=stage, parts=own, model=model)
    copies = Executor.copies(executor, "bfloat16")
    assert copies == ("parts" if parts else "narrowed bfloat16", "bfloat16")
    assert not stages or stage.dtype == DTYPES["bfloat16"]


def test_what_pads_and_drops() -> None:
    adapter: Any
    for adapter, drops in ((None, False), (0.0, False), (0.5, True)):
        held = None if adapter is None else SimpleNamespace(dropout=adapter)
        executor: Any = SimpleNamespace(model=SimpleNamespace(adapter=held))
        assert Executor.drops.fget(executor) == drops  # type: ignore[attr-defined]
    plain = {"division": None, "context": None, "gather": None, "table": object(), "graph": True}
    for change, pads in (
        ({}, True), ({"graph": False}, False), ({"division": 1}, False), ({"context": 1}, False),
        ({"gather": 1}, False), ({"table": np.zeros(1)}, False),
    ):  # fmt: skip
        values = plain | change
        executor = SimpleNamespace(model=SimpleNamespace(**values), graph=values["graph"])
        assert Executor.pads.fget(executor) == pads  # type: ignore[attr-defined]


def test_sums_are_over_ranks_once() -> None:
    """And a pipeline yields the whole batch, which is no mean of several."""

    def passes() -> Iterator[Any]:
        return iter([(loss, {"a": np.ones(2, np.float32)}) for loss in (2.0, 4.0)])

    doubled = SimpleNamespace(
        sums=lambda sums: {n: a * 2 for n, a in sums.items()}, all_reduce=lambda array: array * 2
    )
    thrice = SimpleNamespace(sums=lambda sums: {n: a * 3 for n, a in sums.items()})
    for data, states, loss, value in (
        (None, None, 6.0, 2.0), (doubled, None, 12.0, 4.0), (doubled, thrice, 12.0, 6.0),
        (None, thrice, 6.0, 2.0),
    ):  # fmt: skip
        executor: Any = SimpleNamespace(
            stages=None, graph=False, data_parallel=data, states=states, replicas=doubled
        )
        actual, sums = Executor.summed(executor, passes(), 2)
        assert actual == loss
        np.testing.assert_array_equal(sums["a"], value)
    executor = SimpleNamespace(stages=1, graph=False, data_parallel=None)
    assert Executor.summed(executor, iter([(2.0, {})]), 2)[0] == 2.0
    ranks = SimpleNamespace(groups=SimpleNamespace(pipeline=SimpleNamespace(size=1)))
    executor = SimpleNamespace(ranks=ranks, replicas=doubled)
    assert Executor.over_all(executor, 1.0) == 2.0
    ranks.groups.pipeline = SimpleNamespace(size=2, all_reduce=lambda array: array * 5)
    assert Executor.over_all(executor, 1.0) == 10.0


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("largest", [0, 1])
def test_batches_of_an_evaluation_are_divided(together: bool, largest: int) -> None:
    """With collective operations, a rank without a batch computes one too."""
    every = np.zeros((3, 3))
    counts = list[int]()
    for rank in range(2):
        asked = list[int]()

        def own(batch: Any, sums: int, asked: Any = asked) -> tuple[float, ...]:
            asked.append(batch)
            return float(batch), 2.0 * batch, 4.0 * batch

        executor: Any = SimpleNamespace(
            data=SimpleNamespace(size=2, rank=rank), together=together, largest=largest,
            model=SimpleNamespace(division=None), _held_out=own, _without_drafts=nullcontext,
            replicas=SimpleNamespace(all_reduce=lambda results: results),
            ranks=SimpleNamespace(groups=SimpleNamespace(context=SimpleNamespace(size=4))),
        )  # fmt: skip
        every += Executor.held_out(executor, [1, 2, 3], 2)  # type: ignore[list-item]
        counts.append(len(asked))
    last = 1.0 if largest else 4.0
    np.testing.assert_array_equal(every, [[n, 2 * n, last * n] for n in (1, 2, 3)])
    assert counts == [2, 2 if together else 1]


# ---- runs ---------------------------------------------------------------------------------------
class Recorder(Listener):
    """Writes down the events of a run, in their order."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def announce(self, text: str) -> None:
        self.events.append(("announce", text))

    def prepared(self, run: Run) -> None:
        self.events.append(("prepared", run.name))

    def began(self, step: int, steps: int) -> None:
        self.events.append(("began", step, steps))

    def step(self, line: dict[str, Any]) -> None:
        self.events.append(("step", line))

    def evaluated(self, line: dict[str, Any]) -> None:
        self.events.append(("evaluated", line))

    def ended(self, run: Run) -> None:
        self.events.append(("ended", run.files.finished))

    def finished(self, run: Run) -> None:
        self.events.append(("finished", run.files.finished))

    def kinds(self) -> list[str]:
        return [kind for kind, *_ in self.events]


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "sums.txt"
    path.write_text("\n\n".join(f"{i} and {i + 1} make {2 * i + 1}." for i in range(200)))
    return path


def train(text: Path, out: Path, listener: Listener | None = None, **settings: Any) -> Run:
    return Trainer(
        None, text, Settings(**TINY | {"out": out} | settings), listener=listener
    ).train()


@pytest.mark.parametrize("quiet", [False, True])
def test_a_run_needs_no_click(quiet: bool, text: Path, tmp_path: Path) -> None:
    """Nor what draws bars, tables and pictures; a quiet one prints nothing."""
    program = WITHOUT_CLICK.replace("{tiny}", repr(TINY)).replace("{quiet}", str(quiet))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, text, tmp_path / "run"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.endswith("1 4\n")
    if quiet:
        assert (done.stdout, done.stderr) == ("1 4\n", "")
    else:
        assert "step 2/2: evaluation loss" in done.stderr
        assert "could not draw the plots in " in done.stderr
        assert f"  folder           {tmp_path / 'run'}\n" in done.stdout


def test_a_listener_hears_the_lines_of_the_log(text: Path, tmp_path: Path) -> None:
    heard = Recorder()
    result = train(text, tmp_path / "run", heard, steps=3, evaluate_every=2)
    assert heard.kinds() == [
        *("announce", "announce", "prepared", "began", "evaluated", "step", "step", "evaluated"),
        *("step", "evaluated", "ended", "finished"),
    ]
    assert ("prepared", "small-llama-sums") in heard.events
    assert ("began", 0, 3) in heard.events
    assert heard.events[0] == ("announce", "training on the CPU, float32")
    assert heard.events[1][1].endswith(f" for evaluation; output: {result.folder}")
    assert [line for kind, line in heard.events[4:-2]] == result.files.lines()
    assert heard.events[-2:] == [("ended", False), ("finished", True)]
    announce("nobody hears this")
    assert heard.kinds()[-1] == "finished"


def test_the_command_and_the_library_make_the_same_run(text: Path, tmp_path: Path) -> None:
    result = run("finetune", "--text", text, "--out", tmp_path / "command", "--steps", 3, *FLAGS)
    assert result.exit_code == 0, result.output
    train(text, tmp_path / "library", steps=3)
    assert weights(tmp_path / "library") == weights(tmp_path / "command")
    assert numbers(tmp_path / "library") == numbers(tmp_path / "command")
    command, library = (
        json.loads((tmp_path / name / "settings.json").read_text())
        for name in ("command", "library")
    )
    assert list(command.items()) == list(library.items())


def test_norms_biases_and_embeddings_do_not_decay(text: Path, tmp_path: Path) -> None:
    """Unless a setting says so: a large decay shrinks all other arrays, or all of them."""
    heard, sizes = Recorder(), {}
    for all_of_them in (False, True):
        settings = {"weight_decay": 200.0, "lr": 1e-4, "decay_all": all_of_them}
        result = train(text, tmp_path / str(all_of_them), heard, steps=3, **settings)
        parameters = result.model.parameters.items()
        sizes[all_of_them] = {name: np.abs(array).mean() for name, array in parameters}
    for name, size in sizes[False].items():
        free = "norm" in name or "embed" in name
        assert (size > 1.01 * sizes[True][name]) == free, name
    said = [words for kind, words in (e[:2] for e in heard.events) if kind == "announce"]
    assert re.search(
        r"no weight decay for norms, biases and embeddings \([\d.]+[kM]? parameters;", said[1]
    )
    assert not any("decay" in words for words in said[2:])


@pytest.mark.parametrize("tied", [False, True])
def test_what_does_not_decay_is_listed(tied: bool) -> None:
    """Of a model with biases and a head of its own or not, and of rows of its table."""
    model = create(SIZES | CONFIGS["qwen2"] | {"tie_word_embeddings": tied}, seed=0)
    free = {n for n in model.trainable if n.endswith(("norm.weight", ".bias"))}
    assert {*undecayed(model)} == free | {"model.embed_tokens.weight"}
    assert len(free) == 3 * (2 + 3) + 1
    model.add_adapter(2, tokens=[5])
    assert all("embed_tokens" in name for name in undecayed(model))
    assert undecayed(model)


@pytest.mark.parametrize(
    ("losses", "ends"),
    [([3, 2, 2], False), ([3, 2, 2, 2], True), ([3, 2, 2, 1, 1], False), ([2, 3, 1, 2, 3], True)],
)
def test_an_equal_loss_is_no_better(losses: list[float], ends: bool) -> None:
    plan = SimpleNamespace(patience=2, min_delta=0.0)
    run = SimpleNamespace(lines=lambda: [{"held_out_loss": loss} for loss in losses])
    ranks = SimpleNamespace(first=True, broadcast=lambda value: value)
    assert Loop._is_past_best(SimpleNamespace(plan=plan, run=run, ranks=ranks)) == ends  # type: ignore[arg-type]


def test_a_stopped_run_goes_on_and_a_finished_one_gives_its_model(
    text: Path, tmp_path: Path
) -> None:
    stop, whole = Stop(), train(text, tmp_path / "whole", steps=4)

    class Stopping(Recorder):
        def step(self, line: dict[str, Any]) -> None:
            stop.signal = 2 if line["step"] == 2 else None

    settings = Settings(**TINY, steps=4, out=tmp_path / "run")
    with pytest.raises(Interrupted):
        Trainer(None, text, settings, listener=Stopping()).train(stop)
    heard = Recorder()
    train(text, tmp_path / "run", heard, steps=4)
    assert ("began", 2, 4) in heard.events
    assert weights(tmp_path / "run") == weights(whole.folder)
    again = Recorder()
    finished = train(text, tmp_path / "run", again, steps=4)
    assert again.events == [("finished", True)]
    tokens = np.array([[1, 2, 3]])
    actual, expected = (each.model.logits(tokens) for each in (finished, whole))
    assert actual.tobytes() == expected.tobytes()


def test_an_objective_is_minimised_planned_and_held_out(text: Path, tmp_path: Path) -> None:
    models: set[type] = set()

    def doubled(model: Transformer, **batch: Any) -> Any:
        models.add(type(batch["tokens"]))
        return next_token(model, **batch) * 2

    settings = Settings(**TINY, steps=1, max_norm=1e9, out=tmp_path / "doubled")
    Trainer(None, text, settings, objective=doubled).train()
    train(text, tmp_path / "plain", steps=1, max_norm=1e9)
    actual, expected = (numbers(tmp_path / name) for name in ("doubled", "plain"))
    assert actual[0]["held_out_loss"] == pytest.approx(2 * expected[0]["held_out_loss"])
    assert actual[1]["loss"] == pytest.approx(2 * expected[1]["loss"])
    assert actual[1]["gradient_norm"] == pytest.approx(2 * expected[1]["gradient_norm"])
    assert len(models) == 2, "arrays, and the shapes of the plan"


def test_defaults_depend_on_the_model() -> None:
    new, whole = (Settings().decided(new=new) for new in (True, False))
    adapter = Settings(lora=8, epochs=2).decided(new=False, steps=15)
    assert [each.lr for each in (new, whole, adapter)] == [4e-3, 1e-4, 1e-3]
    assert [each.steps for each in (new, whole, adapter)] == [1200, 1200, 15]
    assert [each.evaluate_every for each in (new, whole, adapter)] == [120, 120, 2]
    chosen = Settings(lr=0.5, steps=3, evaluate_every=7).decided(new=True)
    assert (chosen.lr, chosen.steps, chosen.evaluate_every) == (0.5, 3, 7)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, cosine_schedule(3, lr=1.0, warmup=1, steps=20, minimum=0.1)),
        ({"warmup": 0.25}, 3 / 5),
        ({"warmup": 6}, 3 / 6),
        ({"warmup": 0, "decay": "constant"}, 1.0),
        ({"decay": "linear"}, linear_schedule(3, lr=1.0, warmup=1, steps=20, minimum=0.1)),
        ({"decay": "polynomial"}, 0.1 + 0.9 * (17 / 19) ** 2),
        ({"decay": "inverse_sqrt", "warmup": 2}, (2 / 3) ** 0.5),
        ({"decay": "wsd"}, 1.0),
    ],
)
def test_rates(settings: dict[str, Any], expected: float) -> None:
    plan = Settings(steps=20, lr=1.0, **settings).decided(new=True)
    assert rate_of(3, plan) == pytest.approx(expected)
    ends = {"constant": 1.0, "inverse_sqrt": (2 / 20) ** 0.5}
    assert rate_of(20, plan) == pytest.approx(ends.get(plan.decay, 0.1))


def test_the_log_has_the_rates_of_the_settings(text: Path, tmp_path: Path) -> None:
    began = time.perf_counter()
    made = train(text, tmp_path / "run", steps=4, lr=0.01, warmup=2, decay="linear", log_every=3)
    lines = [line for line in made.files.lines() if "loss" in line]
    seconds = [line["seconds"] for line in lines]  # rounded to 0.1 ms
    assert 0 < sum(seconds) < time.perf_counter() - began + 1e-3
    for line in lines:
        count = line["tokens_per_second"] * line["seconds"]
        assert count == pytest.approx(32, rel=0.1)  # both numbers are rounded
    assert [(line["step"], line["lr"]) for line in lines] == [
        (3, pytest.approx(0.01 * 0.55)), (4, pytest.approx(0.001)),
    ]  # fmt: skip
    with pytest.raises(
        ConfigError, match=r"warmup=1.5: pass a whole number, or a fraction below 1"
    ):
        train(text, tmp_path / "wrong", warmup=1.5)


def test_the_data_has_a_seed_of_its_own(text: Path, tmp_path: Path) -> None:
    runs = {}
    for seeds in ((0, None), (0, 0), (0, 5), (5, 0)):
        seed, data_seed = seeds
        made = train(text, tmp_path / f"{seeds}", steps=2, seed=seed, data_seed=data_seed)
        runs[seeds] = made.losses
    assert runs[0, None] == runs[0, 0] != runs[0, 5]
    first = train(text, tmp_path / "0-5", steps=1, data_seed=5, evaluate_every=1)
    usual = train(text, tmp_path / "0-0", steps=1, evaluate_every=1)
    untrained = [each.files.lines()[0]["held_out_loss"] for each in (first, usual)]
    assert untrained[0] == untrained[1], "the weights are the same"
    assert runs[5, 0] != runs[0, 0]


def test_adamw8bit_is_adamw_with_narrow_averages(text: Path, tmp_path: Path) -> None:
    for name, settings in (("one", {"optimizer": "adamw8bit"}), ("other", {"state_bits": 8})):
        train(text, tmp_path / name, steps=2, hidden=64, **settings)
    assert weights(tmp_path / "one") == weights(tmp_path / "other")


def test_neftune_adds_noise_in_steps_alone_and_goes_on_in_equal_bits(
    text: Path, tmp_path: Path
) -> None:
    usual = train(text, tmp_path / "usual", steps=3)
    whole = train(text, tmp_path / "whole", steps=3, neftune=5.0)
    first, other = (made.files.lines()[0] for made in (usual, whole))
    assert first["held_out_loss"] == other["held_out_loss"]
    assert usual.losses[0] != whole.losses[0]
    stop = Stop()

    class Stopping(Listener):
        def step(self, line: dict[str, Any]) -> None:
            stop.signal = 2 if line["step"] == 2 else None

    settings = Settings(**TINY, steps=3, neftune=5.0, out=tmp_path / "run")
    with pytest.raises(Interrupted):
        Trainer(None, text, settings, listener=Stopping()).train(stop)
    Trainer(None, text, settings).train()
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


@pytest.mark.parametrize("packed", [False, True])
def test_the_noise_of_neftune_has_its_size(packed: bool) -> None:
    """Uniform, times alpha / sqrt(L hidden), L being the length of the token's own text."""
    tokens, hidden = (1, 600) if packed else (3, 200), 50
    x = np.zeros((*tokens, hidden), np.float32)
    offsets = np.array([0, 100, 600]) if packed else None
    model: Any = type("Model", (), {"noise": None})()
    batch = {"noise_key": np.array(7), "offsets": offsets}
    noise = noisy(lambda m, offsets: m.noise(x), 5.0, model, **batch)
    for part, length in (
        [(noise[:, :100], 100), (noise[:, 100:], 500)] if packed else [(noise, 200)]
    ):
        limit = 5 / (length * hidden) ** 0.5
        assert np.abs(part).max() <= limit
        assert np.std(part) == pytest.approx(limit / 3**0.5, rel=0.03)  # of a uniform distribution
        assert np.mean(part) == pytest.approx(0, abs=0.05 * limit)  # of many draws


def test_a_run_is_named_after_model_and_text(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = Trainer(None, text, Settings(**TINY, steps=1)).train()
    assert (first.name, first.folder) == ("small-llama-sums", Path("runs/small-llama-sums"))
    adapted = Trainer(first.folder, text, Settings(steps=1, tokens=16, lora=2)).train()
    assert adapted.folder == Path("runs/small-llama-sums-sums")
    assert json.loads((adapted.folder / "settings.json").read_text())["lr"] == 1e-3


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"tokens": 0}, "tokens=0: give a whole number of 2 or more"),
        ({"batch": 1.5}, "Settings(batch=1.5): batch must be an integer"),
        ({"lr": 0}, "lr=0: give a number above 0"),
        ({"max_norm": float("nan")}, "Settings(max_norm=nan): max_norm must be a finite number"),
        ({"weight_decay": -1}, "weight_decay=-1: give a number of 0 or more"),
        ({"seed": None}, "Settings(seed=None): seed must be an integer"),
        ({"zero": 2}, "zero=2 is not known; choose from 0, 1, 3"),
        ({"dtype": "int8"}, "dtype=int8 is not known; choose from float32, bfloat16, float16"),
    ],
)
def test_a_value_out_of_range_names_its_field(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        Settings(**settings)
    assert str(error.value) == said


@pytest.mark.parametrize(
    ("settings", "in_library", "in_command"),
    [
        ({"steps": 2, "epochs": 1.0}, "steps and epochs both set", "--steps and --epochs both set"),
        (
            {"lora": 4},
            "lora requires an existing model; pass model",
            "--lora requires an existing model; pass MODEL_FOLDER",
        ),
        (
            {"chunks": 2},
            "chunks=2 needs the interleaved schedule; give pipeline_schedule=interleaved too",
            "--chunks 2 needs the interleaved schedule; give --pipeline-schedule interleaved too",
        ),
        ({"hidden": 33}, "hidden=33 is odd", "--hidden 33 is odd"),
        ({"tokens": 90_000}, "or reduce tokens", "or reduce --tokens"),
        ({"pack": False}, "pack=True and pack=False apply", "--pack and --no-pack apply"),
        (
            {"limit_memory": 1000},
            "limit_memory 1000 B: a step needs",
            "--limit-memory 1000 B: a step needs",
        ),
        (
            {"limit_memory": 1000, "batch": 64},
            "batch=32, accumulate=2 saves",
            "--batch 32 --accumulate 2 saves",
        ),
        (
            {"limit_memory": 1000, "batch": 64},
            f"; limit_memory={4 * 2**20} would be enough",
            "; --limit-memory 4MiB would be enough",
        ),
    ],
)
def test_the_library_names_fields_and_the_command_flags(
    settings: dict[str, Any], in_library: str, in_command: str, text: Path, tmp_path: Path
) -> None:
    each = TINY | settings
    with pytest.raises((ConfigError, MemoryError)) as error:
        train(text, tmp_path / "run", **each)
    assert in_library in str(error.value)
    assert "--" not in str(error.value)
    flags = [f"--no-{n}" if v is False else f"--{n.replace('_', '-')}={v}" for n, v in each.items()]
    result = run("finetune", "--text", text, "--out", tmp_path / "run", *flags)
    assert_one_clear_error(result, in_command)


def test_a_path_that_looks_like_a_setting_stays_a_path(tmp_path: Path) -> None:
    path = tmp_path / "tokens=4 lora.txt"
    with pytest.raises(ConfigError) as error:
        Trainer(None, path, Settings(**TINY)).train()
    assert str(error.value).startswith(f"{path}: No such file")
    assert_one_clear_error(run("finetune", "--text", path), f"Error: {path}: No such file")
    assert named(lora=1) == "lora=1", "the style of the command ends with it"


def test_options_are_the_settings_in_their_groups() -> None:
    fields = {each.name: each for each in dataclasses.fields(Settings) if "group" in each.metadata}
    options = {each.name: each for each in finetune.params if isinstance(each, click.Option)}
    beside = {"data", "ignore", "config", "fitting", "profile", "quiet", "as_json"}
    assert options.keys() - fields.keys() == beside
    assert fields.keys() <= options.keys()
    for name, field in fields.items():
        assert options[name].default in (field.default, None), name
        assert options[name].group == field.metadata["group"]  # type: ignore[attr-defined]
        assert options[name].help
    page = run("finetune", "--help").output.splitlines()
    heads = [line.removesuffix(":") for line in page if line.endswith(":") and line[0] != " "]
    assert heads == [group.capitalize() for group in [*GROUPS, "other options"]]


# ---- what a Trainer takes -----------------------------------------------------------------------
TEXT: Any = Text("a.txt", None, BytesIO, 1, 1, "", "digest", "")


def test_arguments_and_settings_must_not_conflict() -> None:
    """One of them is enough, and equal ones are."""
    lora = Lora(2, alpha=4)
    whole = Settings(lora=2, lora_alpha=4)
    assert trainer._with(Settings(), lora, None, None, None) == whole
    assert trainer._with(whole, lora, None, None, None) == whole
    assert trainer._with(whole, None, None, None, None) == whole
    with pytest.raises(
        ConfigError, match=r"Trainer: lora=.* and the settings' .* differ; leave one"
    ):
        trainer._with(Settings(lora=3), lora, None, None, None)
    for wrong in (4, "16"):
        with pytest.raises(ConfigError, match=r"Trainer\(lora=.*\): pass Lora\(16\), or None"):
            trainer._with(Settings(), wrong, None, None, None)
    judged = Settings(method="grpo", reward=("a.py:f",))
    assert trainer._with(judged, None, "a.py:f", None, None) == judged
    assert tuple(trainer._with(Settings(), None, "a.py:f", None, None).reward) == ("a.py:f",)
    with pytest.raises(ConfigError, match=r"Trainer: reward=.* and the settings' .* differ"):
        trainer._with(judged, None, "b.py:f", None, None)
    assert trainer._with(Settings(eval=0.2), None, None, None, None).eval == 0.2
    assert trainer._with(Settings(eval=0.2), None, None, None, 0.3).eval == 0.3
    rows = trainer._with(
        Settings(), None, None, None, [{"prompt": "a", "completion": "b"}] * 2
    ).eval
    assert isinstance(rows, Records)
    assert len(rows.train) + len(rows.held_out) == 2


@pytest.mark.parametrize(
    ("asked", "device", "fits"),
    [
        (None, "cpu", True), ("auto", "cpu", True), ("cpu", "cpu", True), ("cuda", "cpu", False),
        ("cuda", "cuda:0", True), ("cuda:0", "cuda:0", True), ("cuda", "cuda:1", False),
        ("cuda:1", "cuda:1", True), ("cpu", "cuda:0", False), ("auto", "cuda:1", True),
    ],
)  # fmt: skip
def test_a_model_in_memory_has_its_place(asked: str | None, device: str, fits: bool) -> None:
    table: Any = np.zeros(1)
    if device != "cpu":
        table = SimpleNamespace(device=SimpleNamespace(id=int(device[-1])))
    model: Any = SimpleNamespace(table=table, folder=None)
    if fits:
        assert trainer._place(model, asked) == device
    else:
        said = f"Trainer: device={asked}, but the model is on {device}; load it with"
        with pytest.raises(ConfigError, match=said):
            trainer._place(model, asked)
    with pytest.raises(
        ConfigError, match="Trainer: the model has no folder, and no tokenizer; save"
    ):
        trainer._home(model)
    model.folder = Path("there")
    assert trainer._home(model) == Path("there")


def test_a_fingerprint_sees_names_and_bytes_of_arrays() -> None:
    a, b = np.arange(4, dtype=np.float32), np.ones((2, 3), np.float32)
    digests = [
        trainer.digest_of(parameters)["sha256"]
        for parameters in ({"a": a, "b": b}, {"a": a, "c": b}, {"a": a, "b": b + 1}, {"a": a})
    ]
    assert len({*digests}) == 4
    expected = hashlib.sha256(b"a" + a.tobytes() + b"b" + b.tobytes()).hexdigest()
    assert digests[0] == expected
    strided = {"a": np.arange(8, dtype=np.float32)[::2], "b": b.T.copy().T}
    strided["a"][...] = a
    assert trainer.digest_of(strided)["sha256"] == expected


def test_a_run_takes_its_settings_from_the_run_before(text: Path, tmp_path: Path) -> None:
    """Those that it has not been given, on each rank."""
    heard = Recorder()
    made = Trainer(None, text, Settings(**TINY, out=tmp_path / "run"), listener=heard)
    with hearing(heard):
        made._resume(TEXT)
        assert (made.settings.lr, heard.events) == (None, [])
        known = {"lr": 0.5, "seed": 3, "dtype": "bfloat16", "steps": 7, "text": "other"}
        made.files = SimpleNamespace(known=lambda: known)  # type: ignore[assignment]
        made._resume(TEXT)
        said = "settings taken from the earlier run: lr 0.5, seed 3, steps 7"
        assert heard.events == [("announce", said)]
        chosen = made.settings
        assert (chosen.lr, chosen.seed, chosen.dtype, chosen.steps) == (0.5, 3, "bfloat16", 7)
        made._resume(TEXT)
        assert made.settings == chosen
        assert len(heard.events) == 1
        made.settings = Settings(**TINY)
        made.ranks.first = False
        made._resume(TEXT)
        assert made.settings == Settings(**TINY), "rank 0 reads them, and sends them to others"
        made.ranks.first = True
        known["warmup"] = 1.5
        with pytest.raises(ConfigError, match=r"warmup=1\.5: pass a whole number"):
            made._resume(TEXT)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"quiet": 1}, "Trainer(quiet=1): pass True or False"),
        ({"settings": {"steps": 2}}, "Trainer(settings={'steps': 2}): pass Settings(...), or None"),
        ({"listener": print}, "Trainer: listener=<built-in function print> is no Listener; derive"),
        ({"data": TEXT, "ignore": ["id"]}, "Trainer(ignore=) is for files; give it to read_data"),
        ({"settings": Settings(method="dpo")}, "method=dpo requires an existing model; pass model"),
    ],
)  # fmt: skip
def test_what_a_trainer_does_not_take(values: Any, said: str, text: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        Trainer(None, **{"data": text} | values)
