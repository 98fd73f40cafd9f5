"""NCCL's ranks, through a stand-in: what is exchanged, and the calls that CuPy has."""

import importlib.util
import inspect
import os
import re
import threading
import types
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from unsloth_cupy import machine
from unsloth_cupy.core.target import using
from unsloth_cupy.errors import CommunicationError, DeviceError, FrameworkError
from unsloth_cupy.finetune.run import ranks
from unsloth_cupy.ops.common.columns import sum_in_order
from unsloth_cupy.parallel import (
    DataParallel,
    NcclCommunicator,
    SocketCommunicator,
    nccl,
    part,
    vocab_parallel_embedding,
    vocabulary,
)
from unsloth_cupy.parallel._prefetch import Prefetch
from unsloth_cupy.parallel._shards import Cut

from ..machines.cuda_on_cpu import Emulator, missing
from .collectives import CHECKS
from .nccl import CAPTURE, Array, array, in_threads, stand_in
from .ranks import free_port


@pytest.mark.parametrize(("ranks", "checked", "hosts"), [(3, True, False), (2, False, True)])
def test_ranks_exchange_what_numpy_says(ranks: int, checked: bool, hosts: bool) -> None:
    """Also where a host meets the others by sockets, and where the GPU is asked for sizes."""
    port = free_port()
    with stand_in() as cupy:
        made = cupy.cuda.nccl.get_unique_id()

        def work(rank: int) -> None:
            if hosts:
                host = SocketCommunicator(rank, ranks, port=port, timeout=30)
                comm = NcclCommunicator._of(host, 30, checked)
            else:
                comm = NcclCommunicator(rank, ranks, made, timeout=30, checked=checked)
            for check in CHECKS:
                check(comm, array)
                if hosts:  # which exchanges numbers of NumPy, as those of a run are
                    check(comm)

        in_threads(ranks, work)


def test_calls_are_those_of_cupy() -> None:
    """CuPy's own signatures stand in its library, which cannot be loaded without NCCL."""
    there = importlib.util.find_spec("cupy_backends")
    if there is None:
        pytest.skip("needs CuPy, without a GPU")
    folder = Path(there.submodule_search_locations[0])
    text = next(folder.glob("cuda/libs/nccl.*")).read_bytes().decode("latin-1")
    with stand_in() as cupy:
        ours = cupy.cuda.nccl
        for name, method in vars(ours.NcclCommunicator).items():
            if inspect.isfunction(method) and name != "__init__":
                match = re.search(rf"NcclCommunicator\.{name}\(self(.*?)\)", text)
                assert match is not None, name
                declared = [part.split()[-1] for part in match[1].split(",")[1:]]
                assert declared == [*inspect.signature(method).parameters][1:]
        assert "NcclCommunicator(int ndev, bytes commId, int rank, " in text
        for name in ("groupStart", "groupEnd", "get_unique_id"):
            assert f"{name}()" in text
        for name in ("NCCL_UINT8", "NcclError"):
            assert name in text


def test_what_is_overdue_ends_the_process(monkeypatch, capsys) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    with stand_in() as cupy:
        comm = NcclCommunicator(0, 1, bytes(128), timeout=1e-9)
        watch = comm._watchdog
        watch.thread = types.SimpleNamespace()  # this one looks
        comm.all_reduce(array([1.0]))
        watch.look()
        assert not watch.waiting
        assert not ended
        monkeypatch.setattr(cupy.cuda.Event, "done", False)
        comm.all_reduce(array([1.0]))
        watch.look()
        assert ended == [1]
        assert comm._comm.ended
        assert "all_reduce waited 1e-09 s" in capsys.readouterr().err
        watch.failed(3, "ValueError: no")
        assert ended == [1, 1]
        assert "rank 3 has failed: ValueError: no" in capsys.readouterr().err


@pytest.mark.parametrize("hosts", [True, False])
@pytest.mark.parametrize("checked", [True, False])
def test_what_is_overdue_does_not_advise_what_is_done(capsys, monkeypatch, hosts, checked) -> None:
    monkeypatch.setattr(os, "_exit", lambda code: None)
    with stand_in() as cupy:
        host = SocketCommunicator(0, 1, port=free_port()) if hosts else None
        comm = NcclCommunicator(0, 1, bytes(128), timeout=1e-9, checked=checked, host=host)
        comm._watchdog.thread = types.SimpleNamespace()
        monkeypatch.setattr(cupy.cuda.Event, "done", False)
        comm.all_reduce(array([1.0]))
        comm._watchdog.look()
    said = capsys.readouterr().err
    assert ("all ranks made this call" in said) == (hosts and checked)
    assert ("checked=True names the late rank" in said) != (hosts and checked)


