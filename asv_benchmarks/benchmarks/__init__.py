"""Benchmarks of asv; they are run by hand, and the results are committed.

cd asv_benchmarks
asv machine --yes                                  # once on each machine
asv run HEAD^!                                     # a commit, built and installed by asv
asv run --python=same --set-commit-hash $(git rev-parse HEAD)     # what is installed here
"""

import os
import sys
from pathlib import Path

# Other work of the machine slows threads that wait for each other most.
for library in ("OMP", "OPENBLAS", "MKL"):
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")
# asv loads this folder alone; some benchmarks also import the tests, two folders above it.  The
# package itself is the one that asv installed, if it did.
sys.path.append(str(Path(__file__).parent.parent.parent))
