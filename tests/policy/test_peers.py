"""Every method of configs/methods against verl's and TRL's own functions, on random batches.

The peers have an interpreter of their own (`make peers`: PEERS_PYTHON or .venv-peers/bin/python), started once; it
runs peer_job.py. CASES says which of a peer's functions is the method's. What no peer has is taken from here and
given to it: DynaMO's modulated advantages, the weights of dynamo and history, the advantages of history, spo,
reinforce_ada, w_reinforce and entropy_advantages (tests/verification and tests/algorithm have those), and which tokens
fork_tokens trains (test_methods.py has them). Only clip_cov's choice is random: there the peer's is taken, and must be
of the same band and number.
"""

import functools
import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from layout_cases import rollout_batch

from dynamo_megatron.algorithm.losses import response_log_ratios
from dynamo_megatron.algorithm.selection import covariance
from dynamo_megatron.algorithm.shaping import shape_tokens
from dynamo_megatron.algorithm.success import Baseline
from dynamo_megatron.config.files import compose
from dynamo_megatron.kernels.reference import loss_terms, summed_loss
from dynamo_megatron.kernels.types import Statistics, Tokens
from dynamo_megatron.policy.batch import TrainBatch
from dynamo_megatron.types import TokenStats

ROOT = Path(__file__).parents[2]
METHODS = ROOT / "configs" / "methods"
PEERS_PYTHON = os.environ.get("PEERS_PYTHON", str(ROOT / ".venv-peers" / "bin" / "python"))
BATCHES, LENGTH = 60, 24
pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not Path(PEERS_PYTHON).is_file(), reason=f"no {PEERS_PYTHON} (make peers)"),
]


def verl(loss, advantage, aggregation="token-mean", *, clip=(0.2, 0.2), c=1e12, overrides=(), **options):
    """verl's `compute_policy_loss_LOSS`; its vanilla loss always has a dual clip, so `c` puts it out of reach."""
    options |= {"clip_ratio_low": clip[0], "clip_ratio_high": clip[1], "clip_ratio_c": c}
    names = {"peer": "verl", "loss": loss, "advantage": advantage, "aggregation": aggregation}
    return names | {"options": options, "overrides": overrides}


def trl(trainer, advantage, *, clip, **options):
    """`_compute_loss` of TRL's GRPOTrainer or RLOOTrainer."""
    options |= {"epsilon_low": clip[0], "epsilon_high": clip[1]}
    return {"peer": "trl", "loss": trainer, "advantage": advantage, "options": options, "overrides": ()}


def batches_of(name: str) -> int:
    return 400 if name.split()[0] == "ppo" else BATCHES


