"""Run by test_bridge.py in the bridge environment: altered_job.py PART PARTS prints a JSON line for each config of
configs.json: its proof's outcome, and of the altered ones how far logits are apart of the model that is not made small.
"""

import json
import sys
from pathlib import Path

from dynamo_megatron.bridge import proof
from dynamo_megatron.errors import InputError
from dynamo_megatron.models.bridged import PROBE

if __name__ == "__main__":
    part, parts = int(sys.argv[1]), int(sys.argv[2])
    configs = json.loads(Path(__file__).with_name("configs.json").read_text())
    cases = {n: {**configs["families"][family], **changes} for n, (family, changes, _) in configs["altered"].items()}
    proof.start()
    for name, config in list({**cases, **configs["published"]}.items())[part::parts]:
        try:
            found = {"difference": proof.prove(config)}
        except InputError as refusal:
            found = {"refused": str(refusal)}
        if name in cases and "difference" in found:
            proof.LENGTHS = (7, 200, 33)  # beyond the windows and position limits of the configs
            found["direct"] = min(proof.logits_gap(config, seed) for seed in proof.SEEDS)
            proof.LENGTHS = (7, PROBE, 33)
        print(json.dumps({"name": name, **found}), flush=True)
