"""What block-wise FP8 has to be, in float64: the format by its definition, scales and rounding by hand."""

import numpy as np

CODES = np.arange(127)  # of float8_e4m3's finite values from 0 up: 4 bits of exponent (bias 7), 3 of mantissa
VALUES = np.where(
    CODES < 8, (CODES % 8) / 8 * 2.0**-6, (1 + (CODES % 8) / 8) * 2.0 ** (np.maximum(CODES // 8, 1) - 7.0)
)
MIDDLES = (VALUES[1:] + VALUES[:-1]) / 2
TINY = 2.0**-126  # the smallest normal float32


def reference(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(codes without the sign, scales), by block: float64 quotients, rounded to float32 as a float32 division is, and
    then to the nearest value, in the middle to the even one."""
    rows, columns = weight.shape
    scales = np.zeros((-(-rows // 128), -(-columns // 128)), np.float32)
    codes = np.zeros(weight.shape, np.uint8)
    for i, j in np.ndindex(scales.shape):
        part = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
        block = np.abs(weight[part])
        scales[i, j] = max(np.float32(block.max() / 448.0), np.float32(TINY))
        quotient = (block / np.float64(scales[i, j])).astype(np.float32).astype(np.float64)
        above = np.searchsorted(MIDDLES, quotient)  # middles that are below it
        tie = (above < 126) & (MIDDLES[np.minimum(above, 125)] == quotient)
        codes[part] = above + (tie & (above % 2 == 1))
    return codes, scales
