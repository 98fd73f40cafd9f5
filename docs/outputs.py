"""Run the examples and the Python blocks of pages, and show what they print under their code.

A block that is followed by a text block in its page keeps that one alone.
"""

import contextlib
import importlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
CODE = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
COMMAND = "unsloth-cupy "  # begins the lines of blocks of bash, which are run by the tests alone
WALKS = {"your-chats"}
WALKED = re.compile(r"^```(?:python|bash)\n(.*?)^```", re.M | re.S)
INCLUDED = re.compile(r"^```\{literalinclude\} \.\./examples/(\w+\.py)\n.*?^```\n", re.M | re.S)
EMULATOR = "cuda_on_cpu"  # pages that use it need a C++ compiler and the tests


def blocks(text: str, pattern: re.Pattern[str] = CODE) -> list[str]:
    """Return the Python code of a page, each block at its line number in the page."""
    return ["\n" * (text[: hit.start()].count("\n") + 1) + hit[1] for hit in pattern.finditer(text)]


def walked(page: Path) -> bool:
    """Return whether the commands of a page run between its blocks of Python."""
    return page.stem in WALKS


def run_blocks(
    page: Path,
    missing: Callable[[str], bool],
    after: Callable[[int, str], None] = lambda *_: None,
    walk: Callable[[str], None] | None = None,
) -> None:
    """Run the blocks of a page in the current folder; they share their names.

    ``missing`` tells of a package of a line ``# needs PACKAGE`` whether its block is left out;
    ``after`` gets what each block printed; ``walk`` runs a command of a page that is walked.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page.read_text(encoding="utf-8"), WALKED if walk else CODE):
        if walk and block.strip().startswith(COMMAND):
            for line in block.strip().splitlines():
                walk(line)
            continue
        needs = re.search(r"^# needs (\w+)$", block, re.M)
        printed = io.StringIO()
        if not (needs and missing(needs[1])):
            with contextlib.redirect_stdout(printed):
                exec(compile(block, str(page), "exec"), names)
        after(printed.getvalue())


def run_example(path: Path, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run an example in a folder, as a reader does; a warning is an error."""
    return _run("-W", "error", path, folder=folder)


def _run(*words: Any, folder: Path | None = None) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, *map(str, words)]
    env = {"OPENBLAS_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def shown(text: str, page: Path) -> str:
    """Return the text of a page with the outputs of its blocks and of its examples."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            names = INCLUDED.findall(text)
            said = dict(zip(names, pool.map(_of_example, names), strict=True))
        text = INCLUDED.sub(lambda hit: hit[0] + said[hit[1]], text)
        if not CODE.search(text) or EMULATOR in text or walked(page):
            return text
        printed = json.loads(_checked(_run(Path(__file__), str(page)), page.name))
    outputs = iter(printed)

    def with_output(hit: re.Match[str]) -> str:
        output = _fenced(next(outputs))
        by_hand = text.startswith("\n\n```text", hit.end())
        return hit[0] if by_hand or not output else f"{hit[0]}\n{output.rstrip()}"

    return CODE.sub(with_output, text)


def _of_example(name: str) -> str:
    return _fenced(_checked(run_example(ROOT / "docs" / "examples" / name, Path.cwd()), name))


def _checked(done: "subprocess.CompletedProcess[str]", name: str) -> str:
    if done.returncode:
        from sphinx.errors import ExtensionError

        raise ExtensionError(f"{name}: {done.stderr}")
    return done.stdout


def _fenced(printed: str) -> str:
    return f"\n```text\n{printed.rstrip()}\n```\n" if printed.strip() else ""


def add_outputs(app: "Sphinx", docname: str, source: list[str]) -> None:
    """Add the outputs to a page of the guide or of the tutorials, or at the top level."""
    page = Path(app.srcdir) / f"{docname}.md"
    if docname.partition("/")[0] not in ("api", "kernels", "history") and page.exists():
        source[0] = shown(source[0], page)


def setup(app: "Sphinx") -> dict[str, bool]:
    """Register the extension."""
    app.connect("source-read", add_outputs)
    return {"parallel_read_safe": True}


def main(page: str) -> None:
    """Print what the blocks of a page print, as JSON, up to one whose package is missing here."""
    count, printed = len(blocks(Path(page).read_text(encoding="utf-8"))), list[str]()

    def missing(package: str) -> bool:
        importlib.import_module(package)
        return False

    with contextlib.suppress(ModuleNotFoundError):
        run_blocks(Path(page), missing, printed.append)
    print(json.dumps(printed + [""] * (count - len(printed))))


if __name__ == "__main__":
    main(sys.argv[1])
