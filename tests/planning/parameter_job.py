"""Run by test_parameters.py: parameter_job.py CASES.json builds every rank's model of a layout on the meta device, in
one process under a fake process group, and says whether its parameters are the planner's."""

import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
import torch
from meta_job import join_as, leave

from dynamo_megatron.config import Config
from dynamo_megatron.models import FAMILIES
from dynamo_megatron.models.mapping import is_expert
from dynamo_megatron.models.published import PUBLISHED
from dynamo_megatron.planning.formulas import stage_parameters
from dynamo_megatron.policy.model import build_chunks

for name, parallel, ranks in json.loads(Path(sys.argv[1]).read_text()):
    shape = PUBLISHED[name]["config"]
    spec = FAMILIES[shape["model_type"]](shape)
    config = Config.model_validate(
        {"model": {"path": "none"}, "data": {"source": "none"}, "output_dir": "none", "parallel": parallel}
    )
    p = config.parallel
    world_size = p.pp * math.lcm(p.tp, p.ep)
    for rank in ranks or range(world_size):
        layout = join_as(rank, world_size, p)
        with torch.device("meta"):
            chunks = build_chunks(spec, config, layout)
        built = []
        for chunk in chunks:
            parts = [(is_expert(n), v.numel()) for n, v in chunk.named_parameters()]
            built.append([sorted(n for e, n in parts if e == kind) for kind in (False, True)])
        planned = [[sorted(c.dense), sorted(c.experts)] for c in stage_parameters(spec, p, layout.pp.rank())]
        shared = [[v.numel() for v in chunk.parameters() if getattr(v, "shared_embedding", False)] for chunk in chunks]
        said = [[c.shared_embedding] if c.shared_embedding else [] for c in stage_parameters(spec, p, layout.pp.rank())]
        total = sum(map(sum, (part for chunk in built for part in chunk)))
        equal = built == planned and shared == said
        print(
            json.dumps({"name": name, "parallel": parallel, "rank": rank, "built": total, "equal": equal}), flush=True
        )
        leave()
