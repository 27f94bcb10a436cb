"""The system calls that sandboxed programs may not make, as a filter for the kernel (classic BPF, seccomp(2))."""

from __future__ import annotations

import errno
import platform
import struct

from dynamo_megatron.errors import InputError

# Numbers on x86-64 and aarch64. None of these calls is of use to a program of the `code` reward. Memory of the last
# rows (memfd to mq) does not count towards the limits of the process. A network namespace does not isolate all families
# of sockets (vsock).
DENIED = {
    "fork": (57, None),
    "vfork": (58, None),
    "unshare": (272, 97),
    "setns": (308, 268),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "fsopen": (430, 430),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "io_uring_setup": (425, 425),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "socket": (41, 198),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
}
CLONE, CLONE3 = (56, 220), (435, 435)
CLONE_THREAD = 0x10000
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH
X32 = 0x40000000  # numbers from here on belong to x86-64's other table of system calls

LOAD, EQUAL, AT_LEAST, BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, FAIL = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER_AT, MACHINE_AT, FIRST_ARGUMENT_AT = 0, 4, 16  # in struct seccomp_data


def system_call_filter() -> bytes:
    """The filter as an array of struct sock_filter. It allows new threads but no new processes. Raises ValueError on a
    machine whose system calls are not in the table."""
    machine = platform.machine()
    if machine not in MACHINES:
        known = " and ".join(MACHINES)
        raise InputError(f"reward.functions: code: there is a sandbox on {known}, and this machine is {machine}")
    column, audit = MACHINES[machine]
    refused = FAIL | errno.EPERM
    steps = [(LOAD, 0, 0, MACHINE_AT), (EQUAL, 1, 0, audit), (RETURN, 0, 0, KILL), (LOAD, 0, 0, NUMBER_AT)]
    if machine == "x86_64":
        steps += [(AT_LEAST, 0, 1, X32), (RETURN, 0, 0, KILL)]
    for numbers in DENIED.values():
        if numbers[column] is not None:
            steps += [(EQUAL, 0, 1, numbers[column]), (RETURN, 0, 0, refused)]
    # The flags of clone3 are in memory, which a filter cannot read. With ENOSYS the C library uses clone instead.
    steps += [(EQUAL, 0, 1, CLONE3[column]), (RETURN, 0, 0, FAIL | errno.ENOSYS)]
    steps += [(EQUAL, 0, 3, CLONE[column]), (LOAD, 0, 0, FIRST_ARGUMENT_AT)]
    steps += [(BITS, 1, 0, CLONE_THREAD), (RETURN, 0, 0, refused), (RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("=HBBI", *step) for step in steps)
