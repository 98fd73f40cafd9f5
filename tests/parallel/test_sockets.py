"""Ranks that are connected by sockets: the same exchanges, and who failed is known to all."""

import os
import socket
import stat
import sys
import tempfile
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from ipaddress import ip_address
from pathlib import Path

import numpy as np
import pytest

from unsloth_cupy.errors import CommunicationError, ConfigError
from unsloth_cupy.files import temporary_name
from unsloth_cupy.parallel import SocketCommunicator, _meeting, _peers
from unsloth_cupy.parallel._authkey import AUTHKEY, authkey
from unsloth_cupy.parallel._meeting import (
    ANSWER,
    CALLERS,
    HELLO,
    HELLO_LIMIT,
    MAGIC,
    PROOF,
    RANDOM,
    RUN,
    Door,
    Group,
    call,
    meet,
    proof,
)
from unsloth_cupy.parallel._peers import DATA, HEAD, Peers, head_of, received
from unsloth_cupy.parallel.sockets import PORTS, first_host, rendezvous

from .collectives import all_checks
from .nccl import in_threads
from .ranks import by_sockets, free_port


@pytest.mark.parametrize("checked", [False, True])
def test_ranks_exchange_what_numpy_says(checked: bool) -> None:
    port = free_port()

    def work(rank: int) -> None:
        all_checks(SocketCommunicator(rank, 3, port=port, timeout=30, checked=checked))

    in_threads(3, work)


@pytest.mark.slow
def test_faults_are_noticed_and_an_error_ends_all() -> None:
    """Without mpiexec: each of the others notices, and says who it was."""
    start = time.monotonic()
    first, second, odd = by_sockets(3, "tests.parallel.faults")
    assert time.monotonic() - start < 45, "others waited"
    assert "has failed: CommunicationError" in odd.said, "it sleeps, and others end it"
    for other in (first, second):
        assert other.code > 0
        assert "rank 2 did not come within 1 s" in other.said, other


def test_a_rank_that_was_not_started_is_named() -> None:
    with pytest.raises(
        CommunicationError, match=r"connected: none.*that ranks 1 and 2 were started"
    ) as who:
        SocketCommunicator(0, 3, port=free_port(), timeout=0.05)
    assert who.value.rank == 1
    with pytest.raises(CommunicationError, match="no process listens"):
        SocketCommunicator(1, 3, port=free_port(), timeout=0.05)


