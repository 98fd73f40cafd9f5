"""Benchmarks of asv; they are run by hand, and the results are committed.

cd asv_benchmarks
asv machine --yes                                  # once on each machine
asv run --python=same --set-commit-hash $(git rev-parse HEAD)
"""

import sys
from pathlib import Path

# asv loads this folder alone; benchmarks also import the tests, two folders above it.
sys.path.insert(0, str(Path(__file__).parent.parent.parent))
