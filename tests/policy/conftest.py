import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for layout_guard, which the tests of layouts and methods share