def test_a_name_that_other_machines_know_by_another_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some systems map the name of a machine to loopback, on this machine."""
    there = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", free_port()))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: there)
    with pytest.raises(CommunicationError, match=r"MASTER_ADDR=node0 is 127.0.0.1 here"):
        SocketCommunicator(0, 2, "node0", timeout=0.05)


def hello(rank: int, size: int = 3, magic: bytes = MAGIC) -> bytes:
    """Return what a caller says first."""
    return HELLO.pack(magic, rank, size, 1, bytes(RANDOM))


def answer(link: socket.socket, key: bytes, said: bytes, listener: int = 0) -> bytes:
    """Call a listener, and return what it says to a proof with this key; b"" if it closes."""
    link.sendall(said)
    challenge = link.recv(len(MAGIC) + RANDOM, socket.MSG_WAITALL)[len(MAGIC) :]
    link.sendall(bytes(RUN) + proof(key, listener, said, challenge, bytes(RUN)))
    return link.recv(ANSWER + PROOF, socket.MSG_WAITALL)


def everything_a_caller_said(port: int, key: bytes) -> list[bytes]:
    """Return what rank 1 says to a rank 0 that records it."""
    with socket.create_server(("127.0.0.1", port)) as listener, ThreadPoolExecutor() as threads:
        calling = threads.submit(SocketCommunicator, 1, 3, port=port, timeout=30)
        listener.accept()[0].close()  # it asks for the interface
        link, _ = listener.accept()
        with link:
            said = link.recv(HELLO.size, socket.MSG_WAITALL)
            challenge = bytes(RANDOM)
            link.sendall(MAGIC + challenge)
            shown = link.recv(RUN + PROOF, socket.MSG_WAITALL)
            assert shown[RUN:] == proof(key, 0, said, challenge, shown[:RUN])
            link.sendall(bytes(ANSWER + PROOF))  # this rank 0 cannot prove the key
        with pytest.raises(CommunicationError, match="its key differs from the key of"):
            calling.result(30)
    return [said, shown]


def test_strangers_get_nothing_and_delay_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent, dripping, without the key, with an old proof, with garbage of every kind."""
    monkeypatch.setattr(_meeting, "WARNINGS", 1)
    key = "a secret of this test"
    monkeypatch.setenv(AUTHKEY, key)
    replayed = everything_a_caller_said(free_port(), key.encode())
    port, here, over = free_port(), threading.Barrier(2), threading.Event()

    def strangers() -> None:
        with ExitStack() as stack:
            call = lambda: stack.enter_context(stranger(port))  # noqa: E731
            links = [call() for _ in range(2 * CALLERS)]  # all silent
            for said in (
                b"GET / HTTP/1.1\r\n\r\n" * 9,
                b"[" * 100_000,
                HEAD.pack(2**63, 2**15, DATA) * 9,
                hello(1, magic=b"stranger"),
            ):
                link = call()
                with suppress(OSError):  # it is closed while this is sent
                    link.sendall(said)
                    assert link.recv(1) == b""
            for wrong_key, listener in ((b"another key", 0), (key.encode(), 1)):
                actual = answer(call(), wrong_key, hello(1), listener)
                assert actual == bytes(ANSWER + PROOF)
            link = call()
            link.sendall(replayed[0])
            link.recv(len(MAGIC) + RANDOM, socket.MSG_WAITALL)
            link.sendall(replayed[1])
            assert link.recv(ANSWER + PROOF, socket.MSG_WAITALL) == bytes(ANSWER + PROOF)
            here.wait()
            dripping = call()
            for byte in [*hello(1)] * 9:
                with suppress(OSError):
                    dripping.sendall(bytes([byte]))
                if over.wait(0.02):
                    break
            assert links

    def work(rank: int) -> None:
        if rank == 3:
            strangers()
            return
        if rank:
            here.wait() if rank == 1 else None
            assert rank == 1 or not over.is_set()
        comm = SocketCommunicator(rank, 3, port=port, timeout=30)
        over.set()
        assert comm.all_gather(np.array([rank])).tolist() == [0, 1, 2]

    start = time.monotonic()
    in_threads(4, work)
    assert time.monotonic() - start < HELLO_LIMIT, "a stranger is waited for"


def stranger(port: int) -> socket.socket:
    """Return a connection to a port, as soon as somebody listens there."""
    limit = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), 30)
        except OSError:
            assert time.monotonic() < limit
            time.sleep(0.01)


def test_a_silent_caller_is_closed_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_meeting, "HELLO_LIMIT", 0.3)
    peers, key = Peers(0), b"key"
    door = Door(peers, Group(2, key), "127.0.0.1", 0)
    with stranger(door.port) as silent, stranger(door.port) as dripping:
        for link in (dripping, silent):
            with suppress(ConnectionError):  # it has been closed while this is sent
                link.sendall(hello(1)[:9] if link is dripping else b"")
                assert link.recv(1) == b""
    assert not peers.links
    door.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((door.host, door.port), 30)


def test_a_crowd_of_callers_takes_bounded_memory() -> None:
    """The first of them is closed, long before its time is over."""
    door = Door(Peers(0), Group(2, b"key"), "127.0.0.1", 0)
    with ExitStack() as stack:
        callers = [stack.enter_context(stranger(door.port)) for _ in range(CALLERS + 3)]
        callers[0].settimeout(HELLO_LIMIT / 2)
        assert callers[0].recv(1) == b""
        callers[-1].settimeout(0.2)
        with pytest.raises(TimeoutError):
            callers[-1].recv(1)
    door.close()


