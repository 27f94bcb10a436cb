"""Run by test_bridge.py in the bridge environment: altered_job.py TABLE PART PARTS prints one JSON line for each config
of a table in configs.py: its proof's outcome, and the difference of logits of the model as it is, not made small."""

import json
import sys
from pathlib import Path

sys.path += [str(Path(__file__).parent)]

import configs
from dynamo_megatron.bridge import proof

if __name__ == "__main__":
    table, part, parts = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    proof.start()
    for name, config in list(getattr(configs, table).items())[part::parts]:
        outcome = proof.prove(config)
        proof.LENGTHS = (7, 200, 33)  # beyond the windows and position limits of the configs
        found = {"name": name, "direct": proof.best_gap(config), **outcome}
        proof.LENGTHS = (7, proof.shrink.PROBE, 33)
        print(json.dumps(found), flush=True)
