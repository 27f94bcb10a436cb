"""One of four ranks: torch_dist_job.py STORE FOLDER... loads what hf2mcore wrote of each Hugging Face folder, with
Megatron's own loader and with the policy's, and saves a checkpoint from every layout for mcore2hf to read.

FOLDER has the Hugging Face model in hf/, Megatron's in mcore/; run-N/ is written as a run's folder is.
"""

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist

from dynamo_megatron.policy import backend

backend.enable_cpu()
backend.fix_torch_adam_checkpoints()

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402

from dynamo_megatron.config import Config  # noqa: E402
from dynamo_megatron.models import load_model_config  # noqa: E402
from dynamo_megatron.policy.checkpoint import save_checkpoint  # noqa: E402
from dynamo_megatron.policy.layout import join_ranks  # noqa: E402
from dynamo_megatron.policy.model import build_chunks  # noqa: E402
from dynamo_megatron.policy.policy import Policy  # noqa: E402

DENSE = ({"tp": 2, "pp": 2}, {"pp": 2, "vpp": 2}, {})
MIXTURE = ({"ep": 2, "pp": 2}, {"tp": 2, "ep": 2, "sequence_parallel": True}, {})


def compare(folder, dtype, number, parallel, store):
    spec = load_model_config(folder / "hf")
    config = Config(
        model={"path": str(folder / "mcore"), "dtype": dtype},
        data={"source": "none"},
        output_dir="none",
        parallel=parallel,
        trainer={"timeout": 60},
    )
    layout = join_ranks(config, store)
    policy = Policy(spec, config, layout)
    chunks = build_chunks(spec, config, layout)
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    sharded = {str(i): chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(chunks)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        loaded = dist_checkpointing.load(sharded, str(folder / "mcore"))
    for i, (chunk, mine) in enumerate(zip(chunks, policy.chunks, strict=True)):
        chunk.load_state_dict(loaded[str(i)])
        for (name, theirs), ours in zip(chunk.named_parameters(), mine.parameters(), strict=True):
            assert torch.equal(theirs, ours), f"{name} of {parallel}"
    save_checkpoint(policy, folder / f"run-{number}" / "checkpoints", 3, {} if layout.rank == 0 else None, 1)
    if layout.rank == 0:
        print(f"LOADED {folder.name} {parallel}", flush=True)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    file_store = dist.FileStore(sys.argv[1], 4)
    for word in sys.argv[2:]:
        path, dtype = word.split(":")
        layouts = MIXTURE if "moe" in Path(path).name else DENSE
        for n, layout in enumerate(layouts):
            compare(Path(path), dtype, n, layout, dist.PrefixStore(f"{path} {n}", file_store))
