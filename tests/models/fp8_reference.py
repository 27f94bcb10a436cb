"""What block-wise FP8 has to be, in float64: the format by its definition, scales and rounding by hand."""

import numpy as np

CODES = np.arange(127)  # of float8_e4m3's finite values from 0 up: 4 bits of exponent (bias 7), 3 of mantissa
VALUES = np.where(
    CODES < 8, (CODES % 8) / 8 * 2.0**-6, (1 + (CODES % 8) / 8) * 2.0 ** (np.maximum(CODES // 8, 1) - 7.0)
)
MIDDLES = (VALUES[1:] + VALUES[:-1]) / 2
TINY = 2.0**-126  # the smallest normal float32


def reference(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(codes without the sign, scales, whether a quotient is so close to the middle of two values that its rounding to
    float32 decides), by block, in float64."""
    rows, columns = weight.shape
    scales = np.zeros((-(-rows // 128), -(-columns // 128)), np.float32)
    codes, close = np.zeros(weight.shape, np.uint8), np.zeros(weight.shape, bool)
    for i, j in np.ndindex(scales.shape):
        part = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
        block = np.abs(weight[part])
        scales[i, j] = max(np.float32(block.max() / 448.0), np.float32(TINY))
        quotient = block / np.float64(scales[i, j])
        above = np.searchsorted(MIDDLES, quotient)  # middles that are below it
        tie = (above < 126) & (MIDDLES[np.minimum(above, 125)] == quotient)
        codes[part] = above + (tie & (above % 2 == 1))  # to the even one
        nearest = np.minimum(
            np.abs(MIDDLES[np.minimum(above, 125)] - quotient), np.abs(MIDDLES[np.maximum(above, 1) - 1] - quotient)
        )
        close[part] = ~tie & (nearest <= 2.0**-23 * quotient)
    return codes, scales, close
