"""Write the page of what calls cost, commit by commit, and let asv make its site beside it.

The numbers are those that ``asv_benchmarks/results`` keeps; ``asv publish`` draws all of them.
"""

import importlib.util
import json
import os
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
GIT = Path(os.environ.get("UNSLOTH_CUPY_GIT", ROOT))  # of a copy that has no history itself
EXACT = "costs.Costs.track_"
COLUMNS = ("launches", "allocations", "bytes", "opcodes", "sectors", "passes", "instructions")
SITE = '<a href="../benchmarks/index.html">Every benchmark over all commits, as asv shows it</a>'
PAGE = """\
# History

What one call of each of {ops} ops with a kernel costs, summed: launches, allocations and bytes
allocated on sm_90, instructions of Python in a call that is replayed, sectors of global memory and
passes over shared memory on the emulator, instructions of the loops that kernels spend their time
in. No clock is read, so each number is exact; fewer is better.
[What a call costs, exactly](../performance.md#what-a-call-costs-exactly) says how they are counted.

{rows}

{site}
"""


def missing() -> str | None:
    """Return why asv cannot make its site here, or None."""
    if importlib.util.find_spec("asv") is None:
        return "asv is not installed (the extra `docs` has it)"
    try:
        found = subprocess.check_output(
            ["git", "-C", GIT, "rev-list", "main", "--"], stderr=subprocess.DEVNULL, text=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "git finds no branch `main` here"
    named = {json.loads(path.read_text())["commit_hash"] for path in results()}
    return None if named <= {*found.split()} else "git lacks commits that results name"


def results() -> list[Path]:
    """Return the files of results, one of each commit and machine."""
    return [*SUITE.glob("results/*/*-*.json")]


def kept() -> list[dict[str, Any]]:
    """Return the results that have exact costs, from the oldest commit on."""
    told = [json.loads(path.read_text()) for path in results()]
    exact = [each for each in told if any(name.startswith(EXACT) for name in each["results"])]
    return sorted(exact, key=lambda each: each["date"])


def cost(result: dict[str, Any], name: str) -> str:
    """Return a number of a commit; a dash where it was not counted."""
    found = result["results"].get(EXACT + name)
    return f"{found[0][0]:,}" if found else "-"


def page() -> str:
    """Return the page."""
    costs = kept()
    head = ["commit", *COLUMNS]
    rows = [f"| {' | '.join(head)} |", f"|---|{'---:|' * len(COLUMNS)}"]
    for each in costs:
        cells = [f"`{each['commit_hash'][:8]}`", *(cost(each, name) for name in COLUMNS)]
        rows.append(f"| {' | '.join(cells)} |")
    reason = missing()
    site = f"These pages are without asv's site of all benchmarks: {reason}."
    if reason is None:
        site = f"```{{raw}} html\n<p>{SITE}.</p>\n```"
    return PAGE.format(ops=cost(costs[-1], "ops"), rows="\n".join(rows), site=site)


def publish(folder: Path) -> None:
    """Let asv make its site of all results in a folder; the checkout stays as it is."""
    with tempfile.TemporaryDirectory() as work:
        copy = Path(work) / "results"
        shutil.copytree(SUITE / "results", copy)
        settings = json.loads((SUITE / "asv.conf.json").read_text())
        settings |= {"repo": str(GIT), "benchmark_dir": str(SUITE / "benchmarks")}
        settings |= {"results_dir": str(copy), "html_dir": str(folder)}
        conf = Path(work) / "asv.conf.json"
        conf.write_text(json.dumps(settings))
        _asv("asv.benchmark", "discover", SUITE / "benchmarks", Path(work) / "found.json")
        found = json.loads((Path(work) / "found.json").read_text())
        listed = {each["name"]: each for each in found} | {"version": 2}  # of asv's file
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
    """Put asv's site beside the pages that were built."""
    if exception is None and app.builder.format == "html" and missing() is None:
        publish(Path(app.outdir) / "benchmarks")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("builder-inited", write_page)
    app.connect("build-finished", add_site)
    return {"parallel_read_safe": True}
