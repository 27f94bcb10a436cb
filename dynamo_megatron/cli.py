"""The command line: train, sft, configs, preflight, plan, serve, eval, convert, launch, report, samples, replay."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dynamo_megatron import shipped
from dynamo_megatron.command_parser import Parser, Version, unknown_command, unknown_options
from dynamo_megatron.config_files import ConfigError, compose, describe
from dynamo_megatron.launcher.local import stopped_early
from dynamo_megatron.launcher.options import JobOptions, add_nemo_arguments, add_slurm_arguments
from dynamo_megatron.tracking.progress import Progress

EXIT_CODES = "exit codes: 0 done, 1 failed, 2 bad config or input, 75 stopped cleanly and resumable, 130 Ctrl-C"
CONFIG_HELP = "YAML files, names of shipped ones (`dynamo-megatron configs`) and keys, the later wins"
DTYPES = ("bfloat16", "float16", "float32")
EXAMPLES = {
    "train": "dynamo-megatron train my.yaml methods/dynamo trainer.steps=20 output_dir=runs/first",
    "sft": "dynamo-megatron sft my.yaml data.source=solutions.jsonl data.answer_key=solution output_dir=runs/warm",
    "configs": "dynamo-megatron configs methods/dynamo > my-dynamo.yaml",
    "preflight": "dynamo-megatron preflight my.yaml methods/dynamo --ranks 8",
    "eval": "dynamo-megatron eval --model runs/first --out scores eval.data=test.jsonl eval.samples=8 eval.k=[1,8]",
    "serve": "dynamo-megatron serve my.yaml rollout.placement=split rollout.host=ib0 --nodes 2 --node 0",
    "convert hf2mcore": "dynamo-megatron convert hf2mcore models/Qwen2.5-7B models/Qwen2.5-7B-mcore",
    "convert mcore2hf": "dynamo-megatron convert mcore2hf runs/first models/first --step 200",
    "launch local": "dynamo-megatron launch local my.yaml output_dir=runs/first --ranks 2",
    "launch slurm": "dynamo-megatron launch slurm my.yaml output_dir=runs/first rollout.host=ib0 --nodes 4 "
    "--gpus-per-node 8 --time 24:00:00",
    "launch ray": "dynamo-megatron launch ray my.yaml output_dir=runs/first rollout.host=ib0 --ranks 16 --address auto",
    "launch nemo": "dynamo-megatron launch nemo my.yaml output_dir=runs/first rollout.host=ib0 --executor slurm "
    "--nodes 4 --gpus-per-node 8 --tasks convert,train,eval",
    "plan": "dynamo-megatron plan models/qwen2.5-14b paper --gpus 16 --gpu h100-80 --search",
    "report": "dynamo-megatron report runs/first runs/second --out comparison",
    "samples": "dynamo-megatron samples runs/first --step 20 --best 2 --worst 2 | less",
    "replay": "dynamo-megatron replay runs/first --allocator uniform --allocator neyman,variance=surprise,half_life=4",
}


def parser() -> argparse.ArgumentParser:
    top = Parser(prog="dynamo-megatron", description="RLVR on Megatron-core with DynaMO.")
    top.add_argument("--version", action=Version)
    commands = top.add_subparsers(dest="command", required=True)

    def command(name: str, help: str, among: Any = commands) -> argparse.ArgumentParser:
        made = among.add_parser(
            name.split()[-1],
            help=help,
            description=help,
            epilog=f"example:\n  {EXAMPLES[name]}\n\n{EXIT_CODES}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        made.set_defaults(subparser=made)
        return made

    for name, help in (
        ("train", "train a policy by reinforcement learning; the same command resumes a run that was stopped"),
        ("sft", "fine-tune on completions (data.answer_key), as a warm-up; the same command resumes"),
    ):
        sub = command(name, help)
        sub.add_argument("config", nargs="+", metavar="CONFIG | key=value", help=CONFIG_HELP)
        sub.add_argument("--print-config", action="store_true", help="show every value and who set it, then stop")
        sub.add_argument(
            "--ranks", type=_positive, help="local processes (default: the GPUs of this machine, without GPUs tp x pp)"
        )
    sub = command("configs", "list the configurations that are shipped: methods, models on hardware, the paper's sizes")
    sub.add_argument("name", nargs="?", help="print this one, as a start of your own")
    sub = command("preflight", "check a configuration, this node and the server before a job waits for them")
    sub.add_argument("config", nargs="*", metavar="CONFIG | key=value", help=CONFIG_HELP)
    sub.add_argument("--ranks", type=_positive, help="of the run (default: as `train` would start here)")
    sub.add_argument("--no-server", action="store_true", help="do not start a small server, which takes longest")
    sub.add_argument(
        "--install",
        action="store_true",
        help="needs no config (rollout.python=... names the server's interpreter): what is missing, what it would give",
    )
    sub = command("serve", "run one node's share of a run's rollout servers (rollout.placement: split)")
    sub.add_argument("config", nargs="+", metavar="CONFIG | key=value", help="the configs and keys that `train` gets")
    sub.add_argument("--nodes", type=_positive, required=True, help="nodes with servers; each runs an equal share")
    sub.add_argument("--node", type=int, required=True, help="which of them this one is, from 0")
    sub = command("eval", "sample answers to held-out problems (eval.*) and score them: pass@k with intervals")
    sub.add_argument("config", nargs="*", metavar="CONFIG | key=value", help=CONFIG_HELP)
    sub.add_argument(
        "--model",
        help="a Hugging Face folder, a run or one of its checkpoints (both bring their config along), or the URL of an "
        "SGLang server (default: model.path)",
    )
    sub.add_argument("--out", type=Path, required=True, help="folder for the responses, the table and the logs")
    convert = commands.add_parser("convert", help="a Hugging Face folder to a Megatron checkpoint, or back")
    directions = convert.add_subparsers(dest="direction", required=True)
    sub = command("convert hf2mcore", "write a Hugging Face folder as a Megatron checkpoint for any layout", directions)
    sub.add_argument("source", metavar="HF", type=Path, help="a Hugging Face folder")
    sub.add_argument("out", metavar="OUT", type=Path, help="folder to write")
    sub.add_argument("--dtype", choices=DTYPES, help="default: each tensor's own")
    sub = command("convert mcore2hf", "write a Megatron checkpoint as a Hugging Face folder", directions)
    sub.add_argument(
        "source",
        metavar="CHECKPOINT",
        help="a folder that hf2mcore wrote, a run (its newest checkpoint), one of its checkpoints/step-N, or with "
        "--model any folder in Megatron's torch_dist format",
    )
    sub.add_argument("out", metavar="OUT", type=Path, help="folder to write")
    sub.add_argument("--dtype", choices=DTYPES, help="default: each tensor's own")
    sub.add_argument("--step", type=_positive, help="which checkpoint of a run (default: the newest)")
    sub.add_argument(
        "--model",
        metavar="HF",
        type=Path,
        help="folder of config.json and tokenizer (default: CHECKPOINT's own, or its run's model.path)",
    )
    launch = commands.add_parser("launch", help="start a training here, on a SLURM cluster or through nemo-run")
    launchers = launch.add_subparsers(dest="launcher", required=True)
    for name, help in (
        ("launch local", "train with ranks on this machine, as `train` does"),
        ("launch slurm", "write the sbatch script of a training and submit it; docs/launching.md"),
        ("launch ray", "train with a Ray actor a rank, here or on a Ray cluster; docs/ray.md"),
        ("launch nemo", "convert, train and evaluate with nemo-run, here or on a SLURM cluster; docs/launching.md"),
    ):
        sub = command(name, help, launchers)
        sub.add_argument("config", nargs="+", metavar="CONFIG | key=value", help=CONFIG_HELP)
        if name == "launch local":
            sub.add_argument("--ranks", type=_positive, help="local processes (default: as train)")
            continue
        if name == "launch ray":
            sub.add_argument("--ranks", type=_positive, help="a GPU each (default: the cluster's GPUs, else as train)")
            sub.add_argument("--address", help="a Ray cluster's: auto or HOST:PORT (default: Ray on this machine)")
            sub.add_argument(
                "--wait", type=_positive, default=300, metavar="SECONDS", help="for free resources (default 300)"
            )
            continue
        JobOptions.add_arguments(sub)
        (add_slurm_arguments if name == "launch slurm" else add_nemo_arguments)(sub)
    sub = command("plan", "before anything runs: memory of every rank, servers, host and disk, floor times, a verdict")
    sub.add_argument("config", nargs="+", metavar="CONFIG | key=value", help=CONFIG_HELP)
    sub.add_argument("--gpus", type=_positive, required=True, help="that train; those of split servers come on top")
    sub.add_argument("--gpu", required=True, help="kind: a100-80, h100-80, h200-141, b200-180")
    sub.add_argument("--gpus-per-node", type=_positive, default=8, help="default: 8")
    sub.add_argument(
        "--response-tokens", type=_positive, help="the mean response's, for times (default: half of max_new_tokens)"
    )
    sub.add_argument("--search", action="store_true", help="rank layouts instead of judging the config's")
    sub = command("report", "what a run has done so far, or several runs side by side: tables and a picture")
    sub.add_argument("run", type=Path, nargs="+", help="a run's output_dir; differences are to the first one")
    sub.add_argument("--out", type=Path, help="folder to write to (default: the first RUN)")
    sub = command("samples", "rollouts of a run to read: prompt, response, answer, reward and its parts")
    sub.add_argument("run", type=Path, help="a run's output_dir, running or not")
    sub.add_argument("--step", type=_positive, help="of training (default: the newest; with --prompt all)")
    sub.add_argument("--prompt", metavar="ID", help="those of this problem alone, by its prompt_id")
    sub.add_argument("--best", type=_positive, metavar="N", help="the N of the highest reward, the highest first")
    sub.add_argument("--worst", type=_positive, metavar="N", help="the N of the lowest reward, the lowest first")
    sub.add_argument(
        "--limit", type=_positive, default=8, metavar="N", help="without --best and --worst: the first N (default 8)"
    )
    sub.add_argument("--json", action="store_true", help="an object a line")
    sub = command("replay", "what each allocator would have given each prompt of a run: a table, JSON and a picture")
    sub.add_argument(
        "run",
        type=Path,
        help="a run's output_dir, or a folder of rollouts of verl (trainer.rollout_data_dir) or slime "
        "(--save-debug-rollout-data)",
    )
    sub.add_argument(
        "--allocator",
        action="append",
        metavar="KIND[,key=value...]",
        help="a kind with keys of algorithm.allocation, the others as the run has them; may be given several times "
        "(default: uniform, waterfill and neyman)",
    )
    sub.add_argument("--out", type=Path, help="folder to write to (default: RUN)")
    sub.add_argument(
        "--success-threshold", type=float, help="verl, slime: a rollout succeeds from this reward on (default: 1.0)"
    )
    sub.add_argument("--reward-key", help="verl, slime: the field with the reward, where it is not score or reward")
    return top


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if (why := unknown_command(arguments, EXAMPLES)) is not None:
        print(why, file=sys.stderr)
        return 2
    options, rest = parser().parse_known_args(arguments)  # configs and keys may stand on both sides of an option
    if unknown := [word for word in rest if word.startswith("-") or not hasattr(options, "config")]:
        print(unknown_options(unknown, options.subparser), file=sys.stderr)
        return 2
    try:
        return _COMMANDS[options.command](options, rest, arguments)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2


# What these import takes seconds (torch), which a typo in the config should not have to wait for.


def _loading_packages() -> contextlib.closing[Progress]:
    progress = Progress()
    if os.environ.get("RANK", "0") == "0":
        progress.phase("loading packages")
    return contextlib.closing(progress)


def _train(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from dynamo_megatron.launcher.slurm import adopt_rank

    adopt_rank(os.environ)
    # There is nothing to save yet. A rank leaves SIGTERM as it is: launchers also send it because another rank has
    # failed, and it has to end even a rank whose interpreter is busy in C code.
    for number in (signal.SIGUSR1,) if "RANK" in os.environ else (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, _end_start)
    config, origins = compose(*_files_and_keys(options.config + rest))
    with _loading_packages():
        if options.command == "train":
            from dynamo_megatron.train import TrainJob as Job
        else:
            from dynamo_megatron.sft import SFTJob as Job
        from dynamo_megatron.layout_checks import default_ranks
        from dynamo_megatron.run import run_rank

    job = Job(config)
    if "RANK" in os.environ and not options.print_config:
        return run_rank(job)
    ranks = options.ranks or default_ranks(config)
    derived = job.check(ranks)
    if options.print_config:
        print(describe(config, origins, derived))
        return 0
    if (why := job.nothing_left()) is not None:
        print(why)
        return 0
    for name, value in derived.items():
        print(f"{name}: {value}", flush=True)
    # In place of this process, which has imported torch for the checks: 0.2 GB for as long as the run takes.
    os.execv(sys.executable, [sys.executable, "-P", "-m", "dynamo_megatron.launcher.local", str(ranks), *arguments])


def _end_start(number: int, _frame: Any) -> None:
    if os.environ.get("RANK", "0") == "0":
        os.write(2, f"{stopped_early(number)}\n".encode())
    os._exit(75)


def _configs(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    if options.name is None:
        print(shipped.listing())
        return 0
    if (path := shipped.path(options.name)) is None:
        raise ConfigError(f"{options.name}: no such shipped config; `dynamo-megatron configs` lists them")
    print(path.read_text(encoding="utf-8"), end="")
    return 0


def _preflight(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from dynamo_megatron.launcher.slurm import adopt_rank

    adopt_rank(os.environ)
    words = options.config + rest
    if options.install:
        from dynamo_megatron.preflight.install import report

        unset = {"model": {"path": "unset"}, "data": {"source": "unset"}, "output_dir": "unset"}
        return report(compose(*_files_and_keys(words), defaults=unset)[0].rollout.python)
    if not words:
        raise ConfigError("preflight: name a config, or --install")
    config, _ = compose(*_files_and_keys(words))
    from dynamo_megatron.layout_checks import default_ranks
    from dynamo_megatron.preflight.command import preflight

    return preflight(config, options.ranks or default_ranks(config), with_server=not options.no_server)


def _launch(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    words = options.config + rest
    if options.launcher == "local":
        return main(["train", *words, *(["--ranks", str(options.ranks)] if options.ranks else [])])
    if options.launcher == "slurm":
        from dynamo_megatron.launcher.slurm import launch
    elif options.launcher == "ray":
        try:
            from dynamo_megatron.launcher.ray import launch
        except ModuleNotFoundError as error:
            raise ConfigError(f"ray: this interpreter has no {error.name}; pip install 'ray>=2.60'") from None
    else:
        try:
            from dynamo_megatron.launcher.nemo import launch
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"nemo-run: this interpreter has no {error.name}; `make nemo` sets up .venv-nemo, whose "
                "dynamo-megatron has it"
            ) from None
    return launch(options, *_files_and_keys(words))


def _serve(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    config, _ = compose(*_files_and_keys(options.config + rest))
    if not 0 <= options.node < options.nodes:
        raise ConfigError(f"--node: {options.node} is not one of 0 to {options.nodes - 1}")
    from dynamo_megatron.rollout.serve import serve

    try:
        return serve(config, options.nodes, options.node)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _eval(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    with _loading_packages():
        from dynamo_megatron.evaluation.command import evaluate

    return evaluate(*_files_and_keys(options.config + rest), options.model, options.out)


def _convert(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from dynamo_megatron.convert import hf2mcore, mcore2hf

    try:
        if options.direction == "hf2mcore":
            hf2mcore(options.source, options.out, options.dtype)
        else:
            mcore2hf(options.source, options.out, options.dtype, options.step, options.model)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        print(f"{options.out}: not written: {error}", file=sys.stderr)
        return 1
    print(f"{options.out}: written from {options.source}")
    return 0


def _plan(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from dynamo_megatron.planning.command import plan

    return plan(
        *_files_and_keys(options.config + rest),
        gpu=options.gpu,
        gpus=options.gpus,
        gpus_per_node=options.gpus_per_node,
        response_tokens=options.response_tokens,
        search=options.search,
    )


def _report(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from dynamo_megatron.tracking.comparison import write_comparison
    from dynamo_megatron.tracking.progress import terminal_width, wrapped
    from dynamo_megatron.tracking.report import write_report

    out = options.out or options.run[0]
    try:
        text = write_report(options.run[0], out) if len(options.run) == 1 else write_comparison(options.run, out)
        print(wrapped(text, terminal_width(sys.stdout)))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return 0


def _samples(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from dynamo_megatron.tracking.samples import Choice, read_samples

    choice = Choice(options.step, options.prompt, options.best, options.worst, options.limit)
    sys.stdout.reconfigure(errors="backslashreplace")
    try:
        for text in read_samples(options.run, choice, as_json=options.json):
            print(text)
        sys.stdout.flush()
    except ValueError as error:
        raise ConfigError(str(error)) from None
    except BrokenPipeError:  # the pager was left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _replay(options: argparse.Namespace, rest: list[str], arguments: list[str]) -> int:
    from dynamo_megatron.replay.command import write_replay
    from dynamo_megatron.tracking.progress import terminal_width, wrapped

    try:
        text = write_replay(options.run, options.allocator, options.success_threshold, options.reward_key, options.out)
        print(wrapped(text, terminal_width(sys.stdout)))
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return 0


_COMMANDS = {
    "train": _train,
    "sft": _train,
    "configs": _configs,
    "preflight": _preflight,
    "serve": _serve,
    "eval": _eval,
    "convert": _convert,
    "launch": _launch,
    "plan": _plan,
    "report": _report,
    "samples": _samples,
    "replay": _replay,
}


def _files_and_keys(words: Sequence[str]) -> tuple[list[str], list[str]]:
    keys = [word for word in words if "=" in word and not os.path.exists(word)]
    return [word for word in words if word not in keys], keys


if __name__ == "__main__":
    sys.exit(main())
