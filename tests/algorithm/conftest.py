import json
import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def vectors():
    folder = Path(os.environ.get("DYNAMO_VECTORS") or Path(__file__).parents[3] / "shared" / "vectors")

    def load(name: str) -> list[dict]:
        file = folder / f"{name}.json"
        if not file.is_file():
            pytest.skip(f"no reference values at {file}; set DYNAMO_VECTORS")
        return json.loads(file.read_text())

    return load
