"""llama.cpp itself, by the package xllamacpp: texts, tokens and log-probabilities of a file."""

import json
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...core.dtypes import Array
from ...errors import ConfigError
from ...files import of_library

# Shares of the largest logit by which llama.cpp's rounding of activations moves log-probabilities
# of small dense models, at most and doubled: GELU and attention in float16; 16 bits; 8 bits.
ACTIVATIONS = {"F32": 1e-3, "F16": 4e-3, "BF16": 2e-2}
ACTIVATIONS_OF_BLOCKS = 0.12
ROOM = 8  # positions of the context after the longest prompt


class LlamaCpp:
    """A file in llama.cpp, on the CPU, with a cache in float32.

    Raises
    ------
    ConfigError
        The package xllamacpp is missing, or llama.cpp does not load the file.
    """

    def __init__(self, file: Path, context: int) -> None:
        try:
            import xllamacpp
        except ImportError:
            cure = "install it with pip install xllamacpp"
            raise ConfigError(f"verify: llama.cpp needs the package xllamacpp; {cure}") from None
        options = xllamacpp.CommonParams()
        options.model.path = str(file)
        options.n_ctx, options.n_parallel, options.verbosity = context + ROOM, 1, -1
        options.n_gpu_layers = 0
        options.cache_type_k = options.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        flash = xllamacpp.llama_flash_attn_type
        options.flash_attn_type = flash.LLAMA_FLASH_ATTN_TYPE_DISABLED  # it rounds to float16
        options.warmup = options.fit_params = False
        try:
            self.server = xllamacpp.Server(options)
        except BaseException as error:
            if not of_library(error):
                raise
            raise ConfigError(f"verify: llama.cpp does not load {file}: {error}") from None
        self.version = str(xllamacpp.__version__)

    def text(self, messages: Sequence[Any]) -> str:
        """Return messages as text, by the file's template."""
        return str(self._asked("apply-template", {"messages": [*messages]})["prompt"])

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text, with the tokens that the file adds around it."""
        options = {"content": text, "add_special": True, "parse_special": True}
        return [int(n) for n in self._asked("tokenize", options)["tokens"]]

    def log_probs(self, tokens: Sequence[int], vocab: int) -> Array:
        """Return the log-probability of each next token, (vocab,) float64."""
        options = {"prompt": [int(n) for n in tokens], "n_predict": 1, "temperature": 0.0}
        step = self.server.handle_completions(options | {"logprobs": vocab})
        row = np.full(vocab, np.nan)
        for each in step["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
            row[each["id"]] = each["logprob"]
        return row

    def _asked(self, path: str, body: Any) -> Any:
        """Return the answer of the server in this process."""
        kind = {"Content-Type": "application/json"}
        where = f"{self.server.listening_address}/{path}"
        with urllib.request.urlopen(
            urllib.request.Request(where, json.dumps(body).encode(), kind)
        ) as answer:
            return json.load(answer)


def activations(kinds: Sequence[str]) -> float:
    """Return the share of the largest logit that rounded activations explain, for some types."""
    return max(ACTIVATIONS.get(kind, ACTIVATIONS_OF_BLOCKS) for kind in kinds)
