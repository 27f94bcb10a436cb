"""Removes the machine code of other GPUs from a CUDA library, so that it packs small."""

from __future__ import annotations

import struct
from pathlib import Path

MAGIC = 0xBA55ED50
PTX = 1  # an entry's kind: text, which is for any architecture and compiled when it is loaded


def fatbin_sections(data: bytearray) -> list[tuple[int, int]]:
    """(offset, size) of the sections .nv_fatbin of a 64-bit little-endian ELF file."""
    assert data[:6] == b"\x7fELF\x02\x01", "not a 64-bit little-endian ELF file"
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * size) for i in range(count)]
    strings = headers[names][4]
    wanted = b".nv_fatbin\0"
    return [(h[4], h[5]) for h in headers if data[strings + h[0] : strings + h[0] + len(wanted)] == wanted]


def entries(data: bytearray, at: int) -> tuple[int, list[tuple[int, int, int, int]]]:
    """(end of the container at `at`, its entries: (offset, bytes with header, kind, architecture))."""
    _, _, header, size = struct.unpack_from("<IHHQ", data, at)
    stop, entry, found = at + header + size, at + header, []
    while entry + 0x20 <= stop:
        kind, _, entry_header, payload = struct.unpack_from("<HHIQ", data, entry)
        if entry_header == 0:
            break
        (arch,) = struct.unpack_from("<I", data, entry + 0x1C)
        found.append((entry, entry_header + payload, kind, arch))
        entry += entry_header + payload
    return stop, found


def keep_architecture(library: Path, arch: int) -> None:
    """Leaves in `library` the code of compute capability `arch` (90 and 90a are one number), in place.

    A CUDA library has a section .nv_fatbin: containers, each a list of entries with a header and a payload, one entry
    an architecture. In each container the entries that stay move to its front, its size becomes theirs, and what is
    left behind becomes zeros. Nothing else moves: the library registers each container by its address. A container
    without such an entry keeps its smallest one, since an empty container is no valid image.
    """
    data = bytearray(library.read_bytes())
    for offset, size in fatbin_sections(data):
        at, end = offset, offset + size
        while at + 16 <= end:
            if struct.unpack_from("<I", data, at)[0] != MAGIC:
                at += 8
                continue
            (header,) = struct.unpack_from("<H", data, at + 6)
            stop, found = entries(data, at)
            stay = [entry for entry in found if entry[3] == arch and entry[2] != PTX]
            if found and not stay:
                stay = [min(found, key=lambda entry: entry[1])]
            body = b"".join(bytes(data[entry[0] : entry[0] + entry[1]]) for entry in stay)
            data[at + header : stop] = body + bytes(stop - at - header - len(body))
            struct.pack_into("<Q", data, at + 8, len(body))
            at = stop
    library.write_bytes(data)