def test_another_key_is_an_error_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both say what to do: the caller now, the one that waits when its time is over."""
    port, keys = free_port(), threading.local()
    monkeypatch.setattr(_meeting, "authkey", lambda: keys.own)

    def work(rank: int) -> None:
        keys.own = b"key %d" % rank
        start = time.monotonic()
        with pytest.raises(
            CommunicationError, match=f"set {AUTHKEY} to the same secret in all ranks"
        ):
            SocketCommunicator(rank, 2, port=port, timeout=30 if rank else 3)
        assert time.monotonic() - start < 20

    in_threads(2, work)


def test_ranks_listen_where_rank_0_does_and_nowhere_else() -> None:
    """On loopback, no other address of the machine answers; not even another loopback."""
    for host in ("127.0.0.1", "localhost"):
        door = Door(Peers(0), Group(2, b"key"), host, 0)
        assert ip_address(door.host).is_loopback
        for other in ("127.0.0.2", *addresses()):
            with pytest.raises(OSError, match=r"."):
                socket.create_connection((other, door.port), 2)
        door.close()
    homes = []
    port, listening = free_port(), _meeting.listening

    def noted(rank: int, host: str, port: int, backlog: int) -> socket.socket:
        homes.append(host)
        return listening(rank, host, port, backlog)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_meeting, "listening", noted)
        in_threads(3, lambda rank: SocketCommunicator(rank, 3, port=port, timeout=30).barrier())
    assert homes == ["127.0.0.1"] * 3
    with pytest.raises(CommunicationError, match="set MASTER_ADDR to an address of rank 0"):
        SocketCommunicator(0, 2, "192.0.2.1", free_port(), timeout=1)


def addresses() -> set[str]:
    """Return the address of this machine in another network, if it has one; nothing is sent."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
        link.connect(("192.0.2.1", 9))
        return {link.getsockname()[0]}
    return set()


def test_who_is_told_of_the_others_can_meet_anew() -> None:
    """Nobody listens at the port any more, or its call would end with the first meeting."""
    port, peers, met = free_port(), Peers(0), Peers(1)

    def work(rank: int) -> None:
        if rank == 0:
            meet(peers, 2, "127.0.0.1", port, 30)
            return
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(met, "take", taking)
            meet(met, 2, "127.0.0.1", port, 30)

    def taking(source: int, key: str, limit: float) -> np.ndarray | None:
        told = Peers.take(met, source, key, limit)
        assert told is not None
        assert bytes(told).startswith(b"127.0.0.1 ")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 30)
        return told

    in_threads(2, work)
    for each in (peers, met):
        each.close()


def test_a_rank_that_ends_before_all_have_met() -> None:
    """The others say so at once, and say what to do where somebody else has the port."""
    port, start = free_port(), time.monotonic()

    def work(rank: int) -> None:
        if rank == 1:
            peers = Peers(1)
            door = Door(peers, Group(3, authkey()), "127.0.0.1", 0)
            call(door, 0, "127.0.0.1", port, time.monotonic() + 30)
            door.close()
            peers.close()
            return
        with pytest.raises(
            CommunicationError, match=r"rank 1 ended before all|see what the others printed"
        ):
            SocketCommunicator(rank, 3, port=port, timeout=60 if rank == 0 else 3)

    in_threads(2, work)
    assert time.monotonic() - start < 10
    with socket.create_server(("", port)), pytest.raises(CommunicationError, match="MASTER_PORT"):
        SocketCommunicator(0, 2, port=port, timeout=30)


BROKEN = {
    "no message": b"x" * 64,
    "a huge length": HEAD.pack(2**62, 1, DATA) + bytes(64),
    "half a message, then the end": head_of(99, 1, DATA) + b"kx",
    "a key that is not a text": head_of(1, 1, DATA) + b"\xff\xff",
}


@pytest.mark.parametrize("sent", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_connection_is_a_failure_at_once(sent: bytes) -> None:
    ended = threading.Event()
    ours, theirs = socket.socketpair()
    peers = Peers(0)
    peers.on_failure = lambda rank, why: ended.set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_peers, "ALIVE", {})
        patch.setattr(socket.socket, "setsockopt", lambda *_: None)  # they are no TCP
        peers.add(1, ours)
    theirs.sendall(sent)
    if "half" in (name := next(n for n, s in BROKEN.items() if s == sent)):
        theirs.shutdown(socket.SHUT_WR)
    assert ended.wait(10), name
    assert peers.take(1, "k", time.monotonic() + 30) is None
    theirs.settimeout(10)
    assert theirs.recv(1) == b"", "the other end learns it too"
    theirs.close()
    peers.close()