MEAN_OF_SUMS = {"global_batch_info": {"loss_scale_factor": LENGTH}}
FIFTH = ("algorithm.loss.clip_cov.ratio=0.05", "algorithm.loss.clip_cov.low=0.2")
TWENTIETH = ("algorithm.loss.kl_cov.ratio=0.05", "algorithm.loss.kl_cov.coef=0.7")
# A method's file, and after a space which comparison of several: advantage None is what we give to the peer.
CASES = {
    "grpo": verl("vanilla", "grpo"),
    "grpo trl": trl("grpo", "grpo", clip=(0.2, 0.2)),
    "clip_higher": verl("vanilla", "grpo", clip=(0.2, 0.28)),
    "clip_higher trl": trl("grpo", "grpo", clip=(0.2, 0.28)),
    "dapo": verl("vanilla", "grpo", clip=(0.2, 0.28), c=10.0),
    "fork_tokens": verl("vanilla", "grpo", clip=(0.2, 0.28), c=10.0),
    "dr_grpo": verl("vanilla", "dr_grpo", "seq-mean-token-sum-norm", **MEAN_OF_SUMS),
    "dr_grpo trl": trl("grpo", "dr_grpo", clip=(0.2, 0.2), loss_type="dr_grpo", max_completion_length=LENGTH),
    "rloo": trl("rloo", "rloo", clip=(0.2, 0.2)),
    "gspo": verl("gspo", "grpo", "seq-mean-token-mean", clip=(3e-4, 4e-4)),
    "gspo trl": trl("grpo", "grpo", clip=(3e-4, 4e-4), loss_type="grpo", importance_sampling_level="sequence"),
    "cispo": verl("cispo", "grpo", clip=(10.0, 4.0)),
    "cispo trl": trl("grpo", "grpo", clip=(None, 5.0), loss_type="cispo", current_gradient_accumulation_steps=1),
    "clip_cov": verl("clip_cov", "grpo", clip=(1.0, 1.0)),
    "clip_cov wide": verl(
        "clip_cov", "grpo", clip=(1.0, 1.0), policy_loss={"clip_cov_ratio": 0.05, "clip_cov_lb": 0.2}, overrides=FIFTH
    ),
    "kl_cov": verl("kl_cov", "grpo", policy_loss={"kl_cov_ratio": 0.002, "ppo_kl_coef": 1.0}),
    "kl_cov wide": verl("kl_cov", "grpo", policy_loss={"kl_cov_ratio": 0.05, "ppo_kl_coef": 0.7}, overrides=TWENTIETH),
    "r1": verl("vanilla", "grpo", "seq-mean-token-mean", clip=(1.0, 10.0), overrides=("algorithm.kl.coef=0",)),
    "entropy_loss": verl("vanilla", "grpo", entropy_coeff=0.001),
    "entropy_advantages": verl("vanilla", None),
    "w_reinforce": verl("vanilla", None, entropy_coeff=0.001),
    "dynamo": verl("vanilla", None, "token-sum"),
    "dynamo_published": verl("vanilla", None, clip=(0.2, 0.28), c=10.0),
    "otb": verl("vanilla", "otb"),
    "ppo": verl("vanilla", "gae"),
    "ppo trl": trl("grpo", "gae", clip=(0.2, 0.2)),  # TRL 1.16 has no PPO; GRPO's loss takes tokens' advantages
    "distill": verl("vanilla", "k1", overrides=("algorithm.teacher.path=t",)),
    "history": verl("vanilla", None, "token-sum"),
    "spo": verl("vanilla", None, clip=(0.2, 0.28), c=10.0),
    "pilot": verl("vanilla", "grpo", clip=(0.2, 0.28), c=10.0),
    "reinforce_ada": verl("vanilla", None, clip=(0.2, 0.28), c=10.0),
}
WEIGHTS_GIVEN = ("dynamo", "history")


