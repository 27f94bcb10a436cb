import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for clusters_table, which the page's test and its writer share
