"""The file of the model that is served. Where SGLang has none of this name, it imports all files."""

import importlib
import os

EntryClass = importlib.import_module(f"sglang.srt.models.{os.environ['SERVED_MODEL_FILE']}").EntryClass