def make_batch(seed: int) -> SimpleNamespace:
    """3 to 6 groups of 2 to 6 rollouts of 1 to 24 tokens, 1 to 3 mini-batches; one token in twenty moved far.

    Every other response has barely moved, down to log ratios of 1e-5: there the clips of GSPO lie."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(2, 7, rng.integers(3, 7))
    groups = np.repeat(np.arange(len(sizes)), sizes)
    lengths = np.where(rng.random(len(groups)) < 0.2, LENGTH, 1 + rng.geometric(0.15, len(groups)).clip(max=LENGTH - 1))
    count = int(lengths.sum())
    old = -rng.exponential(1.5, count)
    drift = rng.normal(0, 0.3, count)
    far = rng.random(count) < 0.05
    drift[far] = rng.choice([-1, 1], far.sum()) * rng.uniform(0.5, 3.2, far.sum())
    still = rng.random(len(groups)) < 0.5
    drift *= np.repeat(np.where(still, 10 ** -rng.uniform(0, 4, len(groups)), 1.0), lengths)
    rewards = (rng.random(len(groups)) < rng.random(len(sizes))[groups]).astype(float)
    batch = SimpleNamespace(groups=groups, lengths=lengths, old=old, new=old + drift, minis=1 + seed % 3)
    batch.rewards = rewards if seed % 2 == 0 else rng.random(len(groups))
    batch.entropy, batch.expected = rng.exponential(0.8, count), rng.normal(0, 0.1, count)
    batch.values = rng.normal(0.5, 0.3, count)
    batch.collision = np.exp(old) ** 2 + rng.random(count) * (1 - np.exp(old)) ** 2  # what the others can add
    batch.teacher = -rng.exponential(1.5, count)
    batch.rollouts = rollout_batch(list(map(str, groups)), np.ones(len(groups), np.int64), lengths, batch.rewards)
    return batch


@functools.cache
def config_of(name: str, minis: int):
    fixed = ["model.path=m", "data.source=d", "output_dir=o", f"rollout.max_new_tokens={LENGTH}"]
    fixed += [f"algorithm.loss.mini_batches={minis}"]
    return compose([f"methods/{name.split()[0]}"], [*fixed, *CASES[name]["overrides"]])[0]


def ours(name: str, batch: SimpleNamespace, without: np.ndarray | None = None) -> SimpleNamespace:
    """float64 per token of the batch: what the policy head makes of it, mini-batch by mini-batch; `losses` of each.

    The current policy's logprobs select tokens and stand beside the teacher's, as the peers' do; ours are those of the
    step's start. `without`: bool, tokens whose policy loss is taken away in place of a random choice."""
    config = config_of(name, batch.minis)
    algorithm = config.algorithm
    if without is not None:
        algorithm = algorithm.model_copy(update={"loss": algorithm.loss.model_copy(update={"clip_cov": None})})
    values = batch.values if config.of_critic else None
    gap = batch.teacher - batch.new if algorithm.teacher else None
    each = np.ones(len(batch.rewards))
    before = Baseline(0.4 * each, 3 * each, score_ratio=2.0)  # of earlier steps: the same of every prompt
    train = TrainBatch.build(batch.rollouts, config, baseline=before, values=values, teacher_gap=gap)
    old, new, entropy, expected = map(torch.from_numpy, (batch.old, batch.new, batch.entropy, batch.expected))
    found = SimpleNamespace(mini=np.zeros(len(train.advantages), np.int64), losses=[])
    for number, members in enumerate(train.mini_batches):
        found.mini[members] = number
    keys = ("advantages", "modulated", "weights", "loss", "grad", "grad_entropy", "selected", "held")
    for key in keys:
        setattr(found, key, np.zeros(len(batch.old)))
    for members in train.mini_batches:
        selecting = new if name.split()[0] in ("clip_cov", "kl_cov") else old
        stats = TokenStats(selecting, entropy, expected, torch.from_numpy(batch.collision))
        args = (train.advantages, train.weights, stats, algorithm)
        shaped = shape_tokens(batch.rollouts, members, *args, seed=config.seed, process=train.process)
        here = torch.from_numpy(np.isin(np.repeat(np.arange(len(batch.lengths)), batch.lengths), members))
        advantages = shaped.advantages[here].double()
        if without is not None:
            advantages = torch.where(torch.from_numpy(without)[here], 0.0, advantages)
        log_ratios = None
        if (ratio := algorithm.loss.ratio) != "token":
            log_ratios = response_log_ratios((new - old)[here], torch.from_numpy(batch.lengths[members]), ratio)
        held = None if shaped.old_kl_coef is None else shaped.old_kl_coef[here].double()
        tokens = Tokens(advantages, shaped.weights[here].double(), old[here], None, held, log_ratios)
        zeros = torch.zeros_like(new[here])
        stats = Statistics(zeros, zeros, new[here], entropy[here], expected[here], zeros)
        terms = loss_terms(config.policy_loss(), stats, tokens, expected[here], shaped.ranges)
        loss, *_ = summed_loss(config.policy_loss(), new[here], entropy[here], tokens, expected[here], shaped.ranges)
        found.losses.append(terms.sums[0].item())
        values = (advantages, terms.advantages, tokens.weights, loss, *terms[:2], shaped.selected[here], held)
        for key, value in zip(keys, values, strict=True):
            if value is not None:
                getattr(found, key)[here.numpy()] = value.numpy()
    return found


def padded(batch: SimpleNamespace, values: np.ndarray, size: int) -> np.ndarray:
    """[n] -> [size, LENGTH], 0 elsewhere."""
    rows = np.zeros((size, LENGTH), values.dtype)
    rows[: len(batch.lengths)][np.arange(LENGTH) < batch.lengths[:, None]] = values
    return rows


def flat(batch: SimpleNamespace, rows: np.ndarray) -> np.ndarray:
    return rows[: len(batch.lengths)][np.arange(LENGTH) < batch.lengths[:, None]]


