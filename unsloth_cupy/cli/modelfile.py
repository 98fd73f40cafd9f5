"""An Ollama Modelfile for an exported model: FROM, TEMPLATE and PARAMETER stop.

Ollama takes what stands between quotes as it is, without escapes, and drops characters that it
cannot print.  So texts with quotes stand between three of them, and a template, which is a program
in Go's language, writes what cannot stand there as strings of that language.
"""

import re
from pathlib import Path
from typing import Any

from ..errors import ConfigError, printable
from ..files import atomic_path
from ..finetune.data.chat import Chat
from ..finetune.data.turns import Turns, turns_of

QUOTES = '"""'
# in a template: what begins an action, or would where one follows; what ends the text; and
# characters that are perhaps not printed
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
    """Write a Modelfile for a GGUF file; return what it has, and why it lacks the rest.

    ``words`` is the folder of tokenizer and chat template; ``stop`` ends an answer unless empty.
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
    """Return the begin-of-text token if the tokenizer adds it, as Ollama then does too; else ""."""
    begin = chat.tokens.get("bos_token", "")
    first = tokenizer.encode("a").ids[:1]
    return begin if begin and first == [tokenizer.token_to_id(begin)] else ""


def go_template(turns: Turns, begin: str) -> str:
    """Return a chat template in the language of Ollama, without the text ``begin`` at its start."""
    texts = [turns.first, turns.next, turns.answer, turns.end, *(turns.system or ())]
    first, later, answer, end, *parts = (_literal(text.removeprefix(begin)) for text in texts)
    before = f"{{{{ if eq $i 0 }}}}{first}{{{{ else }}}}{later}{{{{ end }}}}"
    system = ""
    if turns.system is not None:
        opening, closing = parts
        system = f'{{{{ if eq .Role "system" }}}}{opening}{{{{ .Content }}}}{closing}{{{{ end }}}}'
        # a system message has written what stands before the first question
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
    """Return a text as a template has it: what would not stay as it is becomes a string of Go."""

    def string(part: re.Match[str]) -> str:
        if part[0].isprintable() and part[0][0] not in '{"':
            return part[0]
        plain = (each if each == "{" else f"\\U{ord(each):08x}" for each in part[0])
        return f'{{{{ "{"".join(plain)}" }}}}'

    return SPECIAL.sub(string, text)
