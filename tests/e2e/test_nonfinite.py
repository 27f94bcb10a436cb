"""A NaN in a weight or an advantage: the run stops, and `replay --step` repeats it."""

import shutil

import pytest
from background_run import runs_first
from safetensors.torch import load_file, save_file

from dynamo_megatron.policy.non_finite import PassInputs

pytestmark = pytest.mark.full

SEEDS = """
import os
if "RANK" in os.environ:
    from dynamo_megatron.jobs.JOB
    set_up = Job.set_up
    def patched(self, policy, coordinator):
        import torch
        from dynamo_megatron.policy.batch import TrainBatch
        set_up(self, policy, coordinator)
        build, begin_step = TrainBatch.build, coordinator.begin_step
        def begun(number):
            begin_step(number)
            if number == 2 and "WEIGHT" == "FAULT":
                with torch.no_grad():
                    policy.chunks[0].decoder.layers[0].mlp.linear_fc2.weight[0, 0] = torch.nan
        def built(rollouts, *others):
            batch = build(rollouts, *others)
            if coordinator.step == 2 and "ADVANTAGE" == "FAULT":
                batch.advantages[3] = float("nan")
            return batch
        coordinator.begin_step, TrainBatch.build = begun, built
    Job.set_up = patched
"""
TRAIN, SFT = "train import TrainJob as Job", "sft import SFTJob as Job"
SAID = {  # in the last line
    "WEIGHT": "NaN or infinite logprobs or entropy of the policy in ",
    "ADVANTAGE": "loss nan, gradient norm nan before the optimizer step",
}
PASSES = {"WEIGHT": "token_stats", "ADVANTAGE": "update"}


@pytest.mark.parametrize(("fault", "stages"), [("WEIGHT", 2), ("ADVANTAGE", 1)])
def test_a_nan_stops_the_run_and_is_repeated(replay, command_line, workspace, tmp_path, monkeypatch, stages, fault):
    code = SEEDS.replace("FAULT", fault).replace("JOB", TRAIN)
    with monkeypatch.context() as seeded:
        seeded.setenv("PYTHONPATH", runs_first(tmp_path, code)["PYTHONPATH"])
        keys = [f"parallel.pp={stages}", "algorithm.allocation.kind=uniform"]
        earlier = workspace / f"nan-{fault}-{stages}" / "nonfinite" / "step-000009"  # of another start
        earlier.mkdir(parents=True)
        code, text, output = replay(f"nan-{fault}-{stages}", lambda rollout: rollout, *keys)
    last = text.strip().splitlines()[-1]
    assert code == 1 and "step 2: NonFiniteError: " in last and SAID[fault] in last, text[-3000:]
    folder = output / "nonfinite" / "step-000002"
    assert f"dynamo-megatron replay --step {output} 2 repeats it" in text and (folder / "manifest.json").is_file()
    assert not earlier.exists()
    assert sum(file.stat().st_size for file in folder.glob("*.distcp")) < 2e6, "weights without the optimizer"

    code, text = command_line(workspace, "replay", "--step", output, 2)
    assert code == 0 and text.strip().endswith("reproduced: the same message"), text[-3000:]
    assert f"step-000002: {PASSES[fault]}, " in text and SAID[fault] in text
    code, said = command_line(workspace, "replay", "--step", output, 1)
    assert code == 2 and said.strip().endswith(f"--step: {output / 'nonfinite'} has no complete folder of step 1")
    code, said = command_line(workspace, "replay", "--step", output, 2, "algorithm.advantage.kind=grpo")
    assert code == 2 and "algorithm.advantage: the step is repeated with the advantages that it had" in said
    if fault == "ADVANTAGE":  # without the NaN in the batch the pass is finite
        inputs = PassInputs.load(folder / "pass.pt")
        inputs.given["batch"].advantages[3] = 0.5
        inputs.save(folder / "pass.pt")
        code, text = command_line(workspace, "replay", "--step", output, 2)
        assert code == 1 and "NOT reproduced: everything is finite now" in text, text[-3000:]
    if stages == 2:  # the weights load in another layout
        code, text = command_line(workspace, "replay", "--step", output, 2, "parallel.pp=1", "--ranks", 1)
        assert code == 0 and "reproduced" in text and "NOT" not in text, text[-3000:]


PRIME = "reward.prime={{model: {0}, reference: {1}, beta: 0.5}}"
SWAPPED = "reward.prime={{model: {1}, reference: {0}, beta: 0.5}}"


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("algorithm.kl.reference", "algorithm.kl={{coef: 0.1, reference: {0}}}"),
        ("reward.prime.model", PRIME),
        ("reward.prime.reference", SWAPPED),
    ],
)
def test_a_pass_of_another_model_is_repeated(tiny_model, replay, command_line, workspace, tmp_path, name, keys):
    """A model whose weights are finite, but whose logits are not; `keys` get it and a whole one."""
    huge = shutil.copytree(tiny_model, tmp_path / "huge")
    tensors = load_file(huge / "model.safetensors")
    tensors["model.norm.weight"].fill_(3e38)
    save_file(tensors, huge / "model.safetensors", {"format": "pt"})
    words = ["parallel.pp=1", "algorithm.allocation.kind=uniform", keys.format(huge, tiny_model)]
    words += ["reward.functions=[own_reward:contains,prime]"] if "prime" in name else []
    code, text, output = replay(name, lambda rollout: rollout, *words)
    last, error = text.strip().splitlines()[-1], "NonFiniteError: NaN or infinite logprobs or entropy of the "
    assert code == 1 and f"step 1: {error}{name} {huge}" in last, text[-3000:]
    code, text = command_line(workspace, "replay", "--step", output, 1)
    assert code == 0 and text.strip().endswith("reproduced: the same message"), text[-3000:]
    assert "step-000001: token_stats, " in text and f"entropy of the {name} {huge}" in text


def test_an_update_of_sft_is_repeated(command_line, workspace, tmp_path, monkeypatch):
    code, output = SEEDS.replace("FAULT", "WEIGHT").replace("JOB", SFT), tmp_path / "run"
    with monkeypatch.context() as seeded:
        seeded.setenv("PYTHONPATH", runs_first(tmp_path, code)["PYTHONPATH"])
        keys = ("parallel.pp=1", "trainer.steps=3", f"output_dir={output}")
        code, text = command_line(workspace, "sft", workspace / "config.yaml", *keys)
    last = text.strip().splitlines()[-1]
    assert code == 1 and "step 2: NonFiniteError: loss nan" in last, text[-3000:]
    code, text = command_line(workspace, "replay", "--step", output, 2)
    assert code == 0 and text.strip().endswith("reproduced: the same message"), text[-3000:]
    assert "step-000002: fit, 3 sequences" in text
