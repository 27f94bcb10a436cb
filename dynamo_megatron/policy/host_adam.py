"""Adam with its state in host memory, where it also computes (`optimizer.cpu_offload`).

Megatron-core 0.16.1 has an optimizer for this, HybridDeviceOptimizer. No test could run it: without a GPU its first
step raises KeyError, and without TransformerEngine the settings with which no main weights stay on the device raise
TypeError. It also keeps a float32 copy of all gradients, and makes a step along random gradients before a first load.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.adamw import adamw


class HostAdam:
    """Adam with decoupled weight decay of `param_groups`, in float32, in host memory.

    It takes the place of TransformerEngine's FusedAdam with main weights in Megatron's distributed optimizer, and has
    the attributes and methods that this uses. Parameters are this rank's runs of elements of the model's own
    parameters, flat, and `decoupled_grad` of each is its float32 gradient, on the same device. On CPUs a step is bit
    for bit that of torch's fused AdamW.
    """

    def __init__(self, param_groups: list[dict[str, Any]]):
        self.param_groups = param_groups
        self.state: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        for p in (p for group in param_groups for p in group["params"]):
            main = p.detach().to("cpu", torch.float32, copy=True)
            moments = {name: torch.zeros_like(main) for name in ("exp_avg", "exp_avg_sq")}
            self.state[p] = {"master_param": main, **moments}

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            group["step"] = int(group.get("step", 0)) + 1
            for p in group["params"]:
                main, first, second = (self.state[p][name] for name in ("master_param", "exp_avg", "exp_avg_sq"))
                adamw(
                    *([main], [p.decoupled_grad.cpu()], [first], [second], []),
                    [torch.tensor(group["step"] - 1.0)],  # adamw counts it up
                    fused=True,
                    amsgrad=False,
                    maximize=False,
                    lr=group["lr"],
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                )
                p.data.copy_(main)

    def state_dict(self) -> dict[str, Any]:
        """Settings and number of steps. Megatron reads the latter in `state` without TransformerEngine, in the groups
        with it, and gets the tensors by `get_unscaled_state`."""
        groups, state = [], {}
        for group in self.param_groups:
            indices = list(range(len(state), len(state) + len(group["params"])))
            state |= {i: {"step": torch.tensor(float(group.get("step", 0)))} for i in indices}
            groups.append({**group, "params": indices})
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for group, saved in zip(self.param_groups, state["param_groups"], strict=True):
            group.update({name: value for name, value in saved.items() if name != "params"})

    def get_unscaled_state(self, p: torch.Tensor, name: str) -> torch.Tensor:
        return self.state[p][name]

    def set_scaled_state(self, p: torch.Tensor, name: str, value: torch.Tensor) -> None:
        self.state[p][name].copy_(value)
