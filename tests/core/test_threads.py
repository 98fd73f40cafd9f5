"""Work shared among threads: all of it is done, errors arrive, nothing waits for ever."""

import multiprocessing
import sys
import threading
from collections.abc import Iterator

import pytest

from unsloth_cupy.ops.common import threads


@pytest.fixture(autouse=True)
def three_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(threads, "count", lambda: 3)
    threads._pool.cache_clear()
    yield
    threads._pool.cache_clear()


def test_every_item_once() -> None:
    done: list[int] = []
    threads.each(done.append, range(1000))
    assert sorted(done) == list(range(1000))
    threads.each(done.append, [])


def test_side_by_side() -> None:
    """Three items that wait for each other all pass."""
    barrier = threading.Barrier(3, timeout=10)
    threads.each(lambda _: barrier.wait() and None, range(3))


def test_error_arrives() -> None:
    def work(item: int) -> None:
        if item == 7:
            raise ValueError("seven")

    with pytest.raises(ValueError, match="seven"):
        threads.each(work, range(20))


def test_inside_itself() -> None:
    """Work may share out work: whoever asks also works."""
    done: list[int] = []
    threads.each(lambda _: threads.each(done.append, range(10)), range(10))
    assert len(done) == 100


@pytest.mark.skipif(sys.platform == "win32", reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # JAX, where a test imported it
def test_after_a_fork() -> None:
    """A child has no threads of its parent and makes its own."""
    threads.each(lambda _: None, range(3))
    child = multiprocessing.get_context("fork").Process(target=threads.each, args=(print, range(3)))
    child.start()
    child.join(10)
    assert child.exitcode == 0


def test_count_obeys_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for text, expected in (("3", [3]), ("", range(1, 4096)), ("4,2", range(1, 4096))):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        threads.count.cache_clear()
        assert threads.count() in expected
    monkeypatch.undo()
    threads.count.cache_clear()
