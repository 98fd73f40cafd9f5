"""The options of generation, checked once."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..core.call import check_options, is_integer, is_number
from ..core.dtypes import Array
from ..errors import ConfigError
from ..inference.paged_kv_cache import PagedKVCache


@check_options
@dataclass(frozen=True)
class Options:
    """The options of ``Transformer.generate``; its docstring describes them.

    ``first`` is the number of the first row among all prompts, from which it draws.
    """

    max_new_tokens: int
    min_new_tokens: int = 0
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: int | Sequence[int] | None = None
    cache: PagedKVCache | None = None
    sequences: Sequence[int] | None = None
    cache_dtype: str | None = None
    first: int = 0
    draft: str | None = None
    CALL: ClassVar[str] = "generate"

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "min_new_tokens"):
            self._require(name, is_integer(getattr(self, name), 0), "be an integer, 0 or more")
        self._require(
            "min_new_tokens",
            self.min_new_tokens <= self.max_new_tokens,
            f"not exceed max_new_tokens={self.max_new_tokens}",
        )
        valid_temperature = is_number(self.temperature) and 0 <= self.temperature < float("inf")
        self._require("temperature", valid_temperature, "be a number, 0 (greedy) or more")
        self._require(
            "top_k", self.top_k is None or is_integer(self.top_k, 1), "be 1 or more, or None"
        )
        valid_top_p = self.top_p is None or (is_number(self.top_p) and 0 < self.top_p <= 1)
        self._require("top_p", valid_top_p, "be in (0, 1], or None")
        valid_min_p = self.min_p is None or (is_number(self.min_p) and 0 <= self.min_p <= 1)
        self._require("min_p", valid_min_p, "be in [0, 1], or None")
        penalty = self.repetition_penalty
        valid_penalty = penalty is None or (is_number(penalty) and 0 < penalty < float("inf"))
        self._require("repetition_penalty", valid_penalty, "be a number above 0, or None")
        int8 = isinstance(self.cache_dtype, str) and self.cache_dtype == "int8"
        supported = self.cache_dtype is None or (int8 and self.cache is None)
        self._require(
            "cache_dtype",
            supported,
            "be 'int8', or None; it must be None with a cache",
        )
        valid_seed = self.seed is None or is_integer(self.seed, 0)
        self._require("seed", valid_seed, "be an integer of 0 or more, or None")

        self._require("draft", self.draft in (None, "mtp"), "be 'mtp', or None")
        if self.draft is not None:
            why = "be None: draft heads are for the most likely tokens, temperature=0"
            self._require("draft", self.temperature == 0, why)
            pages = self.cache is None and self.sequences is None
            self._require("draft", pages, "be None with a cache: draft heads have their own")

        if self.temperature == 0:
            unused = [
                n for n in ("top_k", "top_p", "min_p", "seed") if getattr(self, n) is not None
            ]
            if unused:
                warnings.warn(
                    f"{self.CALL}: temperature=0 takes the most likely token;"
                    f" {', '.join(unused)} must be None, or pass a temperature above 0 to sample",
                    stacklevel=2,
                )

    def _require(self, name: str, valid: bool, must: str) -> None:
        """Raise a ConfigError that says what an option must be, unless it is valid."""
        if not valid:
            raise ConfigError(f"{self.CALL}: {name}={getattr(self, name)!r} must {must}")

    def ends(self, default: Sequence[int], vocab: int) -> Array:
        """Return the tokens that end a row; ``default`` are the end tokens of the config."""
        stop = self.stop
        if stop is None:
            return np.array([token for token in default if token < vocab], int)
        listed = [*stop] if isinstance(stop, Sequence) else [stop]
        if isinstance(stop, bytes) or not all(is_integer(token, 0) for token in listed):
            raise ConfigError(f"generate: stop={stop!r} must be a token, a list of them, or None")
        if any(token >= vocab for token in listed):
            raise ConfigError(f"generate: stop={stop!r} is outside the vocabulary of {vocab}")
        return np.array(listed, int)
