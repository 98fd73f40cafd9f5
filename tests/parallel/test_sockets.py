"""Ranks that are connected by sockets: the same exchanges, and who failed is known to all."""

import socket
import time

import numpy as np
import pytest

from unsloth_cupy.errors import CommunicationError, ConfigError
from unsloth_cupy.parallel import SocketCommunicator
from unsloth_cupy.parallel._peers import DATA, HEAD, connect, meet, receive_json, send_json
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
    with pytest.raises(CommunicationError, match=r"nobody did.*whether rank 1 was started") as who:
        SocketCommunicator(0, 3, port=free_port(), timeout=0.05)
    assert who.value.rank == 1
    with pytest.raises(CommunicationError, match="nobody listens"):
        SocketCommunicator(1, 3, port=free_port(), timeout=0.05)


def test_strangers_do_not_keep_ranks_from_meeting() -> None:
    """Rank 0 hears one that speaks another language, one that leaves, and one of no rank."""
    port, whole = free_port(), HEAD.pack(3, 0, DATA)

    def work(rank: int) -> None:
        if rank:
            for said in (b"GET / HTTP/1.1\r\n\r\n", b"", whole + b"[7]", whole + b"{7}"):
                with connect("127.0.0.1", port, rank=9, limit=time.monotonic() + 9) as stranger:
                    stranger.sendall(said)
        comm = SocketCommunicator(rank, 2, port=port, timeout=30)
        assert comm.all_gather(np.array([rank])).tolist() == [0, 1]

    in_threads(2, work)


def test_who_is_told_of_the_others_can_meet_anew() -> None:
    """Nobody listens at the port any more, or its call would end with the first meeting."""
    port = free_port()

    def work(rank: int) -> None:
        limit = time.monotonic() + 30
        if rank == 0:
            meet(links, 0, 2, "", port, limit)
            return
        with connect("127.0.0.1", port, 1, limit) as link:
            send_json(link, 0)
            assert receive_json(link) == [[1, "127.0.0.1", 0]]
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), 30)

    links: dict[int, socket.socket] = {}
    in_threads(2, work)
    links[1].close()


def test_a_rank_that_ends_before_all_have_met() -> None:
    """The others say so, and say what to do where somebody else has the port."""
    port = free_port()

    def work(rank: int) -> None:
        if rank:
            connect("127.0.0.1", port, rank=1, limit=time.monotonic() + 30).close()
        else:
            with pytest.raises(
                CommunicationError, match=r"rank 0: a connection ended before all 2"
            ):
                SocketCommunicator(0, 2, port=port, timeout=30)

    in_threads(2, work)
    with socket.create_server(("", port)), pytest.raises(CommunicationError, match="MASTER_PORT"):
        SocketCommunicator(0, 2, port=port, timeout=30)


def test_the_environment_says_how_ranks_meet() -> None:
    variables = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
    assert rendezvous(variables) == (1, 4, "node0", 29500)
    assert rendezvous(variables | {"TORCHELASTIC_USE_AGENT_STORE": "True"})[3] == 29501
    slurm = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4"}
    assert rendezvous(slurm | {k: variables[k] for k in ("MASTER_ADDR", "MASTER_PORT")})[:2] == (
        1,
        4,
    )
    assert rendezvous(slurm | variables)[:2] == (1, 4)  # torchrun inside of srun
    srun = slurm | {"SLURM_STEP_NODELIST": "gpu-[07-09,12]", "SLURM_JOB_ID": "4012345"}
    assert rendezvous(srun) == (1, 4, "gpu-07", 20000 + 4012345 % 12000)
    assert rendezvous(srun | {"MASTER_ADDR": "a", "MASTER_PORT": "1"})[2:] == ("a", 1)
    for name in (*slurm, "SLURM_STEP_NODELIST", "SLURM_JOB_ID"):
        with pytest.raises(ConfigError, match="set RANK, WORLD_SIZE"):
            rendezvous({k: v for k, v in srun.items() if k != name})
    for name in variables:
        with pytest.raises(ConfigError, match="set RANK, WORLD_SIZE"):
            rendezvous({k: v for k, v in variables.items() if k != name})


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
