"""Compiles kernels for GPUs that need not be there; prints what ptxas made of them, as JSON.

`compile_kernels.py CC[,CC] [NAME ...]`, compute capabilities as 90; without names every variant. Run it as a process
of its own: in one with the interpreter there is nothing to compile.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from dynamo_megatron.kernels import triton_backend as backend
from dynamo_megatron.kernels import triton_kernels as kernels

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
STATISTICS = {"logits": "*fp32", "labels": "*i64", "part": "*fp32", "TEMPERATURE": 0.7}
GRADIENT = {
    **dict.fromkeys(("logits", "maximum", "log_sum", "entropy", "grad_logprobs", "grad_entropy"), "*fp32"),
    "labels": "*i64",
    "TEMPERATURE": 0.7,
}
TENSORS = ("parts", "statistics", "advantages", "weights", "old_logprobs", "ref_logprobs", "old_kl_coef")
TENSORS += ("log_ratios", "ranges")
LOSS = {"LOW": 0.2, "HIGH": 0.28, "CEILING": 10.0, "KL_COEF": 0.1, "KL_KIND": "k3", "ENTROPY_COEF": 0.01}
LOSS |= {"KIND": "clip"}
LOSS |= {"ALPHA": 0.2, "LAMBDA_MIN": 0.6, "GAMMA": 50.0, "TAU": 0.99, "TEMPERATURE": 0.7, "BLOCK": backend.MERGE_BLOCK}
MERGE = {**dict.fromkeys((*TENSORS, "terms", "sums"), "*fp32"), **LOSS}
# On policy, without modulation and every optional term.
LEAST = {**MERGE, **dict.fromkeys(("old_logprobs", "ref_logprobs", "old_kl_coef", "log_ratios", "ranges", "CEILING"))}
LEAST |= {**dict.fromkeys(("ALPHA", "LAMBDA_MIN", "GAMMA", "TAU")), "KL_COEF": 0.0, "ENTROPY_COEF": 0.0}
MERGE_ALONE = {**MERGE, **dict.fromkeys((*TENSORS[2:], "terms", "sums"))}
# name: (kernel, arguments as a type or a constexpr's value, with i32 for those not named, warps)
VARIANTS = {
    "statistics": (
        kernels.statistics_kernel,
        {**STATISTICS, "BLOCK": backend.STATISTICS_BLOCK},
        backend.STATISTICS_WARPS,
    ),
    **{
        f"gradient_{dtype}{'_entropy' if entropy else ''}": (
            kernels.gradient_kernel,
            {**GRADIENT, "gradient": f"*{dtype}", "BLOCK": backend.GRADIENT_BLOCK}
            | ({} if entropy else {"grad_entropy": None}),
            backend.GRADIENT_WARPS,
        )
        for dtype in ("fp32", "bf16")
        for entropy in (False, True)
    },
    "merge": (kernels.merge_kernel, MERGE_ALONE, backend.MERGE_WARPS),
    "merge_loss_least": (kernels.merge_kernel, LEAST, backend.MERGE_WARPS),
    "merge_loss_cispo": (kernels.merge_kernel, {**LEAST, "KIND": "cispo"}, backend.MERGE_WARPS),
    **{
        f"merge_loss_{kind}": (kernels.merge_kernel, {**MERGE, "KL_KIND": kind}, backend.MERGE_WARPS)
        for kind in ("k1", "k2", "k3", "abs")
    },
}
ALIGNED = ("rows", "row_stride", "gradient_stride")  # multiples of 16, as the tensors' addresses


def compiled(kernel, arguments: dict, warps: int, capability: int) -> dict[str, int | list[str]]:
    """Registers, bytes of stack and local memory, and counts of instructions; the order of those on global memory."""
    signature, constants, hints = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        value = arguments.get(name, "i32")
        is_type = isinstance(value, str) and name not in ("KIND", "KL_KIND")
        signature[name] = value if is_type else "constexpr"
        if not is_type:
            constants[(i,)] = value
        elif value.startswith("*") or name in ALIGNED:
            hints[(i,)] = [["tt.divisibility", 16]]
    target = GPUTarget("cuda", capability, 32)
    source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=hints)
    binary = triton.compile(source, target=target, options={"num_warps": warps, **backend.OPTIONS}).asm["cubin"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        usage, sass = (
            subprocess.run([CUOBJDUMP, flag, file.name], capture_output=True, text=True, check=True).stdout
            for flag in ("-res-usage", "-sass")
        )
    registers, stack, local = map(int, re.search(r"REG:(\d+) STACK:(\d+).*? LOCAL:(\d+)", usage).groups())
    return {
        "registers": registers,
        "stack": stack,
        "local": local,
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        "wide_loads": len(re.findall(r"\bLDG\.E\.128", sass)),
        "narrow_loads": len(re.findall(r"\bLDG\.E(?!\.128)", sass)),
        "order": re.findall(r"\b(LDG\.E\.128|BAR\.SYNC|STG\.E(?:\.\d+)?)", sass),
        "fused": len(re.findall(r"\bFFMA", sass)),
    }


if __name__ == "__main__":
    names = sys.argv[2:] or VARIANTS
    json.dump(
        {f"{name} sm_{cc}": compiled(*VARIANTS[name], int(cc)) for name in names for cc in sys.argv[1].split(",")},
        sys.stdout,
    )