def test_a_message_is_held_by_who_takes_it_alone() -> None:
    """Not by the thread that received it, while that waits for the next one."""
    ours, theirs = socket.socketpair()
    peers, message = Peers(0), bytes(2**20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_peers, "ALIVE", {})
        patch.setattr(socket.socket, "setsockopt", lambda *_: None)  # they are no TCP
        peers.add(1, ours)
    sending = threading.Thread(
        target=theirs.sendall, args=(head_of(len(message), 1, DATA) + b"k" + message,)
    )
    sending.start()
    taken = peers.take(1, "k", time.monotonic() + 20)
    until = time.monotonic() + 20
    while sys.getrefcount(taken) > 2 and time.monotonic() < until:  # ours, and that of the call
        time.sleep(0.01)
    assert sys.getrefcount(taken) == 2
    sending.join()
    peers.close()
    theirs.close()


def test_memory_is_taken_as_bytes_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message of 2**40 bytes that never comes takes no more than the first step."""
    monkeypatch.setattr(_peers, "STEP", 1000)
    ours, theirs = socket.socketpair()
    data = bytes(range(256)) * 40
    with ours, theirs, ThreadPoolExecutor() as threads:
        whole = threads.submit(received, ours, len(data))
        theirs.sendall(data)
        assert bytes(whole.result(10)) == data
        lost = threads.submit(received, ours, 2**40)
        theirs.sendall(data)
        theirs.close()
        with pytest.raises(ConnectionResetError):
            lost.result(10)


@pytest.mark.slow
def test_a_killed_rank_ends_all_others_within_seconds() -> None:
    start = time.monotonic()
    ended = by_sockets(3, "tests.parallel.killed")
    assert time.monotonic() - start < 30
    assert ended[1].code == -9
    for other in (ended[0], ended[2]):
        assert other.code == 1
        assert "rank 1 has failed: its connection ended" in other.said


class TestKey:
    """Where the key comes from, and who may read it."""

    @pytest.fixture(autouse=True)
    def home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        for name in (AUTHKEY, "TORCHELASTIC_RUN_ID"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        return tmp_path / "config" / "unsloth_cupy"

    def test_a_file_that_only_the_user_can_read(self, home: Path) -> None:
        with ThreadPoolExecutor(9) as threads:  # the first makes it, and all have the same
            keys = {*threads.map(lambda _: authkey(), range(30))}
        assert [*map(len, keys)] == [64]
        assert [*home.iterdir()] == [home / "authkey"]
        assert stat.S_IMODE(home.stat().st_mode) == 0o700
        assert stat.S_IMODE((home / "authkey").stat().st_mode) == 0o600

    def test_variables_come_first(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Torchrun's id counts if it is random; job numbers and names never do."""
        for guessed in ("none", "17", "my-job", str(uuid.uuid1())):
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", guessed)
            monkeypatch.setenv("SLURM_JOB_ID", "17")
            assert authkey() == (home / "authkey").read_bytes()
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", random := str(uuid.uuid4()))
        assert authkey() == random.encode()
        monkeypatch.setenv(AUTHKEY, "own")
        assert authkey() == b"own"

    @pytest.mark.skipif(os.name == "nt", reason="Windows has other permissions")
    @pytest.mark.parametrize("fault", ["readable", "empty", "pipe", "folder", "link", "stranger's"])
    def test_a_file_that_is_not_private_is_refused(self, fault: str, home: Path) -> None:
        home.mkdir(parents=True)
        path = home / "authkey"
        if fault == "pipe":
            os.mkfifo(path, 0o600)
        elif fault == "folder":
            path.mkdir()
        elif fault == "link":
            path.symlink_to(home / "elsewhere")
        else:
            path.write_text("" if fault == "empty" else "known")
            path.chmod(0o644 if fault == "readable" else 0o600)
        if fault == "stranger's":
            if os.geteuid():
                pytest.skip("only root can give a file away")
            os.chown(path, 12345, -1)
        with pytest.raises(CommunicationError, match=f"remove it, or set {AUTHKEY}"):
            authkey()

    @pytest.mark.parametrize("fault", ["no folder", "no links", "no permissions"])
    def test_a_home_that_cannot_keep_a_secret(
        self, fault: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The key is in a temporary folder of the user's own, which others cannot take."""
        link, make = os.link, tempfile.mkstemp

        def no_links(made: str, path: Path) -> None:
            if path.is_relative_to(home):
                raise PermissionError
            link(made, path)

        def no_permissions(dir: Path) -> tuple[int, str]:
            handle, made = make(dir=dir)
            if dir.is_relative_to(home):
                os.chmod(made, 0o777)
            return handle, made

        if fault == "no folder":
            home.parent.touch()
        elif fault == "no links":
            monkeypatch.setattr(os, "link", no_links)
        else:
            monkeypatch.setattr(tempfile, "mkstemp", no_permissions)
        key = authkey()
        assert fault == "no folder" or not [*home.iterdir()]
        place = temporary_name()
        assert place.parent == tmp_path
        assert (place / "authkey").read_bytes() == key
        assert stat.S_IMODE(place.stat().st_mode) == 0o700


def test_the_environment_says_how_ranks_meet() -> None:
    variables = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
    assert rendezvous(variables) == (1, 4, "node0", 29500)
    assert rendezvous(variables | {"TORCHELASTIC_USE_AGENT_STORE": "True"})[3] == 29501
    for local, address in (("4", "127.0.0.1"), ("2", "node0")):
        assert rendezvous(variables | {"LOCAL_WORLD_SIZE": local})[2] == address
    slurm = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4"}
    assert rendezvous(slurm | {k: variables[k] for k in ("MASTER_ADDR", "MASTER_PORT")})[:2] == (
        1,
        4,
    )
    assert rendezvous(slurm | variables)[:2] == (1, 4)  # torchrun inside of srun
    srun = slurm | {"SLURM_STEP_NODELIST": "gpu-[07-09,12]", "SLURM_JOB_ID": "4012345"}
    assert rendezvous(srun) == (1, 4, "gpu-07", 20000 + 4012345 % 12000)
    for each, address in (("4", "127.0.0.1"), ("2(x2)", "gpu-07"), ("2,1(x2)", "gpu-07")):
        assert rendezvous(srun | {"SLURM_STEP_TASKS_PER_NODE": each})[2] == address
    assert rendezvous(srun | {"MASTER_ADDR": "a", "MASTER_PORT": "1"})[2:] == ("a", 1)
    for name in (*slurm, "SLURM_STEP_NODELIST", "SLURM_JOB_ID"):
        with pytest.raises(ConfigError, match="set RANK, WORLD_SIZE"):
            rendezvous({k: v for k, v in srun.items() if k != name})
    for name in variables:
        with pytest.raises(ConfigError, match="set RANK, WORLD_SIZE"):
            rendezvous({k: v for k, v in variables.items() if k != name})
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        for value in ("x", "-1", "\u00b2", "9" * 5000, ""):
            with pytest.raises(ConfigError, match="set RANK, WORLD_SIZE"):
                rendezvous(variables | {name: value})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[3-5]", "n3"),
        ("n[003,7-8]-ib,m[1-2]", "n003-ib"),
        ("a,n[1-2]", "a"),
        ("rack2-n[9]", "rack2-n9"),
        ("10.0.0.7", "10.0.0.7"),
    ],
)
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_ranks_of_srun_meet() -> None:
    """By what srun sets alone, in threads: on this host, at the port of the job."""
    place = {"SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "127.0.0.1"}
    place |= {"SLURM_JOB_ID": str(free_port(PORTS) - PORTS.start)}

    def work(rank: int) -> None:
        comm = SocketCommunicator(*rendezvous(place | {"SLURM_PROCID": str(rank)}), timeout=30)
        assert comm.all_gather(np.array([rank])).tolist() == [0, 1]

    in_threads(2, work)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match="is not a rank"):
        SocketCommunicator(3, 3)
    with pytest.raises(ConfigError, match="is not positive"):
        SocketCommunicator(0, 1, timeout=0)
    comm = SocketCommunicator(0, 1, port=free_port())
    with pytest.raises(ConfigError, match="is not a writeable array in C order"):
        comm.exchange(np.ones(2), 0, np.ones((2, 2))[:, 0], 0)
