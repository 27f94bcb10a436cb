import sys
from pathlib import Path

# Benchmarks are scripts; what they share lies beside them.
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "gpu")]
