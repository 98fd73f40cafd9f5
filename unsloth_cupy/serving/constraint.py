"""Constraints of the tokens of a row: a JSON schema or a regular expression, by llguidance."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..core.dtypes import Array
from ..errors import ConfigError

KINDS = ("json_schema", "regex")


class Grammars:
    """The grammars of constraints over the vocabulary of a tokenizer."""

    def __init__(self, tokenizer: Any, vocab: int, ends: Sequence[int]) -> None:
        try:
            import llguidance
        except ImportError:
            cure = 'pip install "unsloth-cupy[constraints]"'
            raise ConfigError(f"Engine.submit: constraint= needs llguidance: {cure}") from None
        if tokenizer is None:
            cure = 'set model.tokenizer = models.Tokenizer("folder")'
            raise ConfigError(f"Engine.submit: constraint= needs the model's tokenizer; {cure}")
        self.library, self.vocab = llguidance, vocab
        own = [int(token) for token in ends] or None
        try:
            self.tokens = llguidance.LLTokenizer(tokenizer.to_str(), n_vocab=vocab, eos_token=own)
        except ValueError as error:
            problem = f"llguidance does not read this tokenizer: {error}"
            raise ConfigError(f"Engine.submit: constraint=: {problem}") from None

    def matcher(self, constraint: Any) -> Any:
        """Return a new matcher; raise ConfigError for an invalid constraint."""
        known = isinstance(constraint, Mapping) and len(constraint) == 1
        kind = next(iter(constraint), None) if known else None
        if kind not in KINDS:
            cure = 'pass {"json_schema": {...}} or {"regex": "..."}'
            raise ConfigError(f"Engine.submit: constraint={constraint!r}; {cure}")
        matcher, value = self.library.LLMatcher, constraint[kind]
        try:
            if kind == "regex":
                grammar = matcher.grammar_from_regex(value)
            else:
                grammar = matcher.grammar_from_json_schema(
                    value if isinstance(value, str) else json.dumps(value)
                )
        except (TypeError, ValueError) as error:
            raise ConfigError(f"Engine.submit: constraint={constraint!r}: {error}") from None
        result = matcher(self.tokens, grammar)
        if result.is_error():
            first, *more = result.get_error().splitlines()
            reason = next((line for line in more if line.startswith("error: ")), "")
            problem = f"{first} {reason}".strip()
            raise ConfigError(f"Engine.submit: constraint={constraint!r}: {problem}")
        return result

    def allowed(self, matcher: Any) -> Array:
        """Return which tokens may come next: (vocab,) bool."""
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, bitorder="little")[: self.vocab].astype(bool)
