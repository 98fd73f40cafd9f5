"""Write the page with the costs of calls at each commit, and build asv's site of all benchmarks.

The numbers are those in ``asv_benchmarks/results``; ``asv publish`` draws all of them.
"""

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

ROOT = Path(__file__).resolve().parent.parent
SUITE = ROOT / "asv_benchmarks"
# The repository whose history asv reads; set the variable where this copy has no history.
GIT = Path(os.environ.get("UNSLOTH_CUPY_GIT", ROOT))
EXACT = "costs.Costs.track_"
COLUMNS = ("launches", "allocations", "bytes", "opcodes", "sectors", "passes", "instructions")
SITE = '<a href="../benchmarks/index.html">Every benchmark over all commits, as asv shows it</a>'
PAGE = """\
# History

The costs of one call of each of the {ops} ops with a kernel that all these commits have, summed:
launches, allocations and bytes allocated on sm_90, Python opcodes of a replayed call, sectors of
global memory and passes over shared memory on the emulator, and instructions of the loops that
kernels spend their time in. All are counted, not timed, so the numbers are exact; fewer is better.
[What a call costs, exactly](../performance.md#what-a-call-costs-exactly) explains how they are
counted.

{rows}

{site}
"""


def repository(path: Path = GIT) -> str | None:
    """Return the address of the pages of the repository of which a folder is a clone, or None."""
    command = ["git", "-C", str(path), "remote", "get-url", "origin"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:  # without git
        return None
    host = r"(?:https?://(?:[^@/]*@)?|(?:ssh://)?git@)([\w.-]+(?::\d+(?=/))?)"
    address = re.fullmatch(rf"{host}[:/](.+?)(?:\.git)?/?", done.stdout.strip())
    return address and "https://{}/{}".format(*address.groups())


def missing() -> str | None:
    """Return the reason why asv cannot build its site here, or None."""
    if importlib.util.find_spec("asv") is None:
        return "asv is not installed (the extra `docs` has it)"
    try:
        commits = subprocess.check_output(
            ["git", "-C", GIT, "rev-list", "main", "--"], stderr=subprocess.DEVNULL, text=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "git finds no branch `main` here"
    measured = {json.loads(path.read_text())["commit_hash"] for path in results()}
    return None if measured <= {*commits.split()} else "git lacks commits that results name"


def results() -> list[Path]:
    """Return asv's result files, one for each commit and machine."""
    return [*SUITE.glob("results/*/*-*.json")]


def kept() -> list[dict[str, Any]]:
    """Return the results that have exact costs, in the order of their commits."""
    every = [json.loads(path.read_text()) for path in results()]
    exact = [each for each in every if any(name.startswith(EXACT) for name in each["results"])]
    return sorted(exact, key=lambda each: each["date"])


def by_op(result: dict[str, Any], name: str) -> dict[str, int]:
    """Return a cost at a commit, by the ops that have it there."""
    values, (ops,), *_ = result["results"][EXACT + name]
    pairs = zip(ops, values or [None] * len(ops), strict=True)
    return {ast.literal_eval(op): int(value) for op, value in pairs if value is not None}


def page() -> str:
    """Return the text of history/index.md."""
    costs = kept()
    everywhere = set.intersection(*({*by_op(each, "launches")} for each in costs))
    head = ["commit", *COLUMNS]
    rows = [f"| {' | '.join(head)} |", f"|---|{'---:|' * len(COLUMNS)}"]
    for each in costs:
        sums = [sum(by_op(each, name)[op] for op in everywhere) for name in COLUMNS]
        cells = [f"`{each['commit_hash'][:8]}`", *(f"{number:,}" for number in sums)]
        rows.append(f"| {' | '.join(cells)} |")
    reason = missing()
    site = f"These pages do not include asv's site of all benchmarks: {reason}."
    if reason is None:
        site = f"```{{raw}} html\n<p>{SITE}.</p>\n```"
    return PAGE.format(ops=len(everywhere), rows="\n".join(rows), site=site)


def publish(folder: Path) -> None:
    """Build asv's site of all results in a folder, without changing the checkout."""
    with tempfile.TemporaryDirectory() as work:
        copy = Path(work) / "results"
        shutil.copytree(SUITE / "results", copy)
        settings = json.loads((SUITE / "asv.conf.json").read_text())
        settings |= {"repo": str(GIT), "benchmark_dir": str(SUITE / "benchmarks")}
        settings |= {"results_dir": str(copy), "html_dir": str(folder)}
        conf = Path(work) / "asv.conf.json"
        conf.write_text(json.dumps(settings))
        _asv("asv.benchmark", "discover", SUITE / "benchmarks", Path(work) / "found.json")
        benchmarks = json.loads((Path(work) / "found.json").read_text())
        listed = {each["name"]: each for each in benchmarks} | {"version": 2}  # asv's file format
        (copy / "benchmarks.json").write_text(json.dumps(listed))
        _asv("asv", "--config", conf, "publish", "--no-pull")


def _asv(*words: Any) -> None:
    command = [sys.executable, "-m", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    if done.returncode:
        raise ExtensionError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def write_page(app: Sphinx) -> None:
    """Write history/index.md."""
    path = Path(app.srcdir) / "history" / "index.md"
    path.parent.mkdir(exist_ok=True)
    text = page()
    if not path.exists() or path.read_text() != text:  # an unchanged page is not rebuilt
        path.write_text(text)


def add_site(app: Sphinx, exception: Exception | None) -> None:
    """Add asv's site to the HTML pages."""
    if exception is None and app.builder.format == "html" and missing() is None:
        publish(Path(app.outdir) / "benchmarks")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.connect("builder-inited", write_page)
    app.connect("build-finished", add_site)
    return {"parallel_read_safe": True}
