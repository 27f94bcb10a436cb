import sys
from pathlib import Path

# Benchmarks are scripts; what they share lies beside them.
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
