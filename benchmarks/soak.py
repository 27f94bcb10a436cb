"""The demo's task on two ranks and two servers, hurt by a random fault every few steps: what it survives, and whether
memory, handles, threads, sockets, /dev/shm and step time stay flat.

    python -P benchmarks/soak.py --steps 3000 --minutes 90 --seed 0

The order of the faults is seeded, and no kind comes again before all have come; each must leave the run going on, or
end it so that the same command resumes. Exit code 1 and a line for each thing that was not as it should be. As root it
runs in a mount namespace of its own, with an output folder and a /dev/shm that may be filled; else these two faults are
left out. Run nothing else meanwhile: times and /dev/shm are the machine's. tests/e2e/soak_faults.py has the faults, and
what is not among them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves this folder out
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "e2e"))
from measure import machine
from soak_run import Soak, named, possible
from soak_site import Site

ROOT = Path(__file__).parents[1]
PACKAGES = ("dynamo-megatron", "torch", "megatron-core", "sglang", "aiohttp")
ISOLATED = "SOAK_ISOLATED"  # set in the mount namespace


def isolate() -> bool:
    """Starts this command again in a mount namespace of its own. Returns whether it is in one already."""
    if os.environ.get(ISOLATED) == "1":
        return True
    if os.geteuid() == 0 and shutil.which("unshare"):
        os.environ[ISOLATED] = "1"
        command = ["unshare", "--mount", "--propagation", "private", sys.executable, "-P", *sys.argv]
        os.execvp(command[0], command)
    print("not root, or no unshare: faults that fill a disk are left out", file=sys.stderr)
    return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--minutes", type=float, help="ends the soak before its steps are done")
    parser.add_argument("--rounds", type=int, help="ends it once each kind of fault has occurred so often")
    parser.add_argument("--every", type=int, default=20, help="steps from one fault's end to the next one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--health-timeout", type=float, default=30.0, help="seconds; freezes are 1/6, 2/3, 3/2 of it")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="further config of the run")
    parser.add_argument("--folder", type=Path, help="of the run, kept at the end; default: a temporary one")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "soak.json")
    parser.add_argument("kinds", nargs="*", help="names of faults; default: all")
    options = parser.parse_args()
    try:
        kinds = named(options.kinds)
    except ValueError as error:
        print(f"soak: {error}", file=sys.stderr)
        return 2
    isolated = isolate()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # it clears away what it has started
    at_start, started = machine(PACKAGES), time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = options.folder
        if folder is None:
            made = tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True)
            folder = Path(stack.enter_context(made))
        site = Site(folder, options.steps, options.seed, options.health_timeout, isolated=isolated, words=options.set)
        stack.callback(site.close)
        soak = Soak(site, options.every, options.steps, options.minutes, options.rounds)
        try:
            soak.run(possible(site, kinds), random.Random(options.seed))
        except KeyboardInterrupt:
            soak.problems.append("interrupted")
        settings = {
            "seed": options.seed,
            "every": options.every,
            "health timeout": options.health_timeout,
            "config": options.set,
        }
        result = {**settings, "seconds": time.monotonic() - started, **soak.result(), "machine": at_start}
    if soak.faults:
        options.out.write_text(json.dumps(result, indent=1, default=str) + "\n", encoding="utf-8")
    else:
        print(f"no fault has occurred: {options.out} is not written", file=sys.stderr)
    print("\n".join(result["problems"]) or f"{result['steps']} steps, {len(soak.faults)} faults, all as it should be")
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
