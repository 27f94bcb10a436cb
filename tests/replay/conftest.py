import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for recorded, the runs that these tests replay
