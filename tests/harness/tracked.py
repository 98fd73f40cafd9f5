"""List the project's files: those that git tracks, not what a user keeps beside them.

A copy without ``.git`` has the files that are tracked in the repository ``UNSLOTH_CUPY_GIT``, or,
where no git answers, as in an unpacked sdist, all its files but hidden ones.
"""

import functools
import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def tracked(pattern: str = "**/*") -> list[Path]:
    """Return the files whose name from the root matches a pattern of ``Path.glob``, sorted."""
    escaped = re.escape(pattern).replace(r"\*\*/", "(.*/)?").replace(r"\*", "[^/]*")
    paths = (ROOT / name for name in names() if re.fullmatch(escaped, name))
    return [path for path in sorted(paths) if path.is_file()]  # some may be deleted since


@functools.cache
def names() -> frozenset[str]:
    """Return the names of all files, from the root."""
    command = ["git", "-C", os.environ.get("UNSLOTH_CUPY_GIT", ROOT), "ls-files", "-z"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError):
        listed = ""
    return frozenset(listed.split("\0")[:-1] or not_hidden())


def not_hidden() -> list[str]:
    """Return the names of all files, but hidden ones and caches."""
    paths = (path.relative_to(ROOT) for path in ROOT.rglob("*"))
    hidden = (".", "__pycache__")
    return [p.as_posix() for p in paths if not any(part.startswith(hidden) for part in p.parts)]
