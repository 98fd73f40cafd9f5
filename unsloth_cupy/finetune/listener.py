"""What a run reports: a listener may print it, record it, or draw it.

    with hearing(listener):
        announce("resuming from runs/chat/checkpoint-00000200")
        for (line,) in reading(lines, size, "reading"): ...

The listener is a context, so that what reads a file deep inside a run needs no argument for it.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar

PieceT = TypeVar("PieceT", bound=tuple[Any, ...])


class Listener:
    """Handles the events of a run, in the order of these methods.  Each does nothing: override it.

    ``line`` is a line of the run's log, ``run`` a ``Run``.  In a run of several ranks each rank has
    a listener, and what those of other ranks than 0 print is dropped.
    """

    def announce(self, text: str) -> None:
        """Handle a message in words, one line or several."""

    def reading(self, what: str, size: int) -> AbstractContextManager[Callable[[int], None]]:
        """Handle that ``size`` bytes of a file are read; what is yielded takes those read now."""
        return nullcontext(lambda _: None)

    def computing(self, what: str, size: int) -> AbstractContextManager[Callable[[int], None]]:
        """Handle the reading of ``size`` tokens by a model before training, as ``reading``."""
        return nullcontext(lambda _: None)

    def prepared(self, run: Any) -> None:
        """Handle that model and text are ready; an error raised here ends the run."""

    def began(self, step: int, steps: int) -> None:
        """Handle the start of training after ``step`` of ``steps``."""

    def step(self, line: dict[str, Any]) -> None:
        """Handle a step: step, loss, lr, gradient_norm, tokens_per_second, memory_bytes, ..."""

    def evaluated(self, line: dict[str, Any]) -> None:
        """Handle an evaluation: step, held_out_loss, perplexity, token_accuracy, entropy, ..."""

    def sampled(self, step: int, prompt: str, text: str) -> None:
        """Handle the text with which the model continues a prompt of the settings after a step."""

    def ended(self, run: Any) -> None:
        """Handle the end of training, at its last step or by an error."""

    def finished(self, run: Any) -> None:
        """Handle that the model is saved, now or by an earlier run in the same folder."""


_listener: ContextVar[Listener] = ContextVar("listener", default=Listener())  # noqa: B039 -- no state


@contextmanager
def hearing(listener: Listener) -> Iterator[None]:
    """Report what happens inside a ``with`` block to a listener."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def announce(text: str) -> None:
    """Tell the listener a message."""
    _listener.get().announce(text)


def reading(pieces: Iterable[PieceT], size: int, what: str) -> Iterator[PieceT]:
    """Yield pieces, tuples that start with bytes, and report to the listener how many are read.

    ``size`` is the total number of bytes, ``what`` what is done with them.
    """
    return _counted(pieces, _listener.get().reading(what, size))


def computing(pieces: Iterable[PieceT], size: int, what: str) -> Iterator[PieceT]:
    """Yield pieces, tuples that start with a range of tokens, and report how many."""
    return _counted(pieces, _listener.get().computing(what, size))


def _counted(
    pieces: Iterable[PieceT], counter: AbstractContextManager[Callable[[int], None]]
) -> Iterator[PieceT]:
    with counter as count:
        for piece in pieces:
            yield piece
            count(len(piece[0]))