def test_a_graph_captures_exchanges(monkeypatch) -> None:
    """The host waits for no GPU meanwhile; a graph is watched when it is launched."""
    monkeypatch.setattr(vocabulary, "embedding", lambda tokens, table: table[tokens])
    where = lambda *parts: np.where(*parts).view(Array)  # noqa: E731
    theirs = types.SimpleNamespace(where=where, ndarray=int)  # for whom the stand-in is a GPU
    monkeypatch.setattr(vocabulary, "np", theirs)
    port, table = free_port(), np.arange(14, dtype=np.float16).reshape(7, 2)
    with stand_in():

        def work(rank: int) -> None:
            host = SocketCommunicator(rank, 2, port=port, timeout=30)
            comm = NcclCommunicator._of(host, 30, False)
            own, tokens = array(table[part(7, comm)]), array([[6, 0], [3, 4]])
            x, out = array([[rank, 2.0], [3.0, 4.0]]), array(np.zeros((2, 2)))
            comm._watchdog.thread = types.SimpleNamespace()  # nobody looks
            CAPTURE.on = True
            made = [
                comm.all_reduce(x),
                comm.all_reduce(x, "max"),
                comm.reduce_scatter(x, 0),
                comm.all_gather(x, 1),
                comm.all_to_all(x, 0, 1),
                comm.broadcast(x, 1),
                comm.exchange(x, 1 - rank, out, 1 - rank),
                vocab_parallel_embedding(tokens, own, 7, comm=comm),
            ]
            CAPTURE.on = False
            np.testing.assert_array_equal(made[-1], table[[[6, 0], [3, 4]]], strict=True)
            np.testing.assert_array_equal(made[0], [[1, 4], [6, 8]])
            assert not comm._watchdog.waiting
            comm.launched("generate")
            assert [call for _, call in comm._watchdog.waiting] == ["generate"]

        in_threads(2, work)


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_a_kernel_sums_in_the_order_of_the_ranks(dtype) -> None:
    """In float32, rounded once: where the order decides about the last bits."""
    rows = (8 * np.random.default_rng(0).standard_normal((7, 3, 45))).astype(dtype)
    expected = rows[0].astype(np.float32)
    for row in rows[1:]:
        expected = expected + row.astype(np.float32)
    with using(Emulator()):
        actual = sum_in_order(rows)
    np.testing.assert_array_equal(actual, expected.astype(dtype), strict=True)
    if dtype is np.float32:
        assert (actual != rows[::-1].cumsum(axis=0)[-1]).any(), "no order shows"


def test_a_stand_in_knows_who_waits() -> None:
    x = array([1.0])
    calls = (x.get, x.item, x.tolist, lambda: float(x[0]), lambda: bool(x), lambda: x[x > 0])
    for call in calls:
        CAPTURE.on = False
        call()
        CAPTURE.on = True
        with pytest.raises(AssertionError, match="waits for the GPU"):
            call()
    CAPTURE.on = False


def test_what_makes_no_sense_is_refused(monkeypatch) -> None:
    with stand_in() as cupy:
        comm = NcclCommunicator(0, 1, bytes(128))
        with pytest.raises(FrameworkError, match="not an array of CuPy"):
            comm.all_reduce(np.ones(2))
        monkeypatch.setattr(cupy.cuda.nccl, "available", False)
        with pytest.raises(DeviceError, match="does not find NCCL"):
            NcclCommunicator(0, 1, bytes(128))
        monkeypatch.setattr(cupy.cuda.nccl, "available", True)

        def broken(*_: object) -> None:
            raise cupy.cuda.nccl.NcclError("unhandled system error")

        monkeypatch.setattr(cupy.cuda.nccl, "groupEnd", broken)
        with pytest.raises(CommunicationError, match="NCCL reports unhandled"):
            comm.all_reduce(array([1.0]))


def test_buckets_are_summed_by_a_second_stream(monkeypatch) -> None:
    """Gradients are copied into a bucket, and sums are read, on the current stream."""
    with stand_in() as cupy:
        comm = NcclCommunicator(0, 1, bytes(128))
        model = types.SimpleNamespace(trainable={})
        sides: list[str] = []
        stream = cupy.cuda.Stream
        monkeypatch.setattr(stream, "__enter__", lambda self: sides.append("in"))
        monkeypatch.setattr(stream, "__exit__", lambda *_: sides.append("out"))
        monkeypatch.setattr(stream, "wait_event", lambda *_: sides.append("wait"))
        grads = {"a": array([1.0, 2.0]), "b": array([[3.0]])}
        actual = DataParallel(model, comm, bucket_bytes=8).sums(grads)
        assert sides == ["wait", "in", "out"] * 2 + ["wait"]
        for name, grad in grads.items():
            np.testing.assert_array_equal(actual[name], grad)


