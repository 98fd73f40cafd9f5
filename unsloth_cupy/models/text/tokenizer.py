"""The tokenizer of a model: encoding and decoding of text, and formatting of chats.

tokenizer = Tokenizer("folder")
tokens = tokenizer.encode("Once upon a time")
text = tokenizer.decode(tokens)
"""

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from ...core.dtypes import Array
from ...errors import ConfigError
from ...files import TOKENIZER, of_library, path_of, read_text
from ...placement import to_numpy
from ..gguf.opening import folder_of
from .chat import Chat, Message, Tools

FILE = "tokenizer.json"
OTHERS = (("tokenizer.model",), ("vocab.json", "merges.txt"))  # files that transformers converts
AROUND = ("tokenizer_config.json", "added_tokens.json", "special_tokens_map.json", "config.json")


class Tokenizer:
    """The tokenizer and the chat template of a model.

    A loaded model has its tokenizer in ``model.tokenizer``.

    Parameters
    ----------
    folder : path
        Folder with tokenizer.json, and with tokenizer_config.json or chat_template.jinja if the
        model has a chat template.  Without a template, chats are formatted as ChatML.

    Raises
    ------
    ConfigError
        tokenizer.json is missing or broken, or the package ``tokenizers`` is missing.
    """

    def __init__(self, folder: str | PathLike[str]) -> None:
        path = folder_of(path_of("Tokenizer", folder))
        self.backend, self.template = load_tokenizer(path), Chat(path)

    @classmethod
    def of(cls, backend: Any, template: Chat) -> "Tokenizer":
        """Return the tokenizer of a ``tokenizers.Tokenizer`` and a chat template."""
        instance = cls.__new__(cls)
        instance.backend, instance.template = backend, template
        return instance

    def __deepcopy__(self, memo: Any) -> "Tokenizer":
        return self  # a tokenizer is immutable

    def __len__(self) -> int:
        """Return the number of tokens, added ones included."""
        return int(self.backend.get_vocab_size())

    def encode(self, text: str, *, special_tokens: bool = True) -> Array:
        """Return the tokens of a text.

        Parameters
        ----------
        text : str
            Special tokens in the text, such as ``<|im_end|>``, become tokens.
        special_tokens : bool
            Whether to add the tokens with which every text of the model begins or ends.  The text
            of a chat already has them.

        Returns
        -------
        tokens : (tokens,) int64
        """
        ids = self.backend.encode(text, add_special_tokens=special_tokens).ids
        return np.asarray(ids, np.int64)

    def decode(self, tokens: Array | Sequence[int], *, special_tokens: bool = False) -> str:
        """Return the text of tokens, (tokens,) integers; without special tokens by default."""
        numbers = np.asarray(to_numpy(tokens) if hasattr(tokens, "shape") else tokens, np.int64)
        if numbers.ndim != 1:
            raise ConfigError(
                f"decode: tokens have the shape {numbers.shape}; pass one row, such as tokens[0]"
            )
        return str(self.backend.decode(numbers.tolist(), skip_special_tokens=not special_tokens))

    def chat(self, messages: Sequence[Message], *, answer: bool = True, tools: Tools = None) -> str:
        """Return messages as text, formatted by the chat template of the model.

        Parameters
        ----------
        messages : sequence of dict
            Each with ``role`` (system, user, assistant, tool) and ``content``, and further keys
            that the template reads, such as ``tool_calls``.
        answer : bool
            Whether the text ends with the beginning of the assistant's answer.  The date in it is
            then today's; otherwise it is the fixed date of training texts.
        tools : sequence of dict, optional
            JSON schemas of functions that the model may call.

        Raises
        ------
        ConfigError
            The template rejects the messages.
        """
        if answer:
            return self.template.question(messages, tools=tools)
        return self.template.text(messages, tools=tools)


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has a tokenizer.json, or files that transformers converts."""
    return (folder / FILE).is_file() or other_form(folder) is not None


def other_form(folder: Path) -> tuple[str, ...] | None:
    """Return the names of tokenizer files that transformers converts; None without any."""
    return next((each for each in OTHERS if all((folder / n).is_file() for n in each)), None)


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a model folder; transformers converts other files if needed."""
    from tokenizers import Tokenizer

    path, text = tokenizer_text(folder)
    with _whole(path):
        tokenizer = Tokenizer.from_str(text)
        tokenizer.no_truncation()  # some files store truncation and padding of an earlier call
        tokenizer.no_padding()
    return Guarded(tokenizer, path)


def tokenizer_text(folder: Path) -> tuple[Path, str]:
    """Return the path of a folder's tokenizer, and its content in the format of tokenizer.json."""
    path, form = folder / FILE, other_form(folder)
    if path.exists():
        return path, read_text(path, TOKENIZER)
    if form is None:
        raise ConfigError(f"{folder} has no {FILE}; copy it from the model's page into the folder")
    files = [folder / name for name in (*form, *AROUND)]
    states = [(f.stat().st_mtime_ns, f.stat().st_size) for f in files if f.is_file()]
    return folder / form[0], _converted(folder.resolve(), form, tuple(states))


@functools.lru_cache(maxsize=2)  # a large vocabulary takes seconds
def _converted(folder: Path, form: tuple[str, ...], states: Any) -> str:
    """Return the tokenizer.json that transformers converts from a folder's files.

    ``states``, the times and sizes of the files, makes the result depend on their versions.
    """
    try:
        from transformers import AutoTokenizer

        options: Any = {"local_files_only": True, "trust_remote_code": False}
        backend: Any = AutoTokenizer.from_pretrained(str(folder), **options).backend_tokenizer
        if backend.encode("a b").ids:
            return str(backend.to_str())
        reason = "with it, a text has no tokens"
    except BaseException as error:
        if not of_library(error):
            raise
        reason = str(error).strip().partition("\n")[0][:200]
    problem = f"{folder} has no {FILE}, and transformers cannot convert {' and '.join(form)}"
    install = "pip install transformers sentencepiece protobuf tiktoken"
    call = f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
    cure = f"{install}, and call {call}, or copy {FILE} from the model's page"
    raise ConfigError(f"{problem} ({reason}); {cure}")


class Guarded:
    """A tokenizer whose calls raise ConfigError if its package raises or panics.

    Some faults in a file appear only when a text is encoded or decoded.
    """

    def __init__(self, tokenizer: Any, path: Path) -> None:
        self._tokenizer, self._path = tokenizer, path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copy looks up attributes before __init__
            raise AttributeError(name)
        value = getattr(self._tokenizer, name)
        if not callable(value):
            return value

        @functools.wraps(value)
        def call(*arguments: Any, **options: Any) -> Any:
            with _whole(self._path):
                return value(*arguments, **options)

        return call


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    """Return a context in which errors of the package become a ConfigError with the path."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, ConfigError) or not of_library(error):
            raise
        raise ConfigError(f"{path} is broken: {error}; fetch it again") from None


def check_tokens(tokenizer: Any, tokens: Iterable[int], vocabulary: int) -> None:
    """Raise if a text has a token beyond the model's vocabulary.

    Only the tokens of the text are checked.
    """
    most = max(tokens, default=0)
    if most >= vocabulary:
        raise ConfigError(
            f"the tokenizer's token {most} ({tokenizer.id_to_token(most)!r}) is beyond the model's"
            f" vocabulary of {vocabulary}; copy tokenizer and model from the same place"
        )