def penalised(batch: SimpleNamespace) -> np.ndarray:
    """verl's DAPO reward: x tokens into the buffer of k takes x / k of the factor, .5 for rewards of 0 and 1."""
    k = 0.2 * LENGTH
    return batch.rewards + np.minimum(-(batch.lengths - (LENGTH - k)) / k * 0.5, 0.0)


def ask_peers(folder: Path, cases: dict, **arrays: np.ndarray) -> dict[str, np.ndarray]:
    """What peer_job.py answers."""
    np.savez(folder / "in.npz", **arrays)
    (folder / "cases.json").write_text(json.dumps(cases))
    files = [folder / name for name in ("cases.json", "in.npz", "out.npz")]
    words = [PEERS_PYTHON, "-P", Path(__file__).with_name("peer_job.py"), *files]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    with (folder / "log").open("w") as log:
        run = subprocess.run(words, stdout=log, stderr=log, env=environment, timeout=1500, check=False)
    assert run.returncode == 0, (folder / "log").read_text()[-3000:]
    return dict(np.load(folder / "out.npz"))


class Compared(SimpleNamespace):
    def __repr__(self) -> str:  # of a failed test: the arrays would take minutes
        return "Compared()"


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> Compared:
    """The batches, what we make of each, and the peers' answers."""
    assert {name.split()[0] for name in CASES} == {file.stem for file in METHODS.glob("*.yaml")}
    folder = tmp_path_factory.mktemp("peers")
    batches = [make_batch(seed) for seed in range(max(map(batches_of, CASES)))]
    mine = {name: [ours(name, batch) for batch in batches[: batches_of(name)]] for name in CASES}
    size = max(len(batch.lengths) for batch in batches)
    arrays = {"lengths": [np.pad(b.lengths, (0, size - len(b.lengths))) for b in batches]}
    arrays["group"] = [np.pad(b.groups, (0, size - len(b.groups))) for b in batches]
    arrays["rewards"] = [np.pad(b.rewards, (0, size - len(b.rewards))) for b in batches]
    for name in ("dapo", "fork_tokens"):
        arrays[f"rewards/{name}"] = [np.pad(penalised(b), (0, size - len(b.rewards))) for b in batches]
    arrays["mini"] = [np.pad(m.mini, (0, size - len(m.mini)), constant_values=-1) for m in mine["ppo"]]
    for key in ("old", "new", "entropy", "collision", "values", "teacher"):
        arrays[key] = [padded(b, getattr(b, key), size) for b in batches]
    arrays["mask"] = [padded(b, np.ones_like(b.old), size) for b in batches]
    for name in (name for name, case in CASES.items() if case["advantage"] is None):
        arrays[f"advantages/{name}"] = [padded(b, m.modulated, size) for b, m in zip(batches, mine[name], strict=False)]
    for name in WEIGHTS_GIVEN:
        arrays[f"weights/{name}"] = [padded(b, m.weights, size) for b, m in zip(batches, mine[name], strict=False)]
    arrays["selected/fork_tokens"] = [
        padded(b, m.selected, size) for b, m in zip(batches, mine["fork_tokens"], strict=False)
    ]
    cases = {name: {**case, "batches": batches_of(name)} for name, case in CASES.items()}
    theirs = ask_peers(folder, cases, **{key: np.stack(value) for key, value in arrays.items()})
    return Compared(batches=batches, mine=mine, theirs=theirs)


def close(got, want, *what) -> None:
    """To 1e-6: advantages and weights are float32 here, the rest float64 on both sides."""
    # A loss, and the gradient of a token that kl_cov holds, are sums whose parts may nearly cancel.
    atol = {"loss": 1e-7, "held gradient": 1e-8}.get(what[-1], 1e-10)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=atol, err_msg=str(what))


def pairs(compared, name):
    for b, (batch, mine) in enumerate(zip(compared.batches, compared.mine[name], strict=False)):
        theirs = {key: compared.theirs[f"{key}/{name}"][b] for key in ("advantages", "loss", "grad", "grad_entropy")}
        rows = {key: flat(batch, value) for key, value in theirs.items() if key != "loss"}
        yield b, batch, mine, SimpleNamespace(**rows, losses=theirs["loss"][: batch.minis])


