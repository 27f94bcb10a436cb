"""The commands of the command line with their options and help texts."""

from __future__ import annotations

import argparse
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from dynamo_megatron.launcher.options import JobOptions, add_nemo_arguments, add_slurm_arguments, positive

EXIT_CODES = "exit codes: 0 done, 1 failed, 2 bad config or input, 75 stopped cleanly and resumable, 130 Ctrl-C"
CONFIG_HELP = "YAML files, names of shipped ones (`dynamo-megatron configs`) and keys, the later wins"
REPORTED = ("dynamo-megatron", "torch", "megatron-core", "sglang")
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
    "inspect": "dynamo-megatron inspect --diff runs/first/checkpoints/step-000010 runs/first/checkpoints/step-000020",
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
    "compare": "dynamo-megatron compare compare/demo",
}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def parser() -> argparse.ArgumentParser:
    top = Parser(
        prog="dynamo-megatron",
        description="RLVR on Megatron-core with DynaMO.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=_versions())
    commands = top.add_subparsers(dest="command", required=True)
    for add in (
        _add_training,
        _add_configs,
        _add_preflight,
        _add_serve,
        _add_eval,
        _add_convert,
        _add_inspect,
        _add_launch,
        _add_plan,
        _add_report,
        _add_samples,
        _add_replay,
        _add_compare,
    ):  # in the order of `--help`
        add(commands)
    return top


def _versions() -> str:
    """Of this package and of those that results depend on, without importing them."""
    installed = {d.name: d.version for name in REPORTED for d in metadata.Distribution.discover(name=name)}
    others = (f"{name} {installed.get(name, 'not installed')}" for name in REPORTED[1:])
    return f"{REPORTED[0]} {installed.get(REPORTED[0])} (Python {platform.python_version()}, {', '.join(others)})"


def _command(among: Any, name: str, help: str) -> argparse.ArgumentParser:
    made = among.add_parser(
        name.split()[-1],
        help=help,
        description=help,
        epilog=f"example:\n  {EXAMPLES[name]}\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.set_defaults(subparser=made)
    return made


def _add_training(commands: Any) -> None:
    for name, help in (
        ("train", "train a policy by reinforcement learning; the same command resumes a run that was stopped"),
        ("sft", "fine-tune on completions (data.answer_key), as a warm-up; the same command resumes"),
    ):
        sub = _command(commands, name, help)
        sub.add_argument("config", nargs="+", metavar="CONFIG | key=value", help=CONFIG_HELP)
        sub.add_argument("--print-config", action="store_true", help="show every value and who set it, then stop")
        sub.add_argument(
            "--ranks", type=positive, help="local processes (default: the GPUs of this machine, without GPUs tp x pp)"
        )


def _add_configs(commands: Any) -> None:
    sub = _command(
        commands, "configs", "list the configurations that are shipped: methods, models on hardware, the paper's sizes"
    )
    sub.add_argument("name", nargs="?", help="print this one, as a start of your own")


def _add_preflight(commands: Any) -> None:
    sub = _command(commands, "preflight", "check a configuration, this node and the server before a job waits for them")
    sub.add_argument("config", nargs="+", metavar="CONFIG | key=value", help=CONFIG_HELP)
    sub.add_argument("--ranks", type=positive, help="of the run (default: as `train` would start here)")
    sub.add_argument("--no-server", action="store_true", help="do not start a small server, which takes longest")


def _add_serve(commands: Any) -> None:
    sub = _command(commands, "serve", "run one node's share of a run's rollout servers (rollout.placement: split)")
    sub.add_argument("config", nargs="+", metavar="CONFIG | key=value", help="the configs and keys that `train` gets")
    sub.add_argument("--nodes", type=positive, required=True, help="nodes with servers; each runs an equal share")
    sub.add_argument("--node", type=int, required=True, help="which of them this one is, from 0")


def _add_eval(commands: Any) -> None:
    sub = _command(
        commands, "eval", "sample answers to held-out problems (eval.*) and score them: pass@k with intervals"
    )
    sub.add_argument("config", nargs="*", metavar="CONFIG | key=value", help=CONFIG_HELP)
    sub.add_argument(
        "--model",
        action="append",
        default=[],
        help="a Hugging Face folder, a run or one of its checkpoints (both bring their config along), or the URL of an "
        "SGLang server (default: model.path); several times: side by side, with differences to the first",
    )
    sub.add_argument(
        "--suite",
        metavar="table | NAME,NAME,...",
        help="several sets, each the file NAME.jsonl in the folder eval.data; table: aime24, aime25, amc23, math500, "
        "minerva, olympiad",
    )
    sub.add_argument("--out", type=Path, required=True, help="folder for the responses, the table and the logs")


def _add_convert(commands: Any) -> None:
    convert = commands.add_parser("convert", help="a Hugging Face folder to a Megatron checkpoint, or back")
    directions = convert.add_subparsers(dest="direction", required=True)
    sub = _command(
        directions, "convert hf2mcore", "write a Hugging Face folder as a Megatron checkpoint for any layout"
    )
    sub.add_argument("source", metavar="HF", type=Path, help="a Hugging Face folder")
    sub.add_argument("out", metavar="OUT", type=Path, help="folder to write")
    sub.add_argument("--dtype", choices=DTYPES, help="default: each tensor's own")
    sub = _command(directions, "convert mcore2hf", "write a Megatron checkpoint as a Hugging Face folder")
    sub.add_argument(
        "source",
        metavar="CHECKPOINT",
        help="a folder that hf2mcore wrote, a run (its newest checkpoint), one of its checkpoints/step-N, or with "
        "--model any folder in Megatron's torch_dist format",
    )
    sub.add_argument("out", metavar="OUT", type=Path, help="folder to write")
    sub.add_argument("--dtype", choices=DTYPES, help="default: each tensor's own")
    sub.add_argument("--step", type=positive, help="which checkpoint of a run (default: the newest)")
    sub.add_argument(
        "--model",
        metavar="HF",
        type=Path,
        help="folder of config.json and tokenizer (default: CHECKPOINT's own, or its run's model.path)",
    )


def _add_inspect(commands: Any) -> None:
    sub = _command(
        commands, "inspect", "what is in a checkpoint or a model's folder, also one of others, or how two differ"
    )
    what = sub.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "path",
        nargs="?",
        type=Path,
        help="a run (its newest complete checkpoint), one checkpoint, a folder in Megatron's torch_dist format, or a "
        "Hugging Face folder",
    )
    what.add_argument("--diff", nargs=2, type=Path, metavar=("A", "B"), help="compares the tensors, one at a time")


def _add_launch(commands: Any) -> None:
    launch = commands.add_parser("launch", help="start a training here, on a SLURM cluster or through nemo-run")
    launchers = launch.add_subparsers(dest="launcher", required=True)
    for name, help in (
        ("launch local", "train with ranks on this machine, as `train` does"),
        ("launch slurm", "write the sbatch script of a training and submit it; docs/clusters.md"),
        ("launch ray", "train with a Ray actor a rank, here or on a Ray cluster; docs/clusters.md"),
        ("launch nemo", "convert, train and evaluate with nemo-run, here or on a SLURM cluster; docs/clusters.md"),
    ):
        sub = _command(launchers, name, help)
        sub.add_argument("config", nargs="+", metavar="CONFIG | key=value", help=CONFIG_HELP)
        if name == "launch local":
            sub.add_argument("--ranks", type=positive, help="local processes (default: as train)")
            continue
        if name == "launch ray":
            sub.add_argument("--ranks", type=positive, required=True, help="a GPU each, where the cluster has any")
            sub.add_argument("--address", help="a Ray cluster's: auto or HOST:PORT (default: Ray on this machine)")
            sub.add_argument(
                "--wait", type=positive, default=300, metavar="SECONDS", help="for free resources (default 300)"
            )
            continue
        JobOptions.add_arguments(sub)
        (add_slurm_arguments if name == "launch slurm" else add_nemo_arguments)(sub)


def _add_plan(commands: Any) -> None:
    sub = _command(
        commands, "plan", "before anything runs: memory of every rank, servers, host and disk, floor times, a verdict"
    )
    sub.add_argument("config", nargs="+", metavar="CONFIG | key=value", help=CONFIG_HELP)
    sub.add_argument("--gpus", type=positive, required=True, help="that train; those of split servers come on top")
    sub.add_argument("--gpu", required=True, help="kind: a100-80, h100-80, h200-141, b200-180")
    sub.add_argument("--gpus-per-node", type=positive, default=8, help="default: 8")
    sub.add_argument(
        "--response-tokens", type=positive, help="the mean response's, for times (default: half of max_new_tokens)"
    )
    sub.add_argument("--search", action="store_true", help="rank layouts instead of judging the config's")


def _add_report(commands: Any) -> None:
    sub = _command(commands, "report", "what a run has done so far, or several runs side by side: a page, tables")
    sub.add_argument("run", type=Path, nargs="+", help="a run's output_dir; differences are to the first one")
    sub.add_argument("--out", type=Path, help="folder to write to (default: the first RUN)")
    sub.add_argument(
        "--rollout", action="append", default=[], metavar="ID", help="of the first RUN, to have in the page; repeatable"
    )
    sub.add_argument(
        "--watch",
        type=positive,
        nargs="?",
        const=30,
        metavar="SECONDS",
        help="write the page alone, again every SECONDS (default 30) for as long as a process trains in a run",
    )


def _add_samples(commands: Any) -> None:
    sub = _command(commands, "samples", "rollouts of a run to read: prompt, response, answer, reward and its parts")
    sub.add_argument("run", type=Path, help="a run's output_dir, running or not")
    sub.add_argument("--step", type=positive, help="of training (default: the newest; with --prompt all)")
    sub.add_argument("--prompt", metavar="ID", help="those of this problem alone, by its prompt_id")
    sub.add_argument("--best", type=positive, metavar="N", help="the N of the highest reward, the highest first")
    sub.add_argument("--worst", type=positive, metavar="N", help="the N of the lowest reward, the lowest first")
    sub.add_argument(
        "--limit", type=positive, default=8, metavar="N", help="without --best and --worst: the first N (default 8)"
    )
    sub.add_argument("--json", action="store_true", help="an object a line")


def _add_replay(commands: Any) -> None:
    sub = _command(
        commands,
        "replay",
        "what each allocator would have given each prompt of a run: a table and JSON; with --step the pass "
        "of a step that ended in NaN or infinity, again",
    )
    sub.add_argument(
        "run",
        nargs="*",
        metavar="RUN | key=value",
        help="a run's output_dir, or a folder of rollouts of verl (trainer.rollout_data_dir) or slime "
        "(--save-debug-rollout-data); with --step keys of the configuration that are to differ",
    )
    sub.add_argument("--step", nargs=2, metavar=("RUN", "N"), help="repeat what gave NaN or infinity in step N of RUN")
    sub.add_argument("--ranks", type=positive, help="with --step: local processes (default: as many as the run had)")
    sub.add_argument(
        "--allocator",
        action="append",
        metavar="KIND[,key=value...]",
        help="a kind with keys of algorithm.allocation, the others as the run has them; may be given several times "
        "(default: each of them)",
    )
    sub.add_argument("--out", type=Path, help="folder to write to (default: RUN)")
    sub.add_argument(
        "--success-threshold", type=float, help="verl, slime: a rollout succeeds from this reward on (default: 1.0)"
    )
    sub.add_argument("--reward-key", help="verl, slime: the field with the reward, where it is not score or reward")


def _add_compare(commands: Any) -> None:
    sub = _command(
        commands,
        "compare",
        "train arms x seeds x learning rates, resumable; what each arm costs, as a table; docs/analysis.md",
    )
    sub.add_argument("spec", metavar="SPEC.yaml", help="arms, control, seeds, learning rates, metric and output_dir")
    sub.add_argument("--ranks", type=positive, help="local processes of each run (default: as train)")
    how = sub.add_mutually_exclusive_group()
    how.add_argument(
        "--jobs",
        type=positive,
        default=1,
        metavar="N",
        help="runs at a time, each with its share of this machine's GPUs, or without GPUs of its cores (default 1)",
    )
    how.add_argument("--table", action="store_true", help="train nothing: the tables of the seeds that are complete")
    sub.add_argument("--dry-run", action="store_true", help="print the commands of the runs; start nothing")
