"""The losses of verl and TRL for batches in a file, run by the interpreter that has them: `peer_job.py CASES IN OUT`.

CASES: JSON, name -> one of `tests/policy/test_peers.py`'s cases. IN, OUT: .npz. With "discounts" in IN, verl's GAE and
value loss instead. It imports nothing of this project.
"""

import json
import sys
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
import torch
from accelerate import Accelerator
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig, PolicyLossConfig


def verl_advantages(rewards, mask, groups, kind, old, collision, values, new, teacher):
    """[S, L]; kind: grpo, dr_grpo, rloo, otb, gae or k1; `old` and `collision` are for otb, `values` for gae, `new` and
    `teacher` for k1, which verl's distillation by policy gradients negates."""
    if kind == "k1":
        return -core_algos.kl_penalty(new, teacher, "k1")
    scores = torch.zeros_like(mask)
    scores[:, 0] = rewards
    if kind in ("otb", "gae"):
        scores = torch.zeros_like(mask)
        scores[torch.arange(len(mask)), mask.sum(1).long() - 1] = rewards
        if kind == "gae":
            return core_algos.compute_gae_advantage_return(scores, values, mask, 1.0, 0.95)[0]
        return core_algos.compute_optimal_token_baseline_advantage(scores, mask, groups, old, collision)[0]
    if kind == "rloo":
        return core_algos.compute_rloo_outcome_advantage(scores, mask, groups)[0]
    return core_algos.compute_grpo_outcome_advantage(scores, mask, groups, norm_adv_by_std_in_grpo=kind == "grpo")[0]


def verl_loss(case, t):
    options = case["options"]
    policy_loss = PolicyLossConfig(loss_mode=case["loss"], **options.get("policy_loss", {}))
    names = ("clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        policy_loss=policy_loss,
        global_batch_info=options.get("global_batch_info", {}),
        **{name: options[name] for name in names if name in options},
    )
    function, mode = core_algos.get_policy_loss_fn(case["loss"]), case["aggregation"]
    loss, _ = function(t.old, t.new, t.advantages, t.mask, mode, config, rollout_is_weights=t.weights)
    if coef := options.get("entropy_coeff"):
        loss = loss - coef * core_algos.agg_loss(t.entropy, t.mask, mode)
    return loss


def probe(trainer):
    """A trainer without a model: its logprobs are given. What else `_compute_loss` reads is set as a trainer does."""

    class Probe(trainer):
        def __init__(self, **fields):
            self.__dict__.update(fields)

        def _get_per_token_logps_and_entropies(self, *_, **__):
            return self.logprobs, self.entropies, None

    return Probe


PROBES = {"grpo": probe(GRPOTrainer), "rloo": probe(RLOOTrainer)}


def trl_trainer(case, t):
    options = {"loss_type": "bnpo", "importance_sampling_level": "token", "top_entropy_quantile": 1.0}
    return PROBES[case["loss"]](
        logprobs=t.new,
        entropies=t.entropy.detach(),
        model=SimpleNamespace(training=False),
        accelerator=ACCELERATOR,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        _metrics={"eval": defaultdict(list)},
        aux_loss_enabled=False,
        off_policy_mask_threshold=None,
        beta=0.0,
        use_vllm=False,
        _entropy_bonus_enabled=False,
        **options | case["options"],
    )


def trl_loss(case, t):
    nothing = torch.zeros(len(t.mask), 0, dtype=torch.int64)
    advantages = t.advantages if case["advantage"] == "gae" else t.advantages[:, 0]
    inputs = {"prompt_ids": nothing, "prompt_mask": nothing, "advantages": advantages}
    inputs |= {"completion_ids": torch.zeros_like(t.mask, dtype=torch.int64), "completion_mask": t.mask}
    inputs |= {"old_per_token_logps": t.old, "old_logps": (t.old * t.mask).sum(1), "num_items_in_batch": t.mask.sum()}
    return trl_trainer(case, t)._compute_loss(None, inputs)


def run_case(name, case, given, b, rows, mini, out):
    """Loss and gradients of each mini-batch of batch b, into the arrays of `out`."""
    for m in range(int(mini.max()) + 1):
        here = rows[mini[rows] == m]
        part = SimpleNamespace(**{key: given(key, here) for key in ("mask", "old", "new", "entropy")})
        part.new.requires_grad_()
        part.entropy.requires_grad_()
        part.advantages, part.weights = given(f"advantages/{name}", here), given(f"weights/{name}", here)
        if part.advantages is None:
            part.advantages = torch.from_numpy(out[f"advantages/{name}"][b, here])
        if (selected := given(f"selected/{name}", here)) is not None:
            part.mask = part.mask * selected
        loss = {"verl": verl_loss, "trl": trl_loss}[case["peer"]](case, part)
        grads = torch.autograd.grad(loss, (part.new, part.entropy), allow_unused=True)
        out[f"loss/{name}"][b, m] = loss.item()
        for key, grad in zip(("grad", "grad_entropy"), grads, strict=True):
            if grad is not None:
                out[f"{key}/{name}"][b, here] = grad.numpy()


def critic(arrays):
    """Of float64 [batches, rollouts, length] arrays."""
    arrays = {key: torch.from_numpy(value) for key, value in arrays.items()}
    out = {key: np.zeros(arrays["values"].shape) for key in ("advantages", "returns", "gradient")}
    out |= {key: np.zeros(len(arrays["values"])) for key in ("loss", "clipped")}
    for b, (gamma, lam) in enumerate(arrays["discounts"].tolist()):
        rewards, values, mask, new = (arrays[key][b] for key in ("rewards", "values", "mask", "new"))
        advantages, returns = core_algos.compute_gae_advantage_return(rewards, values, mask, gamma, lam)
        new.requires_grad_()
        loss, clipped = core_algos.compute_value_loss(new, returns, values, mask, 0.2)
        (gradient,) = torch.autograd.grad(loss, new)
        for key, value in (("advantages", advantages), ("returns", returns), ("gradient", gradient)):
            out[key][b] = value.numpy()
        out["loss"][b], out["clipped"][b] = loss.item(), clipped
    return out


def policy_losses(cases, arrays):
    batches, size, length = arrays["old"].shape
    per_token = (batches, size, length)
    out = {f"{key}/{name}": np.zeros(per_token) for name in cases for key in ("advantages", "grad", "grad_entropy")}
    out |= {f"loss/{name}": np.zeros((batches, int(arrays["mini"].max()) + 1)) for name in cases}
    for b in range(batches):
        rows = np.flatnonzero(arrays["lengths"][b])
        torch.manual_seed(b)

        def given(key, here, b=b):
            return torch.from_numpy(arrays[key][b, here]) if key in arrays else None

        for name, case in cases.items():
            if b >= case["batches"]:
                continue
            if (kind := case["advantage"]) is not None:
                rewards = given(f"rewards/{name}", rows)
                rewards = given("rewards", rows) if rewards is None else rewards
                of_tokens = [given(key, rows) for key in ("old", "collision", "values", "new", "teacher")]
                found = verl_advantages(rewards, given("mask", rows), arrays["group"][b, rows], kind, *of_tokens)
                out[f"advantages/{name}"][b, rows] = found.numpy()
            run_case(name, case, given, b, rows, arrays["mini"][b], out)
    return out


if __name__ == "__main__":
    torch.set_num_threads(1)
    ACCELERATOR = Accelerator(cpu=True)
    with open(sys.argv[1]) as file:
        cases = json.load(file)
    arrays = dict(np.load(sys.argv[2]))
    np.savez(sys.argv[3], **(critic(arrays) if "discounts" in arrays else policy_losses(cases, arrays)))
