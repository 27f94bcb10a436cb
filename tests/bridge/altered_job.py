"""Run by test_bridge.py in the bridge environment: altered_job.py PART PARTS prints a JSON line for each config of
configs.json: its proof's outcome, and of the altered ones how far logits are apart of the model that is not made small.
"""

import json
import sys
from pathlib import Path

from dynamo_megatron.bridge import proof, shrink

if __name__ == "__main__":
    part, parts = int(sys.argv[1]), int(sys.argv[2])
    configs = json.loads(Path(__file__).with_name("configs.json").read_text())
    proof.start()
    for name, (family, changes, _) in list(configs["altered"].items())[part::parts]:
        config = {**configs["families"][family], **changes}
        outcome = proof.prove(config)
        proof.LENGTHS = (7, 200, 33)  # beyond the windows and position limits of the configs
        found = {"name": name, "direct": proof.best_gap(config)[0], **outcome}
        proof.LENGTHS = (7, shrink.PROBE, 33)
        print(json.dumps(found), flush=True)
    for name, config in list(configs["published"].items())[part::parts]:
        print(json.dumps({"name": name, **proof.prove(config)}), flush=True)
