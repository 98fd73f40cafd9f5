"""Streams the continuation of a text by a model to standard output."""

from collections.abc import Sequence
from typing import Any

from ..models.generation.streaming import Continuation
from ..models.text.chat import Message
from ..models.text.tokenizer import Tokenizer
from ..models.transformer import Transformer
from .echo import echo

NEW, TEMPERATURE = 200, 0.8  # new tokens, and the default temperature, also of a run's sample


def stream_text(
    model: Transformer,
    tokenizer: Tokenizer | None,
    prompt: str | Sequence[Message] | Sequence[int],
    **options: Any,
) -> tuple[str, int]:
    """Write a prompt that is not a chat, and its continuation, to standard output.

    The options are those of ``Transformer.generate_text``; the prompt may also be tokens.

    Returns
    -------
    continuation, count : str, int
        The text written after the prompt, and the number of its tokens.
    """
    continuation, written = Continuation(model, tokenizer, prompt, **options), ""
    if isinstance(prompt, str):
        echo(prompt, nl=False)
    for piece in continuation:
        echo(piece, nl=False)
        written += piece
    echo()
    if continuation.full:
        echo(f"The text ends at the model's {model.config.positions} positions.", err=True)
    return written, continuation.count
