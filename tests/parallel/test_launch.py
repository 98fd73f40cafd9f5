"""Ranks as people start them: what launchers set, and one sentence for each way to go wrong."""

import itertools
import random
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pytest

from unsloth_cupy.errors import CommunicationError, ConfigError
from unsloth_cupy.parallel import SocketCommunicator, _meeting, _peers
from unsloth_cupy.parallel._authkey import AUTHKEY
from unsloth_cupy.parallel._meeting import MAGIC, RUN, listed
from unsloth_cupy.parallel._peers import Peers, head_of
from unsloth_cupy.parallel.nccl import local_rank
from unsloth_cupy.parallel.sockets import first_host, rendezvous, run_of

from .ranks import free_port, needs_mpi
from .ranks import run as by_mpi

TORCHRUN = {
    "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
    "GROUP_WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
SRUN = {
    "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_NODEID": "1",
    "SLURM_STEP_NODELIST": "rack[0-1]node[0-3]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0",
}  # fmt: skip
SHELL = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "9", "MPI_LOCALNRANKS": "1"}
IN_SCRIPT = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "17"}


def outcomes(*works: Callable[[], Any]) -> list[Any]:
    """Run functions in threads, and return what each returned, or the text of its error."""
    results: list[Any] = [None] * len(works)

    def run(index: int) -> None:
        try:
            results[index] = works[index]()
        except CommunicationError as error:
            results[index] = str(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a rank does not end"
    return results


def rank(
    number: int, size: int, port: int, after: float = 0.0, value: int = 0, **options: Any
) -> Callable[[], Any]:
    """Return the work of a rank: what it gathers, with ``value`` added to ten times its number."""

    def work() -> Any:
        time.sleep(after)
        options.setdefault("timeout", 20)
        comm = SocketCommunicator(number, size, port=port, **options)
        return comm.all_gather(np.array([10 * number + value])).tolist()

    return work


def in_turn(*works: Callable[[], Any]) -> list[Callable[[], Any]]:
    """Return works of which each begins when the one before has ended, also with an error."""
    ends = [threading.Event() for _ in works]

    def work(index: int) -> Any:
        try:
            if index:
                ends[index - 1].wait(20)
            return works[index]()
        finally:
            ends[index].set()

    return [partial(work, index) for index in range(len(works))]


# What launchers set.


def test_each_launcher_says_who_and_where() -> None:
    assert rendezvous(TORCHRUN) == (1, 4, "node0", 29401), "torchrun listens at its own port"
    assert rendezvous(SRUN) == (1, 2, "rack0node0", 20017)
    assert rendezvous(SHELL) == (1, 2, "node0", 29500)
    assert rendezvous(HYDRA | {"MASTER_ADDR": "a", "MASTER_PORT": "5"}) == (1, 2, "a", 5)
    with pytest.raises(ConfigError, match=r"PMI_RANK=1.*use MpiCommunicator\(\)"):
        rendezvous(HYDRA)


@pytest.mark.parametrize(
    ("outer", "inner", "expected"),
    [
        # srun starts one torchrun on each node, which starts several processes
        (SRUN, TORCHRUN, (1, 4, "node0", 29401)),
        (SRUN, TORCHRUN | {"RANK": "0", "WORLD_SIZE": "2"}, (0, 2, "127.0.0.1", 29401)),
        (SRUN, SHELL | {"RANK": "3", "WORLD_SIZE": "8"}, (3, 8, "node0", 29500)),
        # a script sets the variables of torchrun from Slurm's, or some of them for all ranks
        (SRUN, SHELL, (1, 2, "node0", 29500)),
        (SRUN, {"WORLD_SIZE": "2", "MASTER_PORT": "7"}, (1, 2, "rack0node0", 7)),
        # a loop in a batch script or an interactive shell, whose task is always 0
        (IN_SCRIPT, SHELL, (1, 2, "node0", 29500)),
        (IN_SCRIPT | {"SLURM_STEP_ID": "4294967290"}, SHELL, (1, 2, "node0", 29500)),
        # mpiexec starts its own processes on nodes by srun
        (SRUN | {"SLURM_PROCID": "0"}, HYDRA | {"MASTER_ADDR": "a"}, (1, 2, "a", 20017)),
        (HYDRA, TORCHRUN, (1, 4, "node0", 29401)),
    ],
)
def test_the_inner_launcher_counts(outer: Any, inner: Any, expected: tuple[object, ...]) -> None:
    assert rendezvous(outer | inner) == expected


@pytest.mark.parametrize(
    ("variables", "names"),
    [
        (SRUN | SHELL | {"RANK": "0"}, ("RANK=0", "SLURM_PROCID=1")),
        (SRUN | {"RANK": "0"}, ("RANK=0", "SLURM_PROCID=1")),
        (SRUN | {"WORLD_SIZE": "4"}, ("WORLD_SIZE=4", "SLURM_NTASKS=2")),
        (SRUN | {"RANK": "0", "WORLD_SIZE": "4"}, ("RANK=0", "SLURM_PROCID=1")),
        (IN_SCRIPT | {"RANK": "1", "WORLD_SIZE": "2"}, ("RANK=1", "SLURM_PROCID=0")),
        (HYDRA | SHELL | {"RANK": "0"}, ("RANK=0", "PMI_RANK=1")),
        (
            SHELL | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
            ("RANK=1", "OMPI_COMM_WORLD_RANK=0"),
        ),
    ],
)
def test_two_launchers_that_contradict_each_other(
    variables: dict[str, str], names: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = f"{names[0]} of .* and {names[1]} of .* contradict each other; unset RANK"
    with pytest.raises(ConfigError, match=both):
        rendezvous(variables)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=both):
        SocketCommunicator.from_environment(timeout=1)


def test_every_step_has_a_port_and_an_identity() -> None:
    steps = [
        SRUN | {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}
        for job, step in itertools.product(range(4000, 4010), range(100))
    ]
    ports = [rendezvous(step)[3] for step in steps]
    assert len({*ports}) == len(ports), "steps of jobs that run at the same time meet"
    assert {*ports} <= {*range(20000, 32000)}
    assert len({run_of(step) for step in steps}) == len(steps)


def test_the_identity_of_a_run() -> None:
    assert run_of(SRUN) == "Slurm job 17, step 0, attempt 0"
    assert run_of(SRUN | {"SLURM_RESTART_COUNT": "2"}) == "Slurm job 17, step 0, attempt 2"
    assert run_of(SRUN | SHELL) == run_of(SRUN), "a script that sets RANK from Slurm's variables"
    for other in (SHELL, IN_SCRIPT | SHELL, SRUN | SHELL | {"WORLD_SIZE": "8"}, HYDRA):
        assert run_of(other) == "", "ranks may belong to several steps"
    alone = TORCHRUN | {"GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "3"}
    assert run_of(alone) == "torchrun none, attempt 3"
    assert run_of(SRUN | alone) == run_of(alone)
    # an agent has its own number of restarts: it may differ on two nodes of one attempt
    assert run_of(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "3"}) == run_of(TORCHRUN)
    for run in (str(uuid.uuid4()), "x" * 500, "a\nb", "\u20ac" * 40):
        identity = run_of(TORCHRUN | {"TORCHELASTIC_RUN_ID": run})
        assert run not in identity, "it may be the key"
        assert re.fullmatch("torchrun [0-9a-f]{8}", identity)
        assert identity != run_of(TORCHRUN | {"TORCHELASTIC_RUN_ID": run + "y"})


def expanded(nodes: str) -> Iterator[str]:
    """Yield the hosts of a list of Slurm, by its grammar: items, texts and brackets in turn."""
    for item in re.findall(r"(?:[^][,]|\[[^][]*\])+", nodes):
        parts: list[list[str]] = []
        for text, brackets in re.findall(r"([^][]+)|\[([^][]*)\]", item):
            numbers: list[str] = [text] if text else []
            for each in brackets.split(",") if brackets else ():
                low, _, high = each.partition("-")
                last = int(high or low)
                numbers += [f"{n:0{len(low)}d}" for n in range(int(low), last + 1)]
            parts.append(numbers)
        yield from map("".join, itertools.product(*parts))


def hostlist(rng: random.Random) -> str:
    """Return a random list of hosts in Slurm's notation."""

    def numbers() -> str:
        low, width = rng.choice((0, 1, 7, 9, 98, 998)), rng.choice((1, 2, 4))
        high = f"-{low + rng.randint(1, 5):0{width}d}" if rng.random() < 0.7 else ""
        return f"{low:0{width}d}{high}"

    def text() -> str:
        return rng.choice(("n", "gpu-", "rack2", "-ib", ".site.org", "10.0.0.", "a-1-b"))

    def item() -> str:
        result = text()
        for _ in range(rng.randint(0, 3)):
            result += f"[{','.join(numbers() for _ in range(rng.randint(1, 3)))}]"
            result += text() if rng.random() < 0.5 else ""
        return result

    return ",".join(item() for _ in range(rng.randint(1, 4)))


def test_the_first_host_is_the_first_of_all_hosts() -> None:
    assert [*expanded("a[0-1]b[08-10,3]-c,d")] == [
        *(f"a{rack}b{node}-c" for rack in (0, 1) for node in ("08", "09", "10", "3")),
        "d",
    ]
    rng = random.Random(0)
    for nodes in (hostlist(rng) for _ in range(2000)):
        assert first_host(nodes) == next(expanded(nodes)), nodes
    assert first_host("row[0-1,[4-5]]x[2]") == "row0x2"
    assert first_host("row[[4-5],9]x") == "row4x"
    assert first_host("") == ""


def free_pair() -> range:
    """Return two free ports, one after the other."""
    for port in range(21000, 31000, 2):
        with suppress(OSError):
            return range(free_port([port]), free_port([port + 1]) + 1)
    raise OSError("no two ports are free")


# What can go wrong: one sentence each, and all ranks end.


@pytest.mark.parametrize("port_of_all", [False, True])
def test_steps_of_a_job_do_not_mix(
    port_of_all: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps start at once; rank 1 of each calls when rank 0 of the other is there."""
    monkeypatch.setattr("unsloth_cupy.parallel.sockets.PORTS", free_pair())
    port = str(free_port())

    def work(step: int, number: int, after: float) -> Callable[[], Any]:
        variables = SRUN | {"SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_STEP_ID": str(step)}
        variables |= {"SLURM_PROCID": str(number)}
        variables |= {"MASTER_PORT": port} if port_of_all else {}
        number, size, _, place = rendezvous(variables)
        return rank(number, size, place, after, 100 * step, run=run_of(variables))

    if not port_of_all:
        works = work(0, 0, 0), work(1, 1, 0.2), work(1, 0, 0.5), work(0, 1, 0.7)
        actual = outcomes(*works)
        assert actual == [[0, 10], [100, 110], [100, 110], [0, 10]]
        return
    first, stranger, own = outcomes(work(0, 0, 0), *in_turn(work(1, 1, 0), work(0, 1, 0)))
    assert first == own == [0, 10], "it waited for its own rank"
    place = f"127.0.0.1:{port}"
    sentence = "rank 1 at 127.0.0.1 belongs to another run (Slurm job 17, step 1, attempt 0)"
    sentence += f" than rank 0 at {place} (Slurm job 17, step 0, attempt 0)"
    assert sentence in stranger
    assert sentence in capsys.readouterr().err


def test_another_key_is_named_at_once_and_the_right_rank_is_awaited(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    port, keys = free_port(), threading.local()
    monkeypatch.setattr(_meeting, "authkey", lambda: getattr(keys, "own", b"secret of rank 0"))

    def stranger() -> Any:
        keys.own = b"another secret"
        return rank(1, 2, port)()

    first, other, own = outcomes(rank(0, 2, port), *in_turn(stranger, rank(1, 2, port)))
    assert first == own == [0, 10], "the stranger ends before rank 0 does"
    assert f"its key differs from the key of the process at 127.0.0.1:{port}" in other
    said = capsys.readouterr().err
    assert said.count("rank 0: a process at 127.0.0.1 has another key, and was refused") == 1
    for text in (other, said):
        assert f"set {AUTHKEY} to the same secret in all ranks, or copy ~/.config" in text
        assert "secret of" not in text
        assert "another secret" not in text


@pytest.mark.parametrize(
    ("size", "started", "names"),
    [(2, (), "rank 1"), (4, (1,), "ranks 2 and 3"), (7, (3,), "ranks 1, 2 and 4-6")],
)
def test_ranks_that_do_not_come_are_named(
    size: int,
    started: tuple[int, ...],
    names: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a line after a while, in the next lines at doubled times, and in the error."""
    monkeypatch.setattr(_meeting, "NOTICE", 0.3)
    port = free_port()
    first, *others = outcomes(
        rank(0, size, port, timeout=2), *(rank(number, size, port) for number in started)
    )
    place = f"{names} of {size}"
    assert f"rank 0: {place} did not connect to 127.0.0.1:{port} within 2 s" in first
    lines = capsys.readouterr().err.splitlines()
    expected = f"rank 0: waiting for {place} at 127.0.0.1:{port}"
    assert 2 <= lines.count(expected) <= 3, "0.3, 0.6 and 1.2 s"
    for other in others:
        assert "rank 0 ended before all ranks were connected: CommunicationError: rank 0" in other


def test_a_rank_says_that_rank_0_is_not_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_meeting, "NOTICE", 0.3)
    port = free_port()
    (error,) = outcomes(rank(1, 2, port, timeout=1))
    assert f"no process listens at 127.0.0.1:{port}" in error
    assert f"rank 1: waiting for rank 0 at 127.0.0.1:{port} (Connection" in capsys.readouterr().err


def test_lists_of_ranks() -> None:
    assert listed({3}) == "rank 3"
    assert listed({3, 1}) == "ranks 1 and 3"
    assert listed(range(2, 99)) == "ranks 2-98"
    assert listed({1, 2, 3, 7, 8, 12}) == "ranks 1-3, 7, 8 and 12"


@pytest.mark.parametrize("sizes", [(2, 4, 4, 4), (4, 2), (3, 3, 4)])
def test_world_sizes_that_differ(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also ranks that call later get the reason, while rank 0 is about to end."""
    monkeypatch.setattr(_meeting, "LINGER", 3.0)
    port = free_port()
    works = [rank(number, size, port, number * 0.2) for number, size in enumerate(sizes)]
    ended = outcomes(*works)
    odd = next(number for number, size in enumerate(sizes) if size != sizes[0])
    sentence = f"rank {odd} was started with WORLD_SIZE={sizes[odd]}, rank 0 with {sizes[0]}; start"
    for number, error in enumerate(ended):
        own = f"rank {number} was started with WORLD_SIZE={sizes[number]}, rank 0 with {sizes[0]}"
        assert sentence in error or own in error, number


@pytest.mark.parametrize(("ranks", "twice"), [((0, 1, 1), 1), ((0, 0), 0), ((0, 1, 0), 0)])
def test_two_processes_with_one_rank(
    ranks: tuple[int, ...], twice: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_meeting, "LINGER", 2.0)
    port, size = free_port(), max(len(ranks), 2)
    ended = outcomes(*(rank(own, size, port, i * 0.3) for i, own in enumerate(ranks)))
    sentence = f"two processes were started as rank {twice}, one at 127.0.0.1 and one at 127.0.0.1"
    for error in ended:
        assert f"{sentence}; give each process its own RANK" in error


ANOTHER = {
    "web server": (b"HTTP/1.1 400 Bad Request\r\n\r\n", "another program listens at"),
    "short banner": (b"220 hi\r\n", "another program listens at"),
    "other version": (MAGIC[:-1] + b"\xff" + bytes(99), "install the same version of"),
    "hangs up": (b"", "does not answer as rank 0"),
    "silent": (None, "does not answer as rank 0"),
}


@pytest.mark.parametrize("program", ANOTHER)
def test_a_port_that_another_program_has(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 cannot listen there, and the others do not wait until their time is over."""
    monkeypatch.setattr(_meeting, "HELLO_LIMIT", 0.3)
    monkeypatch.setattr(_meeting, "STRANGE", 0.5)
    answer, sentence = ANOTHER[program]
    links = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def serve() -> None:
            while True:
                try:
                    link = listener.accept()[0]
                except OSError:
                    return
                links.append(link)
                with suppress(OSError):  # the caller has left
                    if answer is not None:
                        link.sendall(answer)
                        link.shutdown(socket.SHUT_WR)

        threading.Thread(target=serve, daemon=True).start()
        start = time.monotonic()
        first, other = outcomes(rank(0, 2, port), rank(1, 2, port))
        assert time.monotonic() - start < 10
        listener.shutdown(socket.SHUT_RDWR)
    assert f"rank 0 cannot listen at 127.0.0.1:{port} (Address already in use)" in first
    assert "set another MASTER_PORT in all ranks" in first
    assert sentence in other
    for link in links:
        link.close()


@pytest.mark.parametrize("name", ["no-such-host.invalid", "a..b", "x" * 70])
def test_an_address_that_does_not_resolve(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_meeting, "STRANGE", 0.2)
    start = time.monotonic()
    for error in outcomes(*(rank(n, 2, free_port(), address=name) for n in (0, 1))):
        assert f"MASTER_ADDR={name} does not resolve" in error
    assert time.monotonic() - start < 10


def test_a_caller_of_another_version_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()

    def old() -> None:
        with socket.create_connection(("127.0.0.1", port), 9) as link:
            link.sendall(MAGIC[:-1] + b"\1" + bytes(RUN))
            with suppress(ConnectionResetError):
                assert link.recv(1) == b""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "create_connection", retried(socket.create_connection))
        first, _ = outcomes(rank(0, 2, port, timeout=1), old)
    assert "rank 1 of 2 did not connect" in first
    assert "rank 0: a process at 127.0.0.1 has another version" in capsys.readouterr().err


def retried(connect: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that connects as soon as somebody listens."""

    def again(*arguments: Any) -> Any:
        for _ in range(200):
            try:
                return connect(*arguments)
            except ConnectionRefusedError:
                time.sleep(0.02)
        raise TimeoutError

    return again


def test_an_identity_fits_its_field() -> None:
    for run in ("x" * (RUN + 1), "\u20ac" * 50, "a\0", 7):
        with pytest.raises(ConfigError, match="is not the identity of a run"):
            SocketCommunicator(0, 1, run=run)  # type: ignore[arg-type]


# A link that is cut.


def pair(peers: Peers, other: int) -> socket.socket:
    """Connect peers to a socket, which is returned."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        peers.add(other, listener.accept()[0])
    return theirs


@pytest.mark.parametrize(
    "reason", [TimeoutError(110, "Connection timed out"), ConnectionResetError()]
)
def test_a_link_that_is_cut_names_the_host(
    reason: OSError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system reports a timeout; a process that was killed only closes the connection."""
    peers, ended = Peers(0), threading.Event()
    peers.on_failure = lambda rank, why: ended.set()
    whole, cut = _peers.received, threading.Event()

    def received(*arguments: Any, **options: Any) -> np.ndarray:
        if cut.wait(20):
            raise reason
        return whole(*arguments, **options)

    monkeypatch.setattr(_peers, "received", received)
    with pair(peers, 1):
        peers.arrival[1] -= 7
        cut.set()
        assert ended.wait(10)
    expected = "its connection ended (host 127.0.0.1)"
    if isinstance(reason, TimeoutError):
        expected = (
            "its connection ended: nothing arrived from its host 127.0.0.1 for 7 s; its process"
        )
    assert peers.gone[1].startswith(expected)
    assert not peers.is_reported(1, peers.gone[1]), "rank 0 prints it"
    peers.close()


def test_a_late_rank_is_named_with_its_host_and_its_silence() -> None:
    comm = object.__new__(SocketCommunicator)
    comm.rank, comm.size, comm.peers, comm.timeout, comm.checked = 0, 2, Peers(0), 0.3, False
    comm._members, comm._group = [0, 1], ""
    with pair(comm.peers, 1) as theirs:
        comm.peers.arrival[1] -= 40
        with pytest.raises(CommunicationError) as late:
            comm.receive(np.empty(3, np.float32), 1)
        sentence = (
            "rank 1 did not come within 0.3 s: nothing arrived from its host 127.0.0.1 for 40 s"
        )
        assert sentence in str(late.value)
        assert "its process may be busy or gone, or the network" in str(late.value)
        theirs.sendall(head_of(1000, 1, _peers.DATA) + b"k" + bytes(500))  # half a message
        with pytest.raises(CommunicationError, match=r"127\.0\.0\.1 for 0 s"):
            comm.receive(np.empty(3, np.float32), 1)
    comm.peers.close()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="needs Linux")
def test_a_link_that_is_cut_while_data_is_on_its_way_is_lost() -> None:
    """Probes of an idle connection do not run then, and retransmissions take 15 minutes."""
    peers = Peers(0)
    with pair(peers, 1):
        limit = peers.links[1].getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        assert limit == 1000 * _peers.SILENT
    peers.close()


# Ranks of mpiexec.


@needs_mpi
@pytest.mark.slow
def test_ranks_of_mpiexec_that_a_shell_contradicts_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, although rank 0 itself sees no contradiction."""
    monkeypatch.setenv("RANK", "0")
    ended = by_mpi(2, "tests.parallel.everything", "text", "folder", "all", limit=60)
    assert ended.returncode
    assert "RANK=0 of torchrun or a shell and PMI_RANK=1 of mpiexec contradict" in ended.stderr


def test_the_gpu_of_a_rank_is_that_of_its_own_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm starts one process on a node, in which mpiexec or torchrun starts several."""
    host: Any = None
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    for name, value in (("SLURM_LOCALID", 0), ("MPI_LOCALRANKID", 1), ("LOCAL_RANK", 2)):
        monkeypatch.setenv(name, str(value))
        assert local_rank(host) == value
