"""The comparison of configs/compare/distillation.yaml, with its teacher as an SGLang server beside it.

make runs/demo/teacher/hf
python -P benchmarks/distillation.py [OPTIONS]     # of `dynamo-megatron compare`
"""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
from pathlib import Path

from dynamo_megatron.config import ModelConfig, RolloutConfig
from dynamo_megatron.rollout.servers.server import SGLangServer

RUNS = Path(__file__).parents[1] / "runs" / "demo"
KEY, PORT = "TEACHER_KEY", 31415  # as in the comparison


def main() -> int:
    os.environ[KEY] = secrets.token_hex(16)
    # With stop texts a server has a tokenizer, which the students compare with their own.
    rollout = RolloutConfig(api_key_env=KEY, placement="external", urls=["http://unused"], port=PORT, stop=["\n"])
    teacher = ModelConfig(path=str(RUNS / "teacher" / "hf"), dtype="float32")
    server = SGLangServer(rollout, teacher, RUNS / "teacher" / "server.log")
    try:
        server.start()
        asyncio.run(server.wait_ready())
        words = ["compare", "compare/distillation", *sys.argv[1:]]
        return subprocess.run([sys.executable, "-P", "-m", "dynamo_megatron.cli", *words]).returncode
    finally:
        server.stop()


if __name__ == "__main__":
    sys.exit(main())
