"""verl's GAE and value loss for batches in a file, run by the interpreter that has it: `peer_critic_job.py IN OUT`.

IN, OUT: .npz of float64 [batches, rollouts, length] arrays. It imports nothing of this project.
"""

import sys

import numpy as np
import torch
from verl.trainer.ppo import core_algos


def main(in_file, out_file):
    arrays = {key: torch.from_numpy(value) for key, value in np.load(in_file).items()}
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
    np.savez(out_file, **out)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
