"""An Ollama Modelfile for an exported model: FROM, TEMPLATE and PARAMETER stop.

Ollama reads quoted text literally, without escapes, and drops characters that are not printable.
So texts with quotes are enclosed in triple quotes.  A template is a program in Go's template
language: it writes special characters as Go strings.
"""

import re
from pathlib import Path
from typing import Any

from ..errors import ConfigError, printable
from ..files import atomic_path
from ..finetune.data.chat import Chat
from ..finetune.data.turns import Turns, turns_of

QUOTES = '"""'
# special in a template: characters that begin an action, also together with a following one;
# triple quotes; and characters that may not be printable
SPECIAL = re.compile(r'\{{2,}|\{\Z|"{3,}|[^ -~\t\n]')


def check_modelfile(file: Path) -> Path:
    """Return the path of the Modelfile beside a GGUF file; raise if it cannot be written."""
    path = file.with_name(file.name.removesuffix(".gguf") + ".Modelfile")
    if not file.name.isprintable() or file.name != file.name.strip():
        problem = (
            "a Modelfile cannot name a file with control characters, or spaces around its name"
        )
        raise ConfigError(f"{file.name!a}: {problem}; choose another name")
    if path.exists():
        raise ConfigError(f"{path} exists; remove it, or export to another file")
    return path


def write_modelfile(
    path: Path, file: Path, words: Path, tokenizer: Any, stop: str
) -> tuple[list[str], list[str]]:
    """Write a Modelfile for a GGUF file; return its instructions, and why others are missing.

    ``words`` is the folder of tokenizer and chat template; ``stop`` is the text that ends an
    answer, or empty.
    """
    parts, reasons = {"FROM": f"./{file.name}"}, []
    try:
        chat = Chat(words)
        if not chat.stored:
            raise ConfigError("the model has no chat template")
        template = go_template(turns_of(chat), begin_of(chat, tokenizer))
        parts["TEMPLATE"] = f"{QUOTES}{template}{QUOTES}"
    except ConfigError as error:
        reasons.append(f"TEMPLATE is left out: {printable(str(error))}")
    if QUOTES in stop or not re.sub(r"[\t\r\n]", "", stop).isprintable():
        reasons.append(f"PARAMETER stop is left out: a Modelfile cannot hold {stop!a}")
    elif stop:
        quotes = QUOTES if '"' in stop else '"'
        parts["PARAMETER stop"] = f"{quotes}{stop}{quotes}"
    lines = [f"{name} {value}" for name, value in parts.items()]
    lines += ["# " + " ".join(reason.split()) for reason in reasons]
    with atomic_path(path) as partial:
        partial.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return [*parts], reasons


def begin_of(chat: Chat, tokenizer: Any) -> str:
    """Return the begin-of-text token if tokenizer and Ollama add it to a prompt; else ""."""
    begin = chat.tokens.get("bos_token", "")
    first = tokenizer.encode("a").ids[:1]
    return begin if begin and first == [tokenizer.token_to_id(begin)] else ""


def go_template(turns: Turns, begin: str) -> str:
    """Return a chat template in Ollama's language, without the text ``begin`` at its start."""
    texts = [turns.first, turns.next, turns.answer, turns.end, *(turns.system or ())]
    first, later, answer, end, *parts = (_literal(text.removeprefix(begin)) for text in texts)
    before = f"{{{{ if eq $i 0 }}}}{first}{{{{ else }}}}{later}{{{{ end }}}}"
    system = ""
    if turns.system is not None:
        opening, closing = parts
        system = f'{{{{ if eq .Role "system" }}}}{opening}{{{{ .Content }}}}{closing}{{{{ end }}}}'
        # a system message already includes the text before the first question
        before = (
            f"{{{{ if eq $i 0 }}}}{first}"
            f"{{{{ else if not (and $.System (eq $i 1)) }}}}{later}{{{{ end }}}}"
        )
    return (
        f"{{{{ range $i, $_ := .Messages }}}}{system}"
        f'{{{{ if eq .Role "user" }}}}{before}{{{{ .Content }}}}{answer}{{{{ end }}}}'
        f'{{{{ if eq .Role "assistant" }}}}{{{{ .Content }}}}{end}{{{{ end }}}}{{{{ end }}}}'
    )


def _literal(text: str) -> str:
    """Return text for a template, with special characters as Go strings."""

    def string(part: re.Match[str]) -> str:
        if part[0].isprintable() and part[0][0] not in '{"':
            return part[0]
        plain = (each if each == "{" else f"\\U{ord(each):08x}" for each in part[0])
        return f'{{{{ "{"".join(plain)}" }}}}'

    return SPECIAL.sub(string, text)
