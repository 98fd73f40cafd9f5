"""Benchmarks of asv; they are run by hand, and the results are committed.

cd asv_benchmarks
asv machine --yes                                  # once on each machine
asv run HEAD^!                                     # a commit, built and installed by asv
asv run --python=same --set-commit-hash $(git rev-parse HEAD)     # what is installed here
"""

import os
import sys
from pathlib import Path

# One thread: threads that wait for each other suffer most from other work on the machine.
for library in ("OMP", "OPENBLAS", "MKL"):
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")
# asv loads only this folder; some benchmarks also import the tests, two folders above it.  The
# package itself is the one that asv installed, if it installed one.
sys.path.append(str(Path(__file__).parent.parent.parent))
