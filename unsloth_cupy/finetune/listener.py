"""Listeners, which handle the events and messages of a run.

    with hearing(listener):
        announce("resuming from runs/chat/checkpoint-00000200")
        for (line,) in reading(lines, size, "reading"): ...

The listener is a context variable, so that functions deep inside a run need no argument for it.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar

PieceT = TypeVar("PieceT", bound=tuple[Any, ...])


class Listener:
    """Handles the events of a run.  Each method does nothing: override it.

    ``line`` is a line of the log, ``run`` a ``Run``.  In a run on several ranks, each rank has a
    listener; only the listener of rank 0 can print.
    """

    def announce(self, text: str) -> None:
        """Handle a message of one or more lines."""

    def reading(self, what: str, size: int) -> AbstractContextManager[Callable[[int], None]]:
        """Handle the reading of a file of ``size`` bytes.

        The context returns a function that is called with the number of bytes just read.
        """
        return nullcontext(lambda _: None)

    def computing(self, what: str, size: int) -> AbstractContextManager[Callable[[int], None]]:
        """Handle a computation over ``size`` tokens before training; otherwise as ``reading``."""
        return nullcontext(lambda _: None)

    def prepared(self, run: Any) -> None:
        """Handle that model and data are ready; an error raised here ends the run."""

    def began(self, step: int, steps: int) -> None:
        """Handle the start of training after ``step`` of ``steps``."""

    def step(self, line: dict[str, Any]) -> None:
        """Handle a step: step, loss, lr, gradient_norm, tokens_per_second, memory_bytes, ..."""

    def evaluated(self, line: dict[str, Any]) -> None:
        """Handle an evaluation: step, held_out_loss, perplexity, token_accuracy, entropy, ..."""

    def sampled(self, step: int, prompt: str, text: str) -> None:
        """Handle a sample: the text with which the model continues a prompt of the settings."""

    def ended(self, run: Any) -> None:
        """Handle the end of training, at its last step or by an error."""

    def finished(self, run: Any) -> None:
        """Handle the saved model, of this run or of an earlier run in the same folder."""


_listener: ContextVar[Listener] = ContextVar("listener", default=Listener())  # noqa: B039 -- no state


@contextmanager
def hearing(listener: Listener) -> Iterator[None]:
    """Send the events inside a ``with`` block to a listener."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def announce(text: str) -> None:
    """Send a message to the listener."""
    _listener.get().announce(text)


def reading(pieces: Iterable[PieceT], size: int, what: str) -> Iterator[PieceT]:
    """Yield tuples that start with bytes, and report the number of bytes to the listener.

    ``size`` is the total number of bytes, ``what`` a title for the progress.
    """
    return _counted(pieces, _listener.get().reading(what, size))


def computing(pieces: Iterable[PieceT], size: int, what: str) -> Iterator[PieceT]:
    """Yield tuples that start with a range of tokens, and report the number of tokens."""
    return _counted(pieces, _listener.get().computing(what, size))


def _counted(
    pieces: Iterable[PieceT], counter: AbstractContextManager[Callable[[int], None]]
) -> Iterator[PieceT]:
    with counter as count:
        for piece in pieces:
            yield piece
            count(len(piece[0]))
