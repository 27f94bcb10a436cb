import ctypes
import subprocess
import sys

from dynamo_megatron.runtime.heap import give_back_freed_memory

LIBC = ctypes.CDLL(None)
LIBC.malloc.restype, LIBC.malloc.argtypes, LIBC.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
BLOCKS, SIZE = 2000, 64 << 10  # below what glibc maps on its own


def resident() -> int:
    """Bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def main() -> None:
    """Leaves holes below a block that stays."""
    blocks = [LIBC.malloc(SIZE) for _ in range(BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, SIZE)
    for block in blocks[:-1]:
        LIBC.free(block)
    before = resident()
    give_back_freed_memory()
    given_back = before - resident()
    assert given_back > 0.9 * BLOCKS * SIZE, f"{given_back} bytes"


def test_memory_below_a_block_that_stays_is_given_back():
    assert subprocess.run([sys.executable, __file__], timeout=60).returncode == 0


if __name__ == "__main__":
    main()
