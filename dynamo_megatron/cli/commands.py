"""The functions that carry out the commands of `cli/options.py`."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import os
import re
import signal
import sys
from pathlib import Path
from typing import NoReturn

from dynamo_megatron.cli.options import parser
from dynamo_megatron.config import shipped
from dynamo_megatron.config.files import ConfigError, compose, describe
from dynamo_megatron.config.peer_keys import ours
from dynamo_megatron.errors import InputError
from dynamo_megatron.launcher.slurm import adopt_rank
from dynamo_megatron.runtime.plain_text import printable, show, show_exception
from dynamo_megatron.runtime.process_signals import FOR_THE_RANKS
from dynamo_megatron.tracking.progress import Progress


def carry_out(arguments: list[str]) -> int:
    """Carries out the command that `arguments` name; returns its exit code."""
    sys.excepthook = show_exception
    options, rest = parser().parse_known_args(arguments)  # configs and keys may stand on both sides of an option
    if unknown := [word for word in rest if word.startswith("-") or not hasattr(options, "config")]:
        print("\n".join(_unknown(word, options.subparser) for word in unknown), file=sys.stderr)
        return 2
    options.arguments, words = arguments, [*getattr(options, "config", []), *rest]
    options.keys = [word for word in words if "=" in word and not os.path.exists(word)]
    options.files = [word for word in words if word not in options.keys]
    try:
        return _COMMANDS[options.command](options)
    except InputError as error:
        show(str(error))
        return 2


def _unknown(word: str, parser: argparse.ArgumentParser) -> str:
    option = word.partition("=")[0]
    if (hint := ours(option) if option.startswith("--") else None) is None:
        near = difflib.get_close_matches(option, re.findall(r"(?m)^  (--[a-z][a-z0-9-]*)", parser.format_help()), 1)
        hint = f"did you mean {near[0]}?" if near else f"see {parser.prog} --help"
    if "." in option:
        hint = f"a key of the config has no dashes: {option.lstrip('-')}=VALUE"
    return f"unknown {'option' if option.startswith('-') else 'argument'} {option}; {hint}"


# The functions below import torch and other packages late. That takes seconds, and a typo in the config is reported
# before it.


def _loading_packages() -> contextlib.closing[Progress]:
    progress = Progress()
    if os.environ.get("RANK", "0") == "0":
        progress.phase("loading packages")
    return contextlib.closing(progress)


def _take_place(ranks: int | None) -> None:
    """`adopt_rank`. Raises ConfigError where a launcher has started another number than the `ranks` asked for."""
    adopt_rank(os.environ)
    if ranks and "RANK" in os.environ and os.environ["WORLD_SIZE"] != str(ranks):
        raise ConfigError(f"--ranks: {ranks}, but this is one of {os.environ['WORLD_SIZE']} ranks (WORLD_SIZE)")


def _train(options: argparse.Namespace) -> int:
    _take_place(options.ranks)
    pairs = {"data": {"answer_key": "chosen"}, "dpo": {}} if options.command == "dpo" else None
    config, origins = compose(options.files, options.keys, pairs)
    if pairs is None and config.dpo is not None:
        raise ConfigError(f"dpo: is for the command dpo; take it out of what {options.command} reads")
    if pairs is not None and config.dpo is None:
        raise ConfigError("dpo: the section is empty; set a key of it, or leave it out")
    if "RANK" in os.environ:
        os.environ |= {**config.rank_variables(), **os.environ}  # before anything uses CUDA
    with _loading_packages():
        if options.command == "train":
            from dynamo_megatron.jobs.train import TrainJob as Job
        elif options.command == "dpo":
            from dynamo_megatron.jobs.dpo import DPOJob as Job
        else:
            from dynamo_megatron.jobs.sft import SFTJob as Job
        from dynamo_megatron.jobs.run import run_rank
        from dynamo_megatron.jobs.start_checks import default_ranks, on_this_machine

    if "RANK" in os.environ and not options.print_config:
        return run_rank(Job(on_this_machine(config, int(os.environ["WORLD_SIZE"]))))
    ranks = options.ranks or default_ranks(config)
    config = on_this_machine(config, ranks)
    job = Job(config)
    derived = job.check(ranks)
    if options.print_config:
        print(describe(config, origins, derived))
        return 0
    if (why := job.output.finished()) is not None:
        print(why)
        return 0
    for name, value in derived.items():
        print(f"{name}: {value}", flush=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, FOR_THE_RANKS)  # until the launcher handles them
    _become_launcher(ranks, config.output_dir, options)


def _become_launcher(ranks: int, output_dir: str, options: argparse.Namespace) -> NoReturn:
    """Replaces this process, which has imported torch for its checks, and would hold 0.2 GB for as long as the ranks
    run."""
    words = [sys.executable, "-P", "-m", "dynamo_megatron.launcher.local", str(ranks), output_dir, *options.arguments]
    os.execv(sys.executable, words)


def _configs(options: argparse.Namespace) -> int:
    if options.name is None:
        print(shipped.listing())
        return 0
    if (path := shipped.path(options.name)) is None:
        raise ConfigError(f"{options.name}: no such shipped config; `dynamo-megatron configs` lists them")
    print(path.read_text(encoding="utf-8"), end="")
    return 0


def _preflight(options: argparse.Namespace) -> int:
    _take_place(options.ranks)
    config, _ = compose(options.files, options.keys)
    from dynamo_megatron.runtime.late import uncollected

    with uncollected():  # each check imports what it needs
        from dynamo_megatron.jobs.start_checks import default_ranks, on_this_machine
        from dynamo_megatron.preflight.checks import preflight

        ranks = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else options.ranks or default_ranks(config)
        return preflight(on_this_machine(config, ranks), ranks, with_server=not options.no_server)


def _launch(options: argparse.Namespace) -> int:
    if options.launcher == "local":
        ranks = ["--ranks", str(options.ranks)] if options.ranks else []
        return carry_out(["train", *options.files, *options.keys, *ranks])
    try:
        launch = importlib.import_module(f"dynamo_megatron.launcher.{options.launcher}").launch
    except ModuleNotFoundError as error:
        where = {"ray": "pip install 'dynamo-megatron[ray]'", "nemo": "`make extra` sets up .venv-extra, which has it"}
        raise ConfigError(
            f"launch {options.launcher}: this interpreter has no {error.name}; {where.get(options.launcher)}"
        ) from None
    return launch(options, options.files, options.keys)


def _serve(options: argparse.Namespace) -> int:
    # SIGUSR1 tells the ranks to save, for which they need the servers, and SLURM may send it to every process of a job.
    # Processes that are started here and the threads of libraries ignore it, too.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    config, _ = compose(options.files, options.keys)
    if not 0 <= options.node < options.nodes:
        raise ConfigError(f"--node: {options.node} is not one of 0 to {options.nodes - 1}")
    from dynamo_megatron.rollout.servers.serve import serve

    return serve(config, options.nodes, options.node)


def _eval(options: argparse.Namespace) -> int:
    with _loading_packages():
        from dynamo_megatron.jobs.eval import evaluate

    return evaluate(options.files, options.keys, options.model, options.suite, options.out)


def _convert(options: argparse.Namespace) -> int:
    from dynamo_megatron.checkpoint.convert import hf2mcore, mcore2hf, mcore2peft

    try:
        if options.direction == "hf2mcore":
            hf2mcore(options.source, options.out)
        elif options.direction == "mcore2peft":
            mcore2peft(options.source, options.out, options.model)
        else:
            mcore2hf(options.source, options.out, options.model)
    except OSError as error:
        print(f"{options.out}: not written: {error}", file=sys.stderr)
        return 1
    print(f"{options.out}: written from {options.source}")
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from dynamo_megatron.checkpoint.inspection import inspect_command

    if (options.path is None) == (options.diff is None):
        options.subparser.error("give one PATH, or --diff A B")
    try:
        return inspect_command(options.path, options.diff)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ConfigError(str(error)) from None


def _plan(options: argparse.Namespace) -> int:
    from dynamo_megatron.planning.command import plan

    return plan(options)


def _report(options: argparse.Namespace) -> int:
    from dynamo_megatron.reports.page import write_report

    out = options.out or options.run[0]
    text = write_report(options.run, out, options.rollout)
    page = f"The page with all charts and rollouts is {out / 'report.html'}; report.md and report.png are beside it."
    print(printable(f"{text}\n\n{page}"))
    return 0


def _samples(options: argparse.Namespace) -> int:
    from dynamo_megatron.reports.samples import read_pairs, read_samples

    choice = options.step, options.prompt, options.best, options.worst, options.limit
    if options.pairs and any(choice):
        raise ConfigError("samples: --pairs writes the pairs of all steps; leave the other choices out")
    sys.stdout.reconfigure(errors="backslashreplace")
    texts = read_pairs(options.run) if options.pairs else read_samples(options.run, *choice, as_json=options.json)
    for text in texts:
        print(text)
    return 0


def _replay(options: argparse.Namespace) -> int:
    if options.step is not None:
        return _replay_step(options)
    if options.ranks is not None or not options.run:
        raise ConfigError("replay: name a RUN, or with --step RUN N one of its steps")
    run, *more = options.run
    if more:
        raise ConfigError(_unknown(more[0], options.subparser))
    from dynamo_megatron.replay.what_if import write_replay

    text = write_replay(Path(run), options.allocator, options.out)
    print(printable(text))
    return 0


def _replay_step(options: argparse.Namespace) -> int:
    adopt_rank(os.environ)
    run, number = options.step
    if not number.isdecimal():
        raise ConfigError(f"--step: {number!r} is not the number of a step; replay --step RUN N")
    if wrong := [word for word in options.run if "=" not in word]:
        raise ConfigError(f"replay: with --step {wrong[0]!r} is no key=value")
    with _loading_packages():
        from dynamo_megatron.jobs.run import run_rank
        from dynamo_megatron.replay.step import StepReplay, failed_step

    config, had = failed_step(Path(run), int(number), options.run)
    if "RANK" in os.environ:
        os.environ |= {**config.rank_variables(), **os.environ}
        return run_rank(StepReplay(config))
    ranks = options.ranks or had
    StepReplay(config).check(ranks)
    _become_launcher(ranks, config.output_dir, options)


def _verify(options: argparse.Namespace) -> int:
    from dynamo_megatron.verification.checks import verify_step  # imports torch

    text, code = verify_step(options.run, options.step)
    print(printable(text))
    return code


def _compare(options: argparse.Namespace) -> int:
    from dynamo_megatron.comparison.runs import compare

    return compare(options)


_COMMANDS = {
    **dict.fromkeys(("train", "sft", "dpo"), _train),
    "configs": _configs,
    "preflight": _preflight,
    "serve": _serve,
    "eval": _eval,
    "convert": _convert,
    "inspect": _inspect,
    "launch": _launch,
    "plan": _plan,
    "report": _report,
    "samples": _samples,
    "replay": _replay,
    "verify": _verify,
    "compare": _compare,
}
