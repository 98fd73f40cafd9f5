"""Ranks that share no folder: each has a home and a working folder of its own.

Each rank runs in a network namespace with an address of its own; where the system does not allow
namespaces, both run on 127.0.0.1.
"""

import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from unsloth_cupy import files
from unsloth_cupy.errors import CommunicationError, ConfigError
from unsloth_cupy.finetune.run import folder_copy
from unsloth_cupy.finetune.run.folder_copy import FolderCopy
from unsloth_cupy.finetune.run.ranks import Ranks
from unsloth_cupy.finetune.run.run_folder import RunFolder, sampled_digest
from unsloth_cupy.models import create
from unsloth_cupy.parallel import SingleCommunicator
from unsloth_cupy.parallel.grid import Grid

from . import slurm
from .grids import MIXTURE
from .namespaces import Network, allowed, namespaces
from .ranks import ROOT, THREADS, Ended, by_sockets, free_port, needs_mpi
from .slurm import wait
from .test_finetune import SIZES, WHOLE, equal, invoke
from .threads import by_threads

PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
CHATS = "\n".join(
    json.dumps({"prompt": f"{i} and {i * i}", "completion": f" are {i}."}) for i in range(60)
)
TEXT = "\n\n".join(f"{i} and {i * i} are numbers." for i in range(120))


@pytest.fixture
def nodes(tmp_path: Path) -> list[Path]:
    """Return the working folders of two nodes; each has the data."""
    folders = [tmp_path / f"node{number}" for number in range(2)]
    for folder in folders:
        folder.mkdir()
        (folder / "numbers.txt").write_text(TEXT)
    return folders


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """Return the network of two nodes; without namespaces, both are this machine."""
    with namespaces() if allowed() else nullcontext(Network()) as both:
        yield both


def files_in(folder: Path) -> dict[str, bytes]:
    """Return the content of all files in a folder and in the folders in it."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def ranks_of(comm: Any) -> Ranks:
    one = SingleCommunicator()
    return Ranks(comm, Grid(comm, one, one, one, one))


@pytest.mark.parametrize("disks", ["aabb", "abbb", "abab", "aaaa", "abcd"])
def test_each_disk_has_one_copy(
    disks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of any size, in folders, and none that is stale; a common folder has no copy."""
    monkeypatch.setattr(folder_copy, "BLOCK", 1000)
    run = tmp_path / "a" / "run"
    draw = np.random.default_rng(0)
    for name, size in {"log.jsonl": 0, "b/config.json": 10, "b/c/w.safetensors": 2500}.items():
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_bytes(draw.bytes(size))
    for disk in {*disks} - {"a"}:
        stale = tmp_path / disk / ".run-copy"
        stale.mkdir(parents=True)
        (stale / "log.jsonl").write_text("of a killed run")

    def rank(comm: Any) -> tuple[bool, list[dict[str, bytes]]]:
        copy = FolderCopy(RunFolder(tmp_path / disks[comm.rank] / "run"), ranks_of(comm))
        seen = []
        with copy.locked():
            for names, weights in ((["log.jsonl", "b", "absent"], False), (["b"], True)):
                copy.bring(*names, weights=weights)
                seen.append(files_in(copy.run.folder))
                comm.barrier()
            copy.drop("b") if copy.copies else None
            comm.barrier()
            seen.append(files_in(copy.run.folder))
        return copy.writes, seen

    every = by_threads(4, rank)
    whole = files_in(run)
    assert [writes for writes, _ in every].count(True) == len({*disks} - {"a"})
    for disk, (_, seen) in zip(disks, every, strict=True):
        without = {name: text for name, text in whole.items() if "safetensors" not in name}
        assert seen[1] == whole
        if disk == "a":
            assert seen[0] == whole
            assert seen[2] == whole
        else:
            assert seen[0] == without
            assert seen[2].keys() == {"log.jsonl"}
    assert not [*tmp_path.glob("*/*.partial"), *run.glob("*.partial")]


