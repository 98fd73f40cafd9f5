"""What a contributor and a citation are told is what the project says of itself."""

import json
import re
from pathlib import Path

from unsloth_cupy import __version__

ROOT = Path(__file__).parents[2]
INSTALL = "python3 -m venv .venv && .venv/bin/pip install -q -e '.[test]'"


def test_contributors_need_three_commands() -> None:
    page = (ROOT / ".github/CONTRIBUTING.md").read_text()
    (block,) = re.findall(r"```sh\n(.*?)\n```", page, re.S)
    commands = [line.partition("  #")[0].rstrip() for line in block.splitlines()]
    ci = (ROOT / ".ci/run").read_text().splitlines()
    tests = commands[1].removesuffix(" tests/ops")
    assert commands == [INSTALL, f"{tests} tests/ops", ".ci/run"]
    assert {INSTALL, tests} <= {*ci}
    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    assert container["postCreateCommand"] == INSTALL
    for link in re.findall(r"\]\(([^)]+)\)", page):
        assert (ROOT / ".github" / link).exists(), link


def test_the_citation_is_of_this_version() -> None:
    cited = (ROOT / ".github/CITATION.cff").read_text()
    (version, date) = re.findall(r"^(?:version|date-released): (.*)$", cited, re.M)
    assert version == __version__
    assert f"\n## {version} ({date})\n" in (ROOT / "docs/changelog.md").read_text()


def test_a_fault_comes_with_the_machine() -> None:
    form = (ROOT / ".github/ISSUE_TEMPLATE/fault.yml").read_text()
    assert "Output of `unsloth-cupy info`" in form


def test_the_image_installs_what_it_copies() -> None:
    """The files that a build needs, and an extra that exists."""
    image = (ROOT / ".devcontainer/Dockerfile").read_text()
    copied = {name for line in re.findall(r"^COPY (.*) \S+$", image, re.M) for name in line.split()}
    assert all((ROOT / name).exists() for name in copied)
    needed = {"unsloth_cupy", "kernels_cu", "README.md", "LICENSE", "setup.cfg", "pyproject.toml"}
    assert copied == needed
    setup = (ROOT / "setup.cfg").read_text()
    (extras,) = re.findall(r"'\.\[(.*?)\]'", image)
    assert all(f"\n{extra} =\n" in setup for extra in extras.split(","))
