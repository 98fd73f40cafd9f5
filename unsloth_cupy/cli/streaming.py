"""Streams the continuation of a text by a model to standard output."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import ConfigError
from ..finetune.streaming import StopStrings, TextStream
from ..finetune.tokenizer import check_tokens
from ..models.transformer import Transformer
from ..placement import to_device_of
from .echo import echo


def stream_text(
    model: Transformer,
    tokenizer: Any,
    prompt: str,
    tokens: Sequence[int] = (),
    *,
    max_new_tokens: int,
    stop: Sequence[str] = (),
    **options: Any,
) -> tuple[str, int]:
    """Write prompt and continuation to standard output, up to one of the stop strings.

    ``tokens`` are those of the prompt, if it was encoded already, as a chat with special tokens is.

    Returns
    -------
    continuation, count : str, int
        The text written after the prompt, and the number of its tokens.
    """
    tokens = list(tokens) or tokenizer.encode(prompt).ids or tokenizer.encode("\n").ids
    if not tokens:
        raise ConfigError("the tokenizer has no token to start from; give a PROMPT")
    check_tokens(tokenizer, tokens, model.config.vocab)
    positions = model.config.positions
    room = positions - len(tokens)
    if room < 1:
        raise ConfigError(
            f"the text is {len(tokens)} tokens and the model has {positions} positions, which"
            " leaves no room to go on; make it shorter"
        )
    stream, stops, written, count = TextStream(tokenizer, tokens), StopStrings(stop), "", 0
    echo(prompt, nl=False)
    prompted = to_device_of(np.array([tokens]), model.table)
    for token in model.stream(prompted, max_new_tokens=min(max_new_tokens, room), **options):
        count += 1
        written += _write(stops.push(stream.push(int(token[0]))))
        if stops.found:
            break
    else:
        written += _write(stops.push(stream.flush()) + stops.flush())
    echo()
    if count == room < max_new_tokens and not stops.found:
        echo(f"The text ends at the model's {positions} positions.", err=True)
    return written, count


def _write(text: str) -> str:
    """Write a text to standard output and return it."""
    echo(text, nl=False)
    return text
