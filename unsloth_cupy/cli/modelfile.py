"""An Ollama Modelfile for an exported model: FROM, TEMPLATE and PARAMETER stop."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError, printable
from ..files import atomic_path
from ..finetune.chat import Chat
from ..finetune.turns import Turns, turns_of


def check_modelfile(file: Path) -> Path:
    """Return the path of the Modelfile beside a GGUF file; raise if there is one already."""
    path = file.with_name("Modelfile")
    if path.exists():
        raise ConfigError(f"{path} exists; remove it, or export to another folder")
    return path


def write_modelfile(
    path: Path, file: Path, words: Path, tokenizer: Any, stops: Sequence[str]
) -> str:
    """Write a Modelfile for a GGUF file; return why it has no TEMPLATE, or "".

    ``words`` is the folder of tokenizer and chat template; each of ``stops`` ends an answer.
    """
    lines, why = [f"FROM ./{file.name}"], ""
    try:
        chat = Chat(words)
        if not chat.stored:
            raise ConfigError("the model has no chat template")
        lines.append(f'TEMPLATE """{go_template(turns_of(chat), begin_of(chat, tokenizer))}"""')
    except ConfigError as error:
        why = f"TEMPLATE is left out: {printable(str(error))}"
        lines.append(f"# {why}")
    # a string of JSON is one of Go too
    lines += [f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}" for stop in stops]
    with atomic_path(path) as partial:
        partial.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return why


def begin_of(chat: Chat, tokenizer: Any) -> str:
    """Return the begin-of-text token if the tokenizer adds it, as Ollama then does too; else ""."""
    begin = chat.tokens.get("bos_token", "")
    first = tokenizer.encode("a").ids[:1]
    return begin if begin and first == [tokenizer.token_to_id(begin)] else ""


def go_template(turns: Turns, begin: str) -> str:
    """Return a chat template in the language of Ollama, without the text ``begin`` at its start."""
    texts = [turns.first, turns.next, turns.answer, turns.end, *(turns.system or ())]
    if any('"""' in text for text in texts):
        raise ConfigError('the template writes """, which a Modelfile cannot hold')
    first, later, answer, end = (
        text.removeprefix(begin).replace("{{", '{{ "{{" }}') for text in texts[:4]
    )
    before = f"{{{{ if eq $i 0 }}}}{first}{{{{ else }}}}{later}{{{{ end }}}}"
    system = ""
    if turns.system is not None:
        opening, closing = (
            text.removeprefix(begin).replace("{{", '{{ "{{" }}') for text in turns.system
        )
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
