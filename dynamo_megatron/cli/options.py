"""The commands of the command line with their options and help texts."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from dynamo_megatron.launcher.options import JOB, NEMO, SLURM, option, positive

EXIT_CODES = "exit codes: 0 done, 1 failed, 2 bad config or input, 75 stopped cleanly and resumable, 130 Ctrl-C"
REPORTED = ("dynamo-megatron", "torch", "megatron-core", "sglang")
CONFIG_HELP = "YAML files, names of shipped ones (`dynamo-megatron configs`), and keys, which follow all files"
CONFIG = option("config", nargs="+", metavar="CONFIG | key=value", help=CONFIG_HELP)
MODEL = option(
    "--model",
    metavar="HF",
    type=Path,
    help="folder of config.json and tokenizer, and of the weights that adapters are beside (default: CHECKPOINT's own, "
    "or its run's model.path)",
)
OUT = option("out", metavar="OUT", type=Path, help="folder to write")
TRAINING = (
    CONFIG,
    option("--print-config", action="store_true", help="show every value and who set it, then stop"),
    option("--ranks", type=positive, help="local processes (default: this machine's GPUs; without GPUs, one replica)"),
)
GROUPS = {  # of commands: where the parser has the one that was chosen, and what they do
    "convert": ("direction", "a Hugging Face folder to a Megatron checkpoint, or back, or to a folder for peft"),
    "launch": ("launcher", "start a training here, on a SLURM cluster or through nemo-run"),
}
# what each does, the words of an example, its options; in the order of --help
COMMANDS: dict[str, Sequence[Any]] = {
    "train": (
        "train a policy by reinforcement learning; the same command resumes a run that was stopped",
        "my.yaml methods/dynamo trainer.steps=20 output_dir=runs/first",
        *TRAINING,
    ),
    "sft": (
        "fine-tune on completions (data.answer_key), as a warm-up; the same command resumes",
        "my.yaml data.source=solutions.jsonl data.answer_key=solution output_dir=runs/warm",
        *TRAINING,
    ),
    "dpo": (
        "train on pairs of completions, one preferred (dpo.*); the same command resumes",
        "my.yaml data.source=pairs.jsonl dpo.beta=0.1 output_dir=runs/preferred",
        *TRAINING,
    ),
    "configs": (
        "list the configurations that are shipped: methods, models on hardware, the paper's sizes",
        "methods/dynamo > my-dynamo.yaml",
        option("name", nargs="?", help="print this one, as a start of your own"),
    ),
    "preflight": (
        "check a configuration, this node and the server before a job waits for them",
        "my.yaml methods/dynamo --ranks 8",
        CONFIG,
        option("--ranks", type=positive, help="of the run (default: as `train` would start here)"),
        option("--no-server", action="store_true", help="do not start a small server, which takes longest"),
    ),
    "serve": (
        "run one node's share of a run's rollout servers (rollout.placement: split)",
        "my.yaml rollout.placement=split rollout.host=ib0 --nodes 2 --node 0",
        CONFIG,
        option("--nodes", type=positive, required=True, help="nodes with servers; each runs an equal share"),
        option("--node", type=int, required=True, help="which of them this one is, from 0"),
    ),
    "eval": (
        "sample answers to held-out problems (eval.*) and score them: pass@k with intervals",
        "--model runs/first --out scores eval.data=test.jsonl eval.samples=8 eval.k=[1,8]",
        option("config", nargs="*", metavar="CONFIG | key=value", help=CONFIG_HELP),
        option(
            "--model",
            action="append",
            default=[],
            help="a Hugging Face folder, a run or one of its checkpoints (both bring their config along), or the "
            "URL of an SGLang server (default: model.path); several times: side by side, with differences to the "
            "first",
        ),
        option(
            "--suite",
            metavar="table | NAME,NAME,...",
            help="several sets, each the file NAME.jsonl in the folder eval.data; table: aime24, aime25, amc23, "
            "math500, minerva, olympiad",
        ),
        option("--out", type=Path, required=True, help="folder for the responses, the table and the logs"),
    ),
    "convert hf2mcore": (
        "write a Hugging Face folder as a Megatron checkpoint for any layout",
        "models/Qwen2.5-7B models/Qwen2.5-7B-mcore",
        option("source", metavar="HF", type=Path, help="a Hugging Face folder"),
        OUT,
    ),
    "convert mcore2hf": (
        "write a Megatron checkpoint as a Hugging Face folder",
        "runs/first/checkpoints/step-000200 models/first",
        option(
            "source",
            metavar="CHECKPOINT",
            help="a folder that hf2mcore wrote, a run (its newest checkpoint), one of its checkpoints/step-N, or "
            "with --model any folder in Megatron's torch_dist format",
        ),
        OUT,
        MODEL,
    ),
    "convert mcore2peft": (
        "write the adapters of a LoRA run as a folder that peft loads",
        "runs/first adapters/first",
        option("source", metavar="CHECKPOINT", help="a run with model.lora (its newest checkpoint), or its checkpoint"),
        OUT,
        MODEL,
    ),
    "inspect": (
        "what is in a checkpoint or a model's folder, also one of others, or how two differ",
        "--diff runs/first/checkpoints/step-000010 runs/first/checkpoints/step-000020",
        option(
            "path",
            nargs="?",
            type=Path,
            help="a run (its newest complete checkpoint), one checkpoint, a folder in Megatron's torch_dist "
            "format, or a Hugging Face folder",
        ),
        option("--diff", nargs=2, type=Path, metavar=("A", "B"), help="compares the tensors, one at a time"),
    ),
    "launch local": (
        "train with ranks on this machine, as `train` does",
        "my.yaml output_dir=runs/first --ranks 2",
        CONFIG,
        option("--ranks", type=positive, help="local processes (default: as train)"),
    ),
    "launch slurm": (
        "write the sbatch script of a training and submit it; docs/clusters.md",
        "my.yaml output_dir=runs/first rollout.host=ib0 --nodes 4 --gpus-per-node 8 --time 24:00:00",
        CONFIG,
        *JOB,
        *SLURM,
    ),
    "launch ray": (
        "train with a Ray actor a rank, here or on a Ray cluster; docs/clusters.md",
        "my.yaml output_dir=runs/first rollout.host=ib0 --ranks 16 --address auto",
        CONFIG,
        option("--ranks", type=positive, required=True, help="a GPU each, where the cluster has any"),
        option("--address", help="a Ray cluster's: auto or HOST:PORT (default: Ray on this machine)"),
        option("--wait", type=positive, default=300, metavar="SECONDS", help="for free resources (default 300)"),
    ),
    "launch nemo": (
        "convert, train and evaluate with nemo-run, here or on a SLURM cluster; docs/clusters.md",
        "my.yaml output_dir=runs/first rollout.host=ib0 --python .venv/bin/python --executor slurm --nodes 4 --eval",
        CONFIG,
        *JOB,
        *NEMO,
    ),
    "plan": (
        "before anything runs: memory of every rank, servers, host and disk, times, a verdict",
        "models/qwen2.5-14b paper --gpus 16 --gpu h100-80 --search",
        CONFIG,
        option("--gpus", type=positive, required=True, help="that train; those of split servers come on top"),
        option("--gpu", required=True, choices=("a100-80", "h100-80", "h200-141", "b200-180")),
        option("--gpus-per-node", type=positive, default=8, help="default: 8"),
        option("--response-tokens", type=positive, help="the mean response's, for times (default: half of the limit)"),
        option("--search", action="store_true", help="rank layouts instead of judging the config's"),
    ),
    "report": (
        "what a run has done so far, or several runs side by side: a page, tables",
        "runs/first runs/second --out comparison",
        option("run", type=Path, nargs="+", help="a run's output_dir; differences are to the first one"),
        option("--out", type=Path, help="folder to write to (default: the first RUN)"),
        option(
            "--rollout",
            action="append",
            default=[],
            metavar="ID",
            help="of the first RUN, to have in the page; repeatable",
        ),
    ),
    "samples": (
        "rollouts of a run to read: prompt, response, answer, reward and its parts",
        "runs/first --step 20 --best 2 --worst 2 | less",
        option("run", type=Path, help="a run's output_dir, running or not"),
        option("--step", type=positive, help="of training (default: the newest; with --prompt all)"),
        option("--prompt", metavar="ID", help="those of this problem alone, by its prompt_id"),
        option("--best", type=positive, metavar="N", help="the N of the highest reward, the highest first"),
        option("--worst", type=positive, metavar="N", help="the N of the lowest reward, the lowest first"),
        option("--limit", type=positive, metavar="N", help="without these: the first N (default 8, with --json all)"),
        option("--json", action="store_true", help="an object a line"),
        option("--pairs", action="store_true", help="best and worst whole response of each group, for `dpo`"),
    ),
    "replay": (
        "what each allocator would have given each prompt of a run: a table and JSON; with --step the pass of a step "
        "that ended in NaN or infinity, again",
        "runs/first --allocator uniform --allocator neyman,half_life=4",
        option(
            "run",
            nargs="*",
            metavar="RUN | key=value",
            help="a run's output_dir; with --step keys of the configuration that are to differ",
        ),
        option("--step", nargs=2, metavar=("RUN", "N"), help="repeat what gave NaN or infinity in step N of RUN"),
        option("--ranks", type=positive, help="with --step: local processes (default: as many as the run had)"),
        option(
            "--allocator",
            action="append",
            metavar="KIND[,key=value...]",
            help="a kind with keys of algorithm.allocation, the others as the run has them; may be given several "
            "times (default: each of them)",
        ),
        option("--out", type=Path, help="folder to write to (default: RUN)"),
    ),
    "verify": (
        "recompute and check a finished step of a run with numpy and transformers: a table; docs/analysis.md",
        "runs/first --step 20",
        option("run", type=Path, help="a run's output_dir; the checkpoints before and after the step say the most"),
        option("--step", type=positive, help="of training (default: the newest)"),
    ),
    "compare": (
        "train arms x seeds x learning rates, resumable; what each arm costs, as a table; docs/analysis.md",
        "compare/demo",
        option("spec", metavar="SPEC.yaml", help="arms, control, seeds, learning rates, metric and output_dir"),
        option("--ranks", type=positive, help="local processes of each run (default: as train)"),
        option(
            "--jobs",
            type=positive,
            default=1,
            metavar="N",
            help="runs at a time, each with its share of this machine's GPUs, or without GPUs of its cores (default 1)",
        ),
        option("--table", action="store_true", help="train nothing: the tables of the seeds that are complete"),
        option("--dry-run", action="store_true", help="print the commands of the runs; start nothing"),
    ),
}


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def parser() -> argparse.ArgumentParser:
    plain = argparse.RawDescriptionHelpFormatter
    top = Parser(prog="dynamo-megatron", description="RLVR on Megatron-core with DynaMO.", formatter_class=plain)
    top.add_argument("--version", action="version", version=_versions())
    groups = {"": top.add_subparsers(dest="command", required=True)}
    for name, (help, example, *options) in COMMANDS.items():
        group, _, last = name.rpartition(" ")
        if group not in groups:
            chosen, what = GROUPS[group]
            groups[group] = groups[""].add_parser(group, help=what).add_subparsers(dest=chosen, required=True)
        made = groups[group].add_parser(
            last,
            help=help,
            description=help,
            epilog=f"example:\n  dynamo-megatron {name} {example}\n\n{EXIT_CODES}",
            formatter_class=plain,
        )
        made.set_defaults(subparser=made)
        for names, how in options:
            made.add_argument(*names, **how)
    return top


def _versions() -> str:
    """Of this package and of those that results depend on, without importing them."""
    installed = {d.name: d.version for name in REPORTED for d in metadata.Distribution.discover(name=name)}
    others = (f"{name} {installed.get(name, 'not installed')}" for name in REPORTED[1:])
    return f"{REPORTED[0]} {installed.get(REPORTED[0])} (Python {platform.python_version()}, {', '.join(others)})"
