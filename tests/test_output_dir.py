from pathlib import Path

from dynamo_megatron.config import Config
from dynamo_megatron.output_dir import OutputDir


def settings(folder: Path, **optimizer) -> Config:
    return Config(model={"path": "m"}, data={"source": "s"}, output_dir=str(folder), optimizer=optimizer)


def test_rollouts_of_weights_that_will_not_come_again_are_dropped(tmp_path):
    """After step 4, step 5's rollouts are of the checkpoint's weights, step 6's of what other settings led to."""
    rollouts = tmp_path / "rollouts"
    rollouts.mkdir()
    for step in (4, 5, 6):
        (rollouts / f"step-{step:06d}.jsonl").write_text("{}\n")
    for _ in range(2):
        OutputDir(settings(tmp_path, lr=1e-3)).take_over(4)
        assert len(list(rollouts.iterdir())) == 3
    OutputDir(settings(tmp_path, lr=2e-3)).take_over(4)
    assert sorted(p.name for p in rollouts.iterdir()) == ["step-000004.jsonl", "step-000005.jsonl"]
