"""The command line: `dynamo-megatron train CONFIG [CONFIG ...] [key=value ...]`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from dynamo_megatron.config_files import ConfigError, compose, describe

EXAMPLE = """example:
  dynamo-megatron train configs/demo.yaml configs/methods/dynamo.yaml trainer.steps=20 output_dir=runs/first

exit codes: 0 done, 1 failed, 2 bad config or input, 75 stopped cleanly and resumable, 130 Ctrl-C"""


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="dynamo-megatron", description="RLVR on Megatron-core with DynaMO.")
    commands = top.add_subparsers(dest="command", required=True)
    train = commands.add_parser(
        "train",
        help="train a policy by reinforcement learning; the same command resumes a run that was stopped",
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    train.add_argument("config", nargs="+", metavar="CONFIG | key=value", help="YAML files and keys, the later wins")
    train.add_argument("--print-config", action="store_true", help="show every value and who set it, then stop")
    train.add_argument(
        "--ranks", type=_positive, help="local processes (default: the GPUs of this machine, without GPUs tp x pp)"
    )
    return top


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    top = parser()
    options, rest = top.parse_known_args(arguments)  # configs and keys may stand on both sides of an option
    if unknown := [word for word in rest if word.startswith("-")]:
        top.error(f"unknown option {unknown[0]}")
    options.config += rest
    is_file = [not ("=" in c and not os.path.exists(c)) for c in options.config]
    try:
        config, origins = compose(
            [c for c, file in zip(options.config, is_file, strict=True) if file],
            [c for c, file in zip(options.config, is_file, strict=True) if not file],
        )
        # Imports torch, which a typo in the config should not have to wait for.
        from dynamo_megatron import run

        if "RANK" in os.environ and not options.print_config:
            return run.run_rank(config)
        ranks = options.ranks or run.default_ranks(config)
        derived = run.check(config, ranks)
        if options.print_config:
            print(describe(config, origins, derived))
            return 0
        if (step := run.OutputDir(config).finished()) is not None:
            print(f"{config.output_dir}: already at step {step} of {config.trainer.steps}")
            return 0
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    from dynamo_megatron.launcher.local import run_ranks

    for name, value in derived.items():
        print(f"{name}: {value}", flush=True)
    return run_ranks(arguments, ranks)


if __name__ == "__main__":
    sys.exit(main())
