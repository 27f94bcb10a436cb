"""In place of SGLang's kernels/ops/gemm/cutedsl_dual_gemm.py where nvidia-cutlass-dsl is not installed.

SGLang 0.5.23 imports that module for every dense model on CUDA. It needs `cutlass`, though its kernel is for Blackwell.
"""

from enum import IntEnum

MAX_DUAL_GEMM_DECODE_TOKENS = 0


class DualGemmQuantMode(IntEnum):
    STATIC_PER_TENSOR = 0
    STATIC_PER_TOKEN = 1
    DYNAMIC_PER_TENSOR = 2
    DYNAMIC_PER_TOKEN = 3
    UNQUANT = 4

    @property
    def is_quantized(self) -> bool:
        return self is not self.UNQUANT


def can_use_dual_gemm(*_) -> bool:
    return False
