"""Benchmarks; run by hand, results are committed.

cd asv_benchmarks
asv machine --yes                                  # once on each machine
asv run --python=same --set-commit-hash $(git rev-parse HEAD)
"""

import sys
from pathlib import Path

# asv loads this folder alone; the tests, whose draw of inputs is used here, lie two above it.
sys.path.insert(0, str(Path(__file__).parent.parent.parent))
