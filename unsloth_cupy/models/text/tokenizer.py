"""Text as the tokens of a model, and back; chats as the text that it was trained on.

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
OTHERS = (("tokenizer.model",), ("vocab.json", "merges.txt"))  # forms that transformers converts
AROUND = ("tokenizer_config.json", "added_tokens.json", "special_tokens_map.json", "config.json")


class Tokenizer:
    """The tokenizer and the chat template of a model.

    ``model.tokenizer`` is that of a loaded model.

    Parameters
    ----------
    folder : path
        Holds tokenizer.json, and tokenizer_config.json or chat_template.jinja if the model has a
        chat template; without one, chats are ChatML.

    Raises
    ------
    ConfigError
        tokenizer.json is missing or broken; or the package ``tokenizers`` is.
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
        return self  # it does not change

    def __len__(self) -> int:
        """Return the number of tokens, added ones included."""
        return int(self.backend.get_vocab_size())

    def encode(self, text: str, *, special_tokens: bool = True) -> Array:
        """Return the tokens of a text.

        Parameters
        ----------
        text : str
            Special tokens that are written in it, as ``<|im_end|>``, become tokens.
        special_tokens : bool
            Whether to add the tokens with which the model begins or ends every text.  The text of
            a chat already has them.

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
                f"decode: the tokens have the shape {numbers.shape}; pass one row, as tokens[0]"
            )
        return str(self.backend.decode(numbers.tolist(), skip_special_tokens=not special_tokens))

    def chat(self, messages: Sequence[Message], *, answer: bool = True, tools: Tools = None) -> str:
        """Return messages as the text that the model was trained on, by its chat template.

        Parameters
        ----------
        messages : sequence of dict
            Each with ``role`` (system, user, assistant, tool) and ``content``, and what else the
            template reads, as ``tool_calls``.
        answer : bool
            Whether the text ends with the beginning of the assistant's answer.  The date in it is
            then today's; else it is one that never changes, as in training.
        tools : sequence of dict, optional
            JSON schemas of functions that the model may call.

        Raises
        ------
        ConfigError
            The template does not take the messages.
        """
        if answer:
            return self.template.question(messages, tools=tools)
        return self.template.text(messages, tools=tools)


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has a tokenizer in a form that is read here, or converted."""
    return (folder / FILE).is_file() or other_form(folder) is not None


def other_form(folder: Path) -> tuple[str, ...] | None:
    """Return the files of a tokenizer that is not in tokenizer.json; None: there are none."""
    return next((each for each in OTHERS if all((folder / n).is_file() for n in each)), None)


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a model folder; transformers converts one in another form."""
    from tokenizers import Tokenizer

    path, text = tokenizer_text(folder)
    with _whole(path):
        tokenizer = Tokenizer.from_str(text)
        tokenizer.no_truncation()  # some files store truncation and padding of an earlier call
        tokenizer.no_padding()
    return Guarded(tokenizer, path)


def tokenizer_text(folder: Path) -> tuple[Path, str]:
    """Return a file of a folder's tokenizer, and its text in the form of tokenizer.json."""
    path, form = folder / FILE, other_form(folder)
    if path.exists():
        return path, read_text(path, TOKENIZER)
    if form is None:
        raise ConfigError(
            f"{folder} holds no {FILE}; copy it from the model's page into the folder"
        )
    files = [folder / name for name in (*form, *AROUND)]
    states = [(f.stat().st_mtime_ns, f.stat().st_size) for f in files if f.is_file()]
    return folder / form[0], _converted(folder.resolve(), form, tuple(states))


@functools.lru_cache(maxsize=2)  # of a large vocabulary it takes seconds
def _converted(folder: Path, form: tuple[str, ...], states: Any) -> str:
    """Return the tokenizer.json that transformers makes of a folder's files, which have states."""
    try:
        from transformers import AutoTokenizer

        options: Any = {"local_files_only": True, "trust_remote_code": False}
        backend: Any = AutoTokenizer.from_pretrained(str(folder), **options).backend_tokenizer
        if backend.encode("a b").ids:
            return str(backend.to_str())
        reason = "by it a text has no tokens"
    except BaseException as error:
        if not of_library(error):
            raise
        reason = str(error).strip().partition("\n")[0][:200]
    problem = f"{folder} holds no {FILE}, and transformers makes none of {' and '.join(form)}"
    install = "pip install transformers sentencepiece protobuf tiktoken"
    call = f"AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
    cure = f"{install}, and call {call}, or copy {FILE} from the model's page"
    raise ConfigError(f"{problem} ({reason}); {cure}")


class Guarded:
    """A tokenizer of a file, whose calls raise ConfigError where its package fails or panics.

    Some faults of a file show only when a text is encoded or decoded.
    """

    def __init__(self, tokenizer: Any, path: Path) -> None:
        self._tokenizer, self._path = tokenizer, path

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # asked for before __init__, as copy does
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
    """Raise a ConfigError that names a tokenizer's file where the package raises an error."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, ConfigError) or not of_library(error):
            raise
        raise ConfigError(f"{path} is broken: {error}; fetch it again") from None


def check_tokens(tokenizer: Any, tokens: Iterable[int], vocabulary: int) -> None:
    """Raise for a token beyond the model's vocabulary among these tokens of a text.

    Tokens that the text does not use are not checked.
    """
    most = max(tokens, default=0)
    if most >= vocabulary:
        raise ConfigError(
            f"the tokenizer's token {most} ({tokenizer.id_to_token(most)!r}) is beyond the model's"
            f" vocabulary of {vocabulary}; they do not belong together: copy both from one place"
        )