PLAIN = [name for name in CASES if not name.startswith(("clip_cov", "kl_cov"))]


@pytest.mark.parametrize("name", PLAIN)
def test_loss_and_gradient_are_the_peer_s(compared, name):
    moved = 0
    for b, batch, mine, theirs in pairs(compared, name):
        if CASES[name]["advantage"] is not None:
            close(mine.advantages, theirs.advantages, b, "advantages")
        close(mine.grad, theirs.grad, b, "gradient")
        close(mine.grad_entropy, theirs.grad_entropy, b, "gradient by entropy")
        losses = mine.losses
        if name == "rloo":  # ours adds a response's loss up over its tokens: the same gradient, another value
            of_tokens = mine.weights * mine.loss / np.repeat(batch.lengths, batch.lengths)
            owner = np.repeat(mine.mini, batch.lengths)
            losses = np.bincount(owner, of_tokens, minlength=batch.minis)
        close(losses, theirs.losses, b, "loss")
        moved += (theirs.grad != 0).sum()
    assert moved > 25 * batches_of(name)


@pytest.mark.parametrize("name", ["clip_cov", "clip_cov wide"])
def test_clip_cov_takes_as_many_tokens_of_the_same_band(compared, name):
    settings = config_of(name, 1).algorithm.loss.clip_cov
    for b, batch, mine, theirs in pairs(compared, name):
        close(mine.advantages[mine.selected == 0], theirs.advantages[mine.selected == 0], b, "advantages")
        ratio, taken = np.exp(batch.new - batch.old), np.zeros(len(batch.old), bool)
        clipped = (theirs.advantages > 0) & (ratio > 2)
        owner = np.repeat(mine.mini, batch.lengths)
        for m in range(batch.minis):
            here = owner == m
            spread = covariance(theirs.advantages[here], batch.new[here])
            band = (spread > settings.low) & (spread < settings.high)
            most = max(1, int(settings.ratio * here.sum()))
            lost = (theirs.grad[here] == 0) & (theirs.advantages[here] != 0) & ~clipped[here]
            unseen = (band & (theirs.advantages[here] == 0)).sum()  # taken or not, these have no gradient
            number = min(most, (band & ~clipped[here]).sum())
            assert number - unseen <= lost.sum() <= number and not (lost & ~band).any(), (b, m)
            chosen = mine.selected[here] != 0  # a token that the ratio clips has no gradient to lose: ours may be one
            assert chosen.sum() == min(most, band.sum()) and not (chosen & ~band).any(), (b, m)
            taken[here] = lost
        again = ours(name, batch, taken)
        close(again.grad, theirs.grad, b, "gradient")
        close(again.losses, theirs.losses, b, "loss")


@pytest.mark.parametrize("name", ["kl_cov", "kl_cov wide"])
def test_kl_cov_is_the_peer_s_but_for_the_rounding_of_the_absolute_value(compared, name):
    """Ours is sqrt(d^2 + 1e-6) - 1e-3 for |d|: the two differ by less than 1e-3 in value, and in slope near 0 alone.

    A mini-batch without any advantage makes no update here, so nothing is held in it."""
    compared_tokens = 0
    for b, batch, mine, theirs in pairs(compared, name):
        close(mine.advantages, theirs.advantages, b, "advantages")
        d, owner = batch.new - batch.old, np.repeat(mine.mini, batch.lengths)
        size = np.sqrt(d**2 + 1e-6)
        share = mine.weights * mine.held
        updated = np.bincount(owner, mine.advantages != 0) > 0
        gradient = mine.grad + share * (np.sign(d) - d / size)
        close(gradient[updated[owner]], theirs.grad[updated[owner]], b, "held gradient")
        lifted = np.bincount(owner, share * (np.abs(d) - size + 1e-3))
        close((mine.losses + lifted)[updated], theirs.losses[updated], b, "loss")
        compared_tokens += (mine.held > 0).sum()
    assert compared_tokens > BATCHES
