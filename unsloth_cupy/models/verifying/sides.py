"""The two sides of a comparison: the trained model, and a file or folder as its reader sees it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ...core.dtypes import FLOAT32, Array
from ...errors import ConfigError
from ..adapters.adapter import Adapter
from ..adapters.probe import dense
from ..configs.config import Config
from ..folders.stored import stored_model
from ..gguf.as_read import GgufAsRead
from ..text.chat import Chat, Message
from ..text.tokenizer import has_tokenizer, load_tokenizer
from .modelfile import Modelfile

Prompt = str | Sequence[Message]
DTYPES = {"float16": "F16", "bfloat16": "BF16"}


@dataclass
class Side:
    """A model whose parameters are read one by one.

    Attributes
    ----------
    where : path
        Named in messages.
    config : Config
    texts : dict
        JSON files, by name.
    read : callable
        (name) returns a parameter with its adapter merged, dense in float32.
    type_of : callable
        (name) returns the type in which the file stores it, such as Q8_0.
    words : Path or None
        The folder of tokenizer and chat template; None for a GGUF file, which has its own.
    file : GgufAsRead or None
        The GGUF file; None for a folder and a model in memory.
    adapter : Adapter or None
        The adapter that ``read`` merges.
    plain : callable or None
        (name) returns a parameter without the adapter.
    modelfile : Modelfile or None
        The Modelfile that names the GGUF file.
    some : callable or None
        (name) returns a function that reads rows of a parameter alone; None: it is read whole.
    """

    where: Any
    config: Config
    texts: Mapping[str, Mapping[str, Any]]
    read: Callable[[str], Array]
    type_of: Callable[[str], str]
    words: Path | None = None
    file: GgufAsRead | None = None
    adapter: Adapter | None = None
    plain: Callable[[str], Array] | None = None
    modelfile: Modelfile | None = None
    some: Callable[[str], Callable[[slice], Array] | None] | None = None

    def as_trained(self, config: Config) -> Mapping[str, Callable[[], Array] | None]:
        """Return functions that read the parameters of another config, by name.

        None: ``read(name)`` returns the same.
        """
        if self.file is not None:
            return self.file.as_trained(config)
        own, shapes = self.config.shapes(), config.shapes()
        return dict.fromkeys(name for name, shape in shapes.items() if own.get(name) == shape)

    def rows(self, name: str) -> Callable[[slice], Array]:
        """Return a function that reads rows of a matrix: only these, if it is one of a file."""
        if self.file is not None:
            return self.file.rows(name)
        rows = None if self.some is None else self.some(name)
        return self.read(name).__getitem__ if rows is None else rows

    def tensor(self, name: str) -> str:
        """Return the name of a parameter's tensor in the file."""
        if self.file is not None and name in self.file.homes:
            return self.file.tensors(name)[0].removesuffix(".weight")
        return name.removesuffix(".weight")

    # ---- text -----------------------------------------------------------------------------------
    @cached_property
    def backend(self) -> Any:
        """The tokenizer."""
        if self.file is not None:
            return self.file.backend
        if self.words is None or not has_tokenizer(self.words):
            cure = "copy tokenizer.json from the model's page into the folder"
            raise ConfigError(f"verify: {self.where} has no tokenizer; {cure}")
        return load_tokenizer(self.words)

    @cached_property
    def chat(self) -> Chat:
        """The chat template."""
        return Chat(self.words) if self.file is None else self.file.chat

    def text(self, prompt: Prompt, as_chat: bool) -> str:
        """Return a prompt as text; messages up to the start of an answer."""
        if isinstance(prompt, str) and not as_chat:
            return prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        if not as_chat:
            return "\n".join(str(each.get("content") or "") for each in messages)
        if self.modelfile is not None:
            return self.modelfile.text(messages)
        if self.file is not None:
            return self.file.prompt(messages)
        return self.chat.text(messages, answer=True, today=False)

    def taken_off(self, text: str, as_chat: bool) -> str:
        """Return a text of the trained model without what the reader takes off its own texts."""
        return text if self.file is None or not as_chat else self.file.taken_off(text)

    def tokens(self, text: str, as_chat: bool) -> list[int]:
        """Return the tokens of a text; llama.cpp adds tokens around the text of a chat, too."""
        if self.file is not None:
            return self.file.tokens(text)
        return [*self.backend.encode(text, add_special_tokens=not as_chat).ids]

    @cached_property
    def answer_end(self) -> int | None:
        """The first added token after an answer in the chat template; None without one."""
        if not self.chat.stored:
            return None
        mark = "zqsay"
        talk = [{"role": "user", "content": "zqask"}, {"role": "assistant", "content": mark}]
        try:
            text = self.chat.text(talk, today=False).rpartition(mark)[2]
        except ConfigError:
            return None
        added = self.backend.get_added_tokens_decoder()
        ids = self.backend.encode(text, add_special_tokens=False).ids
        return next((n for n in ids if n in added), None)

    @property
    def ends(self) -> frozenset[int]:
        """The tokens at which the reader stops."""
        if self.file is None:
            return frozenset(self.config.end_tokens)
        stops = () if self.modelfile is None else self.modelfile.stops
        named = (self.backend.token_to_id(text) for text in stops)
        return self.file.ends.union(n for n in named if n is not None)

    @property
    def stops(self) -> frozenset[int]:
        """The tokens that end an answer of the trained model."""
        own = {*self.config.end_tokens, *([] if self.answer_end is None else [self.answer_end])}
        return frozenset(n for n in own if n < self.config.vocab)

    def needed_ends(self, reader: "Side") -> list[int]:
        """Return the tokens at which a reader must stop, as answers of this model end there.

        A folder need not stop at a token of the template at which this one does not stop, either.
        """
        own = [n for n in self.config.end_tokens if n < self.config.vocab]
        known = self.answer_end in own or reader.file is not None
        return own if self.answer_end is None or not known else [self.answer_end]


def folder_side(call: str, folder: Any, base: Any = None) -> Side:
    """Return the side of a folder: of a model, an adapter with its base, or a run."""
    model = stored_model(call, folder, base)
    adapter, homes = model.adapter, model.homes
    exact = adapter is None or adapter.into is None

    def read(name: str) -> Array:
        return dense(model.merged(name, FLOAT32, exact=exact))

    def type_of(name: str) -> str:
        home = homes[name]
        if home.kind is not None:
            return str(home.kind.KIND).upper()
        return DTYPES.get("" if home.dtype is None else home.dtype.name, "F32")

    def plain(name: str) -> Array:
        return dense(model.read(name, FLOAT32))

    where = folder if isinstance(folder, Path) else model.path
    return Side(
        where, model.config, model.texts, read, type_of, model.words,
        adapter=adapter, plain=None if adapter is None else plain,
        some=lambda name: model.rows(name, FLOAT32),
    )  # fmt: skip


def file_side(path: Path, modelfile: Modelfile | None = None) -> Side:
    """Return the side of a GGUF file as llama.cpp reads it, or as Ollama reads its Modelfile."""
    file = GgufAsRead(path)
    texts: dict[str, Any] = {"config.json": {}}
    return Side(path, file.config, texts, file.read, file.type_of, file=file, modelfile=modelfile)