def test_the_next_block_is_gathered_ahead() -> None:
    """From the second step on; not what has been replaced, nor past the end of a step."""
    with stand_in():
        comm = NcclCommunicator(0, 1, bytes(128))
        blocks = [{f"{n}.a": array([n, 1.0]), f"{n}.b": array([n, 2.0])} for n in range(3)]
        parameters = {name: value for block in blocks for name, value in block.items()}
        cuts = {name: Cut.of((2,), 1) for name in parameters}
        ahead = Prefetch(comm, parameters.__getitem__)
        gathers: list[int] = []
        comm.all_gather = lambda x: (gathers.append(int(x[0, 0])), x)[1]

        def step(*order: int) -> list[list[int]]:
            seen = []
            ahead.begin()
            for number in order:
                names = blocks[number]
                whole = ahead({name: parameters[name] for name in names}, cuts)
                seen.append(gathers.copy())
                gathers.clear()
                for name in names:
                    np.testing.assert_array_equal(whole[name], parameters[name])
            return seen

        assert step(0, 1, 2, 1) == [[0], [1], [2], [1]]
        assert step(0, 1, 2, 1) == [[0, 1], [2], [1], []]
        parameters["1.a"] = array([1.0, 9.0])
        assert step(0, 2, 1) == [[0, 1], [2], [1]]
        ahead.begin()
        ahead({name: parameters[name] for name in blocks[0]}, cuts)
        parameters["2.a"] = array([2.0, 9.0])  # behind the back of what is under way
        gathers.clear()
        whole = ahead({name: parameters[name] for name in blocks[2]}, cuts)
        assert whole["2.a"][1] == 9


@pytest.mark.gpu
def test_two_gpus_exchange_what_numpy_says() -> None:
    cupy = pytest.importorskip("cupy", reason="needs CuPy")
    if cupy.cuda.runtime.getDeviceCount() < 2 or not cupy.cuda.nccl.available:
        pytest.skip("needs two GPUs and NCCL")
    made = nccl.load_nccl().get_unique_id()

    def work(rank: int) -> None:
        with cupy.cuda.Device(rank):
            comm = NcclCommunicator(rank, 2, made, timeout=60)
            for check in CHECKS:
                check(comm, cupy.asarray)

    in_threads(2, work)


def counted_together(comm: SocketCommunicator) -> int:
    return int(comm.all_gather(np.array([comm.rank]))[comm.rank])


def test_all_ranks_end_if_one_has_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in nccl.LOCAL_RANK:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(SocketCommunicator, "local_rank", counted_together)
    port, rank_of, errors = free_port(), threading.local(), dict[int, str]()
    monkeypatch.setattr(nccl, "count", lambda: 0 if rank_of.number == 1 else 8)

    def work(rank: int) -> None:
        rank_of.number = rank
        host = SocketCommunicator(rank, 2, port=port, timeout=5)
        with pytest.raises(DeviceError) as error:
            NcclCommunicator.over(host)
        errors[rank] = str(error.value)

    in_threads(2, work)
    expected = "NcclCommunicator: CuPy sees no GPU in rank 1; check nvidia-smi, or use --device cpu"
    assert all(actual.startswith(expected) for actual in errors.values())
    assert len(errors) == 2


@pytest.mark.parametrize(
    ("addresses", "capability", "expected"),
    [
        ([["0:1:0", "0:2:0"], ["0:1:0", "0:2:0"]], "9.0", "cuda"),
        ([["0:1:0"], ["0:2:0"]], "9.0", "cuda"),  # each sees its own alone
        ([["0:1:0"], ["0:1:0"]], "9.0", "2 ranks have 1 GPU; start one rank per GPU"),
        ([["0:1:0"], []], "9.0", "2 ranks have 1 GPU"),
        ([[], []], "9.0", ""),
        ([["0:1:0", "0:2:0"], ["0:1:0", "0:2:0"]], "7.5", "kernels need sm_80"),
    ],
)
def test_each_rank_has_a_gpu_of_its_own_or_all_are_on_the_cpu(
    addresses: list[list[str]], capability: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no launcher sets an index, and all ranks count together, as with MPI."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    for name in nccl.LOCAL_RANK:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(SocketCommunicator, "local_rank", counted_together)
    port, rank_of = free_port(), threading.local()

    def gpus() -> tuple[list[machine.Gpu], str]:
        seen = addresses[rank_of.number]
        devices = [machine.Gpu("a GPU", capability, 1 << 30, each) for each in seen]
        return devices, "" if devices else "CUDA sees no device"

    monkeypatch.setattr(machine, "gpus", gpus)
    monkeypatch.setattr(ranks, "gpus", gpus)
    monkeypatch.setattr(machine, "GPU_FILES", [])
    actual = {}

    def work(rank: int) -> None:
        rank_of.number = rank
        comm = SocketCommunicator(rank, 2, port=port, timeout=10)
        actual[rank] = ranks._device("auto", comm)

    in_threads(2, work)
    devices = {device for device, _ in actual.values()}
    assert devices == {"cuda" if expected == "cuda" else None}
    assert (expected in actual[0][1]) if expected not in ("cuda", "") else not actual[0][1]
