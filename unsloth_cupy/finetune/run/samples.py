"""Samples at each evaluation: the model continues the prompts of the settings."""

from typing import Any

import numpy as np

from ...errors import ConfigError
from ...placement import to_device_of
from ..naming import named

TOKENS = 60  # maximum number of new tokens per prompt


def check_prompts(loop: Any) -> None:
    """Raise a ConfigError if the model cannot continue the prompts of the settings."""
    prompts = loop.plan.sample_prompt
    if prompts and not loop.ranks.whole:
        problem = "is not supported when ranks split the model"
        raise ConfigError(f"{named('sample_prompt')} {problem}; leave it out")
    if prompts and loop.method.head is not None:
        problem = f"needs a language model, which {named(method=loop.plan.method)} does not train"
        raise ConfigError(f"{named('sample_prompt')} {problem}; leave it out")
    for prompt in prompts:
        prompt_tokens(loop, prompt)


def prompt_tokens(loop: Any, prompt: str) -> list[int]:
    """Return the tokens of a prompt; in a run on chats, with the chat template.

    Raises
    ------
    ConfigError
        The prompt is empty, or leaves no position for a new token.
    """
    if loop.chat is None:
        tokens = loop.tokenizer.encode(prompt).ids
    else:
        text = loop.chat.asked([{"role": "user", "content": prompt}])
        tokens = loop.tokenizer.encode(text, add_special_tokens=False).ids
    if not 0 < len(tokens) < loop.model.config.positions:
        has = f"{len(tokens)} tokens, and the model {loop.model.config.positions} positions"
        raise ConfigError(f"{named(sample_prompt=prompt)} has {has}; give another one")
    return [*tokens]


def write_samples(loop: Any) -> None:
    """Continue the prompts greedily, and log the texts."""
    model, ends = loop.model, loop.model.config.end_tokens
    for prompt in loop.plan.sample_prompt if loop.ranks.first else ():
        tokens = prompt_tokens(loop, prompt)
        placed = to_device_of(np.array([tokens]), model.table)
        room = min(TOKENS, model.config.positions - len(tokens))
        added = [int(token[0]) for token in model.stream(placed, max_new_tokens=room)]
        text = loop.tokenizer.decode([token for token in added if token not in ends])
        loop.run.append_sample({"step": loop.step, "prompt": prompt, "text": text})
        loop.listener.sampled(loop.step, prompt, text)
