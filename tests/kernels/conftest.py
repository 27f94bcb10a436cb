import sys
from pathlib import Path

# pytest's importlib mode adds no test folder to the path; plain_head is shared by the files here.
sys.path.insert(0, str(Path(__file__).parent))
