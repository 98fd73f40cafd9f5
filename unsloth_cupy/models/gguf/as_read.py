"""A GGUF file as llama.cpp reads it: config, tokens of a text, chat template, end tokens.

``models.load`` reads a file as the model that was exported.  llama.cpp differs in some rules, which
this module has: windows that an architecture lacks, epsilons, texts without NFC, and templates.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ...core.dtypes import FLOAT32, Array
from ...errors import ConfigError
from ...files import of_library
from ..adapters.probe import dense
from ..configs.config import Config, Rope
from ..configs.heads import OWN
from ..folders.lazy_parameter import LazyParameter, StoredTensor
from ..parse import parse
from ..text.chat import CHATML, FIXED, Chat, Message, in_parts
from .finding import find_gguf_tensors
from .reading import AS_STORED, opened_gguf

# Texts of tokens at which llama.cpp stops in any file, besides those in the keys of a file.
ENDS = frozenset((
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
    *("<end_of_turn>", "<turn|>", "<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]"),
    *("[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<|tool_response>"),
    *("<\uff5cend\u2581of\u2581sentence\uff5c>", "</s>"),
    *("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"),
))  # fmt: skip
# Beside both tokens of a pair, <|end|> does not end an answer: it ends one of its messages.
INNER = tuple(
    {call, other} for call in ("<|call|>", "<|calls|>") for other in ("<|return|>", "<|flush|>")
)
KEY = "tokenizer.ggml."


class GgufAsRead:
    """A GGUF file as llama.cpp reads it.

    Attributes
    ----------
    path : Path
    values : dict
        The keys of the file.
    config : Config
        What llama.cpp computes.

    Raises
    ------
    ConfigError
        The file is broken, or its architecture, tokenizer or a key is not known.
    """

    def __init__(self, path: Path) -> None:
        from ._families import known_as
        from ._settings import settings
        from ._vocabulary import tokenizer_files

        self.path = path
        try:
            self.file = opened_gguf(path)
            self.values = self.file.values
            config = parse(settings(self.file))
            self.files = tokenizer_files(self.file)
        except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, ConfigError):
                raise
            problem = f"{path}: the keys contradict each other ({error})"
            raise ConfigError(f"{problem}; fetch the file again") from None
        known = known_as("verify", config)
        if not known.windows:
            config = replace(config, window=None)
        changes: dict[str, Any] = {"inner_eps": config.eps}
        changes["ropes"] = {kind: _rounded(rope) for kind, rope in config.ropes.items()}
        if known.name == "bitnet":
            changes["activation"] = "silu"
        self.config = replace(config, **changes)
        self.homes = find_gguf_tensors(path, config, OWN)

    # ---- tokens ---------------------------------------------------------------------------------
    @cached_property
    def backend(self) -> Any:
        """The tokenizer without the tokens around a text; llama.cpp does not apply NFC."""
        import json

        from tokenizers import Tokenizer

        values = dict(self.files["tokenizer.json"])
        if (values.get("normalizer") or {}).get("type") == "NFC":
            values["normalizer"] = None
        try:
            return Tokenizer.from_str(json.dumps(values))
        except BaseException as error:
            if not of_library(error):
                raise
            problem = f"{self.path}: the tokenizer is broken ({error})"
            raise ConfigError(f"{problem}; fetch the file again") from None

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a text, with the tokens that the file adds around a text."""
        return [*self.backend.encode(text).ids]

    def named(self, role: str) -> int | None:
        """Return the token of a role, such as bos or eos; None if the file has none."""
        number = self.values.get(f"{KEY}{role}_token_id")
        return number if isinstance(number, int) and 0 <= number < self.config.vocab else None

    @property
    def added(self) -> tuple[bool, bool]:
        """Whether the file adds a token before and after every text."""
        settings = self.files["tokenizer_config.json"]
        return bool(settings["add_bos_token"]), bool(settings["add_eos_token"])

    @cached_property
    def ends(self) -> frozenset[int]:
        """The tokens at which llama.cpp stops: by the keys, and by usual names."""
        named = (self.named(role) for role in ("eos", "eot", "eom"))
        texts = self.values[f"{KEY}tokens"]
        usual = ENDS.intersection(texts)
        if any(pair <= usual for pair in INNER):
            usual -= {"<|end|>"}
        ends = {n for n, text in enumerate(texts) if text in usual}
        return frozenset(ends.union(n for n in named if n is not None))

    # ---- chats ----------------------------------------------------------------------------------
    @cached_property
    def chat(self) -> Chat:
        """The chat template; ChatML if the file has none."""
        source = self.values.get("tokenizer.chat_template")
        chat = Chat(None)
        if isinstance(source, str) and source != CHATML:
            chat.source, chat.own, chat.stored = source, True, True
        chat.where = str(self.path)
        texts = self.values[f"{KEY}tokens"]
        named = {f"{role}_token": self.named(role) for role in ("bos", "eos")}
        chat.tokens = {name: "" if n is None else texts[n] for name, n in named.items()}
        return chat

    def prompt(self, messages: Sequence[Message]) -> str:
        """Return messages as the text that llama.cpp tokenizes, up to the start of an answer.

        A token at the start or end of the text that the file adds anyway is taken off once.

        Raises
        ------
        ConfigError
            The template rejects the messages.
        """
        form = in_parts if self.chat.takes_parts else dict
        call: dict[str, Any] = {
            "messages": [form(each) for each in messages],
            "add_generation_prompt": True,
        }
        call |= {**self.chat.tokens, "now": FIXED.isoformat()}
        (result,) = self.chat.template.render([call])
        if result.error:
            raise self.chat.refused(result.error)
        return self.taken_off(result.text)

    def taken_off(self, text: str) -> str:
        """Return the text of a chat without the tokens that the file adds around it, once each."""
        (begins, ends), tokens = self.added, self.chat.tokens
        text = text.removeprefix(tokens["bos_token"] * begins)
        return text.removesuffix(tokens["eos_token"] * ends)

    # ---- weights --------------------------------------------------------------------------------
    def read(self, name: str) -> Array:
        """Return a parameter of ``config``, dense in float32."""
        return self._read(self.homes[name], name)

    def _read(self, home: StoredTensor, name: str) -> Array:
        return dense(LazyParameter(name, home, self._files, FLOAT32).whole())

    @property
    def _files(self) -> Any:
        """The open file, by its path and by the path of its first part."""
        return {str(self.path): self.file, str(self.file.path): self.file}

    def rows(self, name: str) -> Callable[[slice], Array]:
        """Return a function that reads rows of a table or a head alone."""
        lazy = LazyParameter(name, self.homes[name], self._files, FLOAT32)
        return lambda part: dense(lazy.computed(part))

    def tensors(self, name: str) -> list[str]:
        """Return the names of the tensors that store a parameter."""
        home = self.homes[name]
        parts = [home.stored, *(stored for _, stored in home.parts.values())]
        return [part.removesuffix(AS_STORED) for part in parts]

    def type_of(self, name: str) -> str:
        """Return the type of a parameter, such as Q8_0."""
        tensor = self.file.tensors.get(self.tensors(name)[0])
        return "F32" if tensor is None else str(tensor.type.name)

    def as_trained(self, config: Config) -> Mapping[str, Any]:
        """Return functions that read the parameters of another config from the file, by name.

        None: ``read(name)`` returns the same.  Factors that an export multiplies into weights are
        divided off.  Parameters that the file does not have under this config are left out.
        """
        from ._families import factor_of, known_as
        from ._parts import has_offset

        try:
            known = known_as("verify", config)
            homes = find_gguf_tensors(self.path, config, OWN)
        except ConfigError:
            shapes = config.shapes()
            same = {n: h for n, h in self.homes.items() if shapes.get(n) == h.shape}
            return dict.fromkeys(same)
        same_rows = (config.interleaved, config.norm_offset, known) == (
            self.config.interleaved, self.config.norm_offset, known_as("verify", self.config)
        )  # fmt: skip

        def reader(name: str) -> Any:
            factor = np.asarray(factor_of(config, known, name), FLOAT32)
            more = np.float32(has_offset(config, name) and config.norm_offset)
            if (factor == 1).all():
                own = self.homes.get(name)
                same = same_rows and own is not None and own.shape == homes[name].shape
                return None if same else lambda: self._read(homes[name], name)
            return lambda: (self._read(homes[name], name) + more) / factor - more

        return {name: reader(name) for name in homes}


def _rounded(rope: Rope) -> Rope:
    """Return rotary positions whose yarn rounds the limits of its columns, as llama.cpp does."""
    scaling = rope.scaling or {}
    if scaling.get("rope_type") != "yarn" or scaling.get("truncate", True):
        return rope
    return replace(rope, scaling={**scaling, "truncate": True})