def test_a_copy_makes_the_folders_above_it(tmp_path: Path) -> None:
    """The folder of a run, such as runs/first, need not exist on other nodes."""
    (tmp_path / "a" / "runs" / "first").mkdir(parents=True)
    (tmp_path / "a" / "runs" / "first" / "log.jsonl").write_text("a line")

    def rank(comm: Any) -> str:
        folder = tmp_path / "ab"[comm.rank] / "runs" / "first"
        copy = FolderCopy(RunFolder(folder), ranks_of(comm))
        with copy.locked():
            copy.bring("log.jsonl")
            return (copy.run.folder / "log.jsonl").read_text()

    assert by_threads(2, rank) == ["a line", "a line"]


def test_a_copy_needs_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is an error before anything is written; the copy that is there stays."""
    for name in "ab":
        (tmp_path / name / "run").mkdir(parents=True)
    (tmp_path / "a" / "run" / "log.jsonl").write_bytes(bytes(1000))

    def rank(comm: Any) -> None:
        copy = FolderCopy(RunFolder(tmp_path / "ab"[comm.rank] / "run"), ranks_of(comm))
        with copy.locked():
            copy.bring("log.jsonl")

    monkeypatch.setattr(files.shutil, "disk_usage", lambda _: SimpleNamespace(free=999))
    with pytest.raises(ConfigError, match=r"the copy of rank 0's run needs .* make room"):
        by_threads(2, rank)
    assert not [*(tmp_path / "b").rglob("log.jsonl")]


@pytest.mark.parametrize(
    ("name", "own", "theirs"), [("data", "648 rows", "552 rows"), ("lr", 1e-4, 2e-4)]
)
def test_facts_that_differ_are_named(name: str, own: Any, theirs: Any) -> None:
    def rank(comm: Any) -> str:
        facts = {"version": "1", name: own if comm.rank == 2 else theirs}
        try:
            ranks_of(comm).check_equal(facts)
        except ConfigError as error:
            return str(error)
        return ""

    first, other, last = by_threads(3, rank)
    assert (first, other) == ("", "")
    assert last.startswith(f"{name} is {own} in rank 2 on ")
    assert f", but {theirs} in rank 0; all ranks need the same options" in last


def test_exchanges_are_compared_in_a_block() -> None:
    """With ``comparing``, a call of another shape is an error; later calls are not compared."""

    def rank(comm: Any) -> str:
        comm.checked = False
        ranks, size = ranks_of(comm), 2 + (comm.rank == 1)
        try:
            with ranks.comparing():
                ranks.data.all_reduce(np.ones(size))
        except CommunicationError as error:
            return f"{error} {comm.checked}"
        return "no error"

    for text in by_threads(3, rank):
        assert "is not the same on all ranks: rank 0: all_reduce(x(2,)" in text
        assert text.endswith(" False")


def test_a_sampled_digest_sees_other_weights(tmp_path: Path) -> None:
    """Other bytes anywhere in a trained tensor, other names and other sizes."""
    draw, digests = np.random.default_rng(0), set()
    weights = draw.bytes(2**20)
    middle = b"".join((weights[: 2**19], bytes(64), weights[2**19 + 64 :]))
    for change in (weights, weights[:-1], bytes(2**20), weights[::-1], middle):
        (tmp_path / "model.safetensors").write_bytes(change)
        digests.add(sampled_digest(tmp_path))
    (tmp_path / "model.safetensors").rename(tmp_path / "model-2.safetensors")
    digests.add(sampled_digest(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    digests.add(sampled_digest(tmp_path))
    assert len(digests) == 7


def new_run(folder: Path) -> None:
    """Train a new small model on the numbers, in the folder ``new``."""
    (folder / "numbers.txt").write_text(TEXT)
    sizes = (*SIZES[:12], "--steps", "2", "--out", str(folder / "new"))
    done = invoke("finetune", "--text", str(folder / "numbers.txt"), *sizes)
    assert done.exit_code == 0, done.output


def equal_runs(run: Path, other: Path) -> None:
    """Assert that two runs end in the same bits of weights and states, in one file or in parts."""
    actual, expected = (arrays_of(each) for each in (run, other))
    assert actual.keys() == expected.keys()
    assert expected
    for name, array in expected.items():
        np.testing.assert_array_equal(actual[name], array)


def arrays_of(run: Path) -> dict[str, Any]:
    """Return the arrays of a run by folder, kind of file and name."""
    arrays = dict[str, Any]()
    for path in run.rglob("*.safetensors"):
        kind = re.sub(r"-\d+-of-\d+", "", path.relative_to(run).as_posix())
        own = {f"{kind} {name}": array for name, array in load_file(path).items()}
        assert not own.keys() & arrays.keys()
        arrays |= own
    return arrays


@pytest.fixture
def on_nodes(nodes: list[Path], network: Network) -> Callable[..., list[Ended]]:
    """Return a function that runs commands in a rank per node; each has its own folder and home."""
    return partial(by_sockets, len(nodes), WHOLE, places=nodes, network=network, limit=240)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        *("--data-parallel 2", "--pipeline-parallel 2", "--zero 3"),
        *("--keep-best --data-parallel 2", "--pipeline-parallel 2 in parts", "--zero 3 in parts"),
    ],
)
def test_a_killed_run_goes_on_where_nothing_is_shared(
    options: str, nodes: list[Path], on_nodes: Any, tmp_path: Path
) -> None:
    """Weights and states reach the other node through rank 0; the bits are those of one run.

    In parts, only rank 0 sees the folder; it writes a part of all arrays.
    """
    grid, _, in_parts = options.partition(" in ")
    command = ("finetune", "--text", "numbers.txt", "--out", "run", *SIZES, *grid.split())
    more = ("parts", "--") if in_parts else ()
    ended = on_nodes(*more, "killed", "--", *command)
    assert [each.code for each in ended] == [1, -signal.SIGKILL], ended
    assert not (nodes[1] / "run").exists()
    ended = on_nodes(*more, *command)
    assert [each.code for each in ended] == [0, 0], ended
    assert "resuming from" in ended[0].said
    assert bool([*nodes[0].rglob("optimizer-00001-of-00001.safetensors")]) is bool(in_parts)
    assert not ended[1].said
    assert {path.name for path in nodes[1].iterdir()} <= {"numbers.txt", "home"}
    (tmp_path / "numbers.txt").write_text(TEXT)
    whole = by_sockets(2, WHOLE, *more, *command, places=[tmp_path] * 2, limit=240)
    assert [each.code for each in whole] == [0, 0], whole
    equal_runs(nodes[0] / "run", tmp_path / "run")
    ended = on_nodes(*command)  # a finished run
    assert [each.code for each in ended] == [0, 0], ended
    assert "is finished" in ended[0].said


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpo", "grpo"])
def test_other_methods_where_nothing_is_shared(
    method: str, nodes: list[Path], on_nodes: Any, tmp_path: Path
) -> None:
    """The reference, rewards and sampled answers of a run are those of one folder."""
    pairs = [{"prompt": f"{i} and", "chosen": f" {i * i}", "rejected": " no"} for i in range(40)]
    rows = pairs if method == "dpo" else [{"prompt": each["prompt"]} for each in pairs]
    reward = "def even(completions, **more):\n    return [len(each) % 2 for each in completions]\n"
    for folder in (*nodes, tmp_path):
        (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (folder / "rewards.py").write_text(reward)
    new_run(tmp_path)
    for folder in nodes:
        shutil.copytree(tmp_path / "new" / "model", folder / "base")
    shutil.copytree(tmp_path / "new" / "model", tmp_path / "base")
    usual = (
        "finetune base --data rows.jsonl --out run --data-parallel 2 --lora 2 --batch 2 --method"
    )
    more = {
        "dpo": "--steps 2 --evaluate-every 1 --patience 1 --min-delta 9",
        "grpo": "--steps 2 --reward rewards.py:even --samples 2 --max-new-tokens 4",
    }
    command = (*usual.split(), method, *more[method].split())
    ended = on_nodes(*command)
    assert [each.code for each in ended] == [0, 0], ended
    assert not ended[1].said
    whole = by_sockets(2, WHOLE, *command, places=[tmp_path] * 2, limit=240)
    assert [each.code for each in whole] == [0, 0], whole
    equal_runs(nodes[0] / "run", tmp_path / "run")


@pytest.mark.slow
def test_the_number_of_nodes_may_change(
    nodes: list[Path], on_nodes: Any, network: Network, tmp_path: Path
) -> None:
    """A run of two nodes stops after SIGTERM to one of them, and goes on with one node, or two."""
    command = ("finetune", "--text", "numbers.txt", "--out", "run", *SIZES, "--save-every", "99")
    two = (*command, "--zero", "1", "--data-parallel", "2")
    ended = on_nodes("stopped", "--", *two)
    assert [each.code for each in ended] == [128 + signal.SIGTERM] * 2, ended
    assert "stopped after step 3, which is saved in run" in ended[0].said
    shutil.copytree(nodes[0] / "run", tmp_path / "run")
    (ended,) = by_sockets(1, WHOLE, *command, places=nodes[:1], network=network, limit=240)
    assert ended.code == 0, ended
    assert "resuming from" in ended.said
    shutil.move(nodes[0] / "run", tmp_path / "one")
    shutil.move(tmp_path / "run", nodes[0] / "run")
    ended = on_nodes(*two)
    assert [each.code for each in ended] == [0, 0], ended
    assert "resuming from" in ended[0].said
    (tmp_path / "numbers.txt").write_text(TEXT)
    whole = by_sockets(2, WHOLE, *two, places=[tmp_path] * 2, limit=240)
    assert [each.code for each in whole] == [0, 0], whole
    equal_runs(nodes[0] / "run", tmp_path / "run")
    weights = (
        load_file(tmp_path / each / "model" / "model.safetensors") for each in ("one", "run")
    )
    equal(*weights)


@pytest.mark.slow
def test_experts_generate_and_merge_where_nothing_is_shared(
    nodes: list[Path], on_nodes: Any, tmp_path: Path
) -> None:
    """Each node has half of the experts; the merged model writes the same text on two nodes."""
    new_run(tmp_path)
    create(MIXTURE, seed=0).save(tmp_path / "base")
    shutil.copy(tmp_path / "new" / "model" / "tokenizer.json", tmp_path / "base")
    for folder in nodes:
        shutil.copytree(tmp_path / "base", folder / "base")
    sizes = ("--batch", "4", "--tokens", "16", "--steps", "2", "--lr", "0.01")
    command = ("finetune", "base", "--text", "numbers.txt", *sizes, "--lora", "2", "--out", "run")
    ended = on_nodes(*command, "--expert-parallel", "2")
    assert [each.code for each in ended] == [0, 0], ended
    whole = by_sockets(
        2, WHOLE, *command, "--expert-parallel", "2", places=[tmp_path] * 2, limit=240
    )
    assert [each.code for each in whole] == [0, 0], whole
    equal_runs(nodes[0] / "run", tmp_path / "run")
    done = invoke("merge", str(nodes[0] / "run"), str(nodes[0] / "merged"))
    assert done.exit_code == 0, done.output
    words = ("generate", "merged", "7 and", "--max-new-tokens", "8", "--temperature", "0")
    ended = on_nodes(*words, "--tensor-parallel", "2")
    assert [each.code for each in ended] == [1, 1], ended
    assert "merged" in ended[1].said.splitlines()[-1]
    shutil.copytree(nodes[0] / "merged", nodes[1] / "merged")
    ended = on_nodes(*words, "--tensor-parallel", "2")
    assert [each.code for each in ended] == [0, 0], ended
    expected = invoke(words[0], str(nodes[0] / "merged"), *words[2:]).output
    assert expected.split("8 tokens in")[0] in ended[0].said


@pytest.mark.slow
@pytest.mark.skipif(not allowed(), reason="needs root and network namespaces")
def test_a_node_that_disappears_is_named(nodes: list[Path]) -> None:
    """The link is cut without a message: the other node ends within half a minute."""
    command = ("finetune", "--text", "numbers.txt", "--out", "run", *SIZES, "--data-parallel", "2")
    with namespaces() as network:
        program = partial(by_sockets, 2, WHOLE, places=nodes, network=network, limit=120)
        with ThreadPoolExecutor() as pool:
            running = pool.submit(program, *command, "--steps", "100000")
            log = nodes[0] / "run" / "log.jsonl"
            wait("a step", lambda: log.exists() and '"step"' in log.read_text(), 60)
            network.cut()
            start = time.monotonic()
            ended = running.result()
    assert [each.code for each in ended] == [1, 1], ended
    assert time.monotonic() - start < 60
    assert "10.77.0.2" in ended[0].said


@pytest.mark.slow
@pytest.mark.parametrize("text", [TEXT[:2000], None])
def test_a_node_with_other_data_is_named_before_a_step(
    text: str | None, nodes: list[Path], on_nodes: Any
) -> None:
    """All ranks end, with one sentence of the rank whose data differ or are missing."""
    (nodes[1] / "numbers.txt").unlink() if text is None else (nodes[1] / "numbers.txt").write_text(
        text
    )
    command = ("finetune", "--text", "numbers.txt", "--out", "run", *SIZES, "--data-parallel", "2")
    ended = on_nodes(*command)
    assert [each.code for each in ended] == [1, 1], ended
    named = "data is 2,000 bytes" if text else "numbers.txt"
    assert named in ended[1].said.splitlines()[-1]
    assert not (nodes[0] / "run").exists()


PAGE = Path(__file__).parents[2] / "docs" / "guide" / "two-machines.md"
TORCHRUN, SLURM, MPI = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.S)


# hydra calls this program as ssh, with options, the address of a node, and a command for a shell.
ENTER = """#!/usr/bin/env bash
while [ "${1#-}" != "$1" ]; do shift; done
host=$1; shift
case $host in *.1) exec %s bash -c "$*" ;; *) exec %s bash -c "$*" ;; esac
"""


def commands(
    block: str, nodes: list[Path], network: Network, more: str = "--steps 2", **others: str
) -> list[subprocess.Popen[str]]:
    """Start a block of the page in each folder, as a shell on each machine does."""
    key, port = secrets.token_hex(16), str(free_port())
    block = block.replace("AUTHKEY=...", f"AUTHKEY={key}").replace("29400", port)
    block = block.replace("--out run", f"--out run --layers 1 --hidden 32 --vocabulary 300 {more}")
    second = "127.0.0.1" if network.address == "127.0.0.1" else "10.77.0.2"
    place = {"FIRST": network.address, "SECOND": second, "PATH": PATH} | others
    started = []
    for number, folder in enumerate(nodes):
        folder.mkdir(exist_ok=True)
        (folder / "chats.jsonl").write_text(CHATS)
        own = {"HOME": str(folder / "home"), "NODE": str(number)}
        started.append(
            subprocess.Popen(
                [*network.enter[number], "bash", "-ec", block],
                cwd=folder, env=os.environ | THREADS | place | own, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )
        )  # fmt: skip
    return started


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("torchrun", path=PATH) is None, reason="needs torchrun")
def test_the_page_starts_two_machines_with_torchrun(nodes: list[Path], network: Network) -> None:
    started = commands(TORCHRUN, nodes, network)
    outputs = [each.communicate(timeout=240)[0] for each in started]
    assert [each.returncode for each in started] == [0, 0], outputs
    assert (nodes[0] / "run" / "model").is_dir()
    assert not (nodes[1] / "run").exists()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("torchrun", path=PATH) is None, reason="needs torchrun")
def test_torchrun_restarts_a_run_that_lost_a_rank(tmp_path: Path) -> None:
    """It ends in the bits of an unbroken run."""
    (tmp_path / "numbers.txt").write_text(TEXT)
    command = ["finetune", "--text", "numbers.txt", *SIZES, "--data-parallel", "2", "--out"]
    launcher = ["torchrun", "--standalone", "--nproc-per-node", "2", "--max-restarts", "3", "-m"]
    done = subprocess.run(
        [*launcher, WHOLE, "lost", "--", *command, "run"],
        cwd=tmp_path, env=os.environ | THREADS | {"PATH": PATH, "PYTHONPATH": str(ROOT)},
        timeout=300, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "resuming from" in done.stderr
    whole = by_sockets(2, WHOLE, *command, "whole", places=[tmp_path] * 2, limit=240)
    assert [each.code for each in whole] == [0, 0], whole
    equal_runs(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
@needs_mpi
def test_the_page_starts_two_machines_with_mpiexec(
    nodes: list[Path], network: Network, tmp_path: Path
) -> None:
    (process,) = commands(MPI, nodes[:1], network, **by_entering(network, tmp_path / "enter"))
    output = process.communicate(timeout=240)[0]
    assert process.returncode == 0, output
    assert (nodes[0] / "run" / "model").is_dir()


def by_entering(network: Network, program: Path) -> dict[str, str]:
    """Return variables with which hydra enters the namespaces of nodes, in place of ssh."""
    if not network.name:
        return {}
    program.write_text(ENTER % tuple(map(shlex.join, network.enter)))
    program.chmod(0o755)
    launcher = {"HYDRA_LAUNCHER": "ssh", "HYDRA_LAUNCHER_EXEC": str(program)}
    # UCX takes processes with one boot id for processes of one machine.
    return launcher | {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp"}


@pytest.mark.slow
@pytest.mark.skipif(not slurm.installed(), reason="needs root, and Slurm with munge")
def test_slurm_requeues_the_page_s_job(tmp_path: Path) -> None:
    """A job that is requeued saves after SIGTERM, and goes on to the bits of an unbroken run."""
    (tmp_path / "slurm").mkdir()
    (tmp_path / "job").mkdir()
    (tmp_path / "whole").mkdir()
    small = "--steps 40 --layers 1 --hidden 32 --vocabulary 300 --save-every 1000"
    block = SLURM.replace("AUTHKEY=...", f"AUTHKEY={secrets.token_hex(16)}")
    block = block.replace("--out run", f"--out run {small}")
    with slurm.cluster(tmp_path / "slurm") as variables:
        environment = variables | THREADS | {"PATH": f"{PATH}:{slurm.PATH}"}

        def finished(folder: Path, requeue: bool) -> Path:
            (folder / "job.sh").write_text(block)
            (folder / "chats.jsonl").write_text(CHATS)
            run = partial(
                subprocess.run, cwd=folder, env=environment, timeout=60,
                capture_output=True, text=True, check=True,
            )  # fmt: skip
            words = "sbatch --parsable --requeue --output out.txt --open-mode append job.sh"
            job = run(words.split()).stdout.strip()
            log = folder / "run" / "log.jsonl"
            if requeue:
                wait("a step", lambda: log.exists() and '"step"' in log.read_text(), 120)
                run(["scontrol", "requeue", job])
            wait("the run", (folder / "run" / "model" / "config.json").exists, 240)
            return folder / "run"

        run, whole = finished(tmp_path / "job", True), finished(tmp_path / "whole", False)
        assert "resuming from" in (tmp_path / "job" / "out.txt").read_text()
        equal_runs(run, whole)
