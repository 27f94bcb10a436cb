"""Run by test_checked_loading.py: Megatron saves as it does by itself, and the checked readers load it, crafted too."""

import json
import pickle
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "models"))


def main(folder: Path) -> None:
    import crafted_pickles
    import torch
    import torch.distributed as dist

    from dynamo_megatron.policy.backend import enable_cpu

    enable_cpu()
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=0, world_size=1)
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    from dynamo_megatron.checkpoint.checked_loading import load_checked

    saved = folder / "saved"
    saved.mkdir()

    def sharded(tensor: torch.Tensor, value: object) -> dict:
        return {
            "w": ShardedTensor.from_rank_offsets("w", tensor, (0, 0, 1)),
            "o": ShardedObject("object", value, (1,), (0,)),
        }

    whole = torch.rand(4, 3)
    dist_checkpointing.save({**sharded(whole, {"a": [1, 2.5]}), "common": {"step": 3}}, str(saved))

    def load(checked: bool) -> dict:
        asked = sharded(torch.zeros(4, 3), None)
        return load_checked(asked, saved) if checked else dist_checkpointing.load(asked, str(saved))

    said, ran = {}, folder / "ran"
    loaded = load(checked=True)
    said["honest"] = (
        torch.equal(loaded["w"], whole) and loaded["o"] == {"a": [1, 2.5]} and loaded["common"] == {"step": 3}
    )
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    said["plans"] = len(metadata.all_local_plans)
    crafted, _ = crafted_pickles.torch_files(f"touch {ran}")["in a list"]
    info = next(info for index, info in metadata.storage_data.items() if index.fqn.startswith("object"))
    data = saved / info.relative_path
    info.offset, info.length = data.stat().st_size, len(crafted)
    data.write_bytes(data.read_bytes() + crafted)
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    for name, checked in (("ours", True), ("Megatron's", False)):
        try:
            load(checked)
        except BaseException as error:  # torch's CheckpointException is none of Exception
            said[name] = str(error)
        said[f"{name} ran it"] = ran.exists()
    (folder / "said.json").write_text(json.dumps(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
