"""The command line: parser of the arguments, and dispatch to commands.

It uses argparse of the standard library, so the command works wherever the package does. `env` can report missing
packages even if nothing else is installed. rich colours the output if it is installed (docs/dependencies.md).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import hyper_parallel
from hyper_parallel.cli.output import Parser, UsageError, through_pipe
from hyper_parallel.platform import PlatformError
from hyper_parallel.platform.logs import words
from hyper_parallel.platform.terminal import printable_lines

__all__ = ["main", "parser"]

#: Path of attention modules in models by name, and in most models of transformers.
ATTENTION = "model.layers.*.self_attn"


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands and their arguments."""
    top = Parser(
        prog="hyper-parallel",
        description="Tensor parallelism with one API on PyTorch and MindSpore.",
        epilog=(
            "Each command has --help. HYPER_PARALLEL_PLATFORM chooses the backend, HYPER_PARALLEL_LOG=info logs "
            "each step."
        ),
    )
    top.add_argument("--version", action="version", version=f"hyper-parallel {hyper_parallel.__version__}")
    commands = top.add_subparsers(dest="command", metavar="command", required=True)

    def add(name: str, text: str, abbreviations: bool = True) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=abbreviations)
        command.add_argument("--json", action="store_true", help="print JSON")
        return command

    env = add("env", "Show backends, versions and devices, and why a backend cannot be used.")
    env.add_argument("--patches", action="store_true", help="list the patches of each framework as well")

    # No abbreviations: an option of the script may start like an option of this command.
    launch = add(
        "launch", "Start a script on several ranks, by torchrun or msrun, and print the command.", abbreviations=False
    )
    launch.add_argument("-n", "--processes", type=int, default=1, help="ranks on each node")
    launch.add_argument("--platform", help="backend of the script, such as torch-cpu")
    launch.add_argument("--nodes", type=int, default=1, help="how many nodes; give the command on each")
    launch.add_argument("--node-rank", type=int, default=0, help="which node this is, from 0")
    launch.add_argument("--address", default="127.0.0.1", help="of the first node")
    launch.add_argument("--port", type=int, help="of the first node; default: of one node a free one, else 29500")
    launch.add_argument("--print-only", action="store_true", help="print the command and stop")
    launch.add_argument("script", nargs=argparse.REMAINDER, help="the script and its arguments")

    test = add("test", "Check on local ranks that this machine computes right, in under a minute.")
    test.add_argument("-n", "--processes", type=int, default=2, help="ranks")
    test.add_argument("--platform", action="append", help="backend, repeatable; 'all' is every one that can run here")

    for name, text in (
        ("explain", "Show a model under a plan: shards, bytes and collectives of each module."),
        ("dry-run", "Foresee memory, communication and time of a step on any number of ranks."),
        (
            "check",
            "Follow a model under a plan, and show the lines that compute something else than one device.",
        ),
    ):
        command = add(name, text)
        command.add_argument("--model", required=True, help="a name such as llama-3-70b, or package.module:function")
        command.add_argument("--mesh", required=True, help="ranks, or sizes by name: dp=64,tp=8")
        command.add_argument("--plan", help="package.module:name of a dict of styles or a function(model, mesh)")
        command.add_argument("--no-sequence", action="store_true", help="of a model by name: no sequence parallelism")
        command.add_argument("--input", action="append", default=[], help="dtype[sizes] of an input, repeatable")
        command.add_argument("--length", type=int, default=4096, help="tokens of a sequence")
        command.add_argument("--dtype", help="of the model's parameters, such as bfloat16")
        if name == "check":
            command.add_argument("--batch", type=int, default=1, help="sequences of all ranks together")
            command.add_argument("--rank", type=int, default=0, help="which rank to follow")
            command.add_argument("--forward-only", action="store_true", help="leave gradients out")
            command.add_argument("--execute", action="store_true", help="compare a step on local ranks with one device")
            continue
        command.add_argument("--svg", help="write a picture to this file")
        if name == "explain":
            command.add_argument("--batch", type=int, default=1, help="sequences of a rank")
            command.add_argument("--rank", type=int, default=0, help="which rank to show")
            command.add_argument("--forward-only", action="store_true", help="leave backward out")
            command.add_argument("--table", action="store_true", help="list the collectives as well")
            continue
        command.add_argument("--batch", type=int, default=1, help="sequences of all ranks together")
        command.add_argument("--machine", default="H100", help="H100, H200, Ascend910B, or one that was registered")
        command.add_argument("--memory", help="limit of --search, such as 64GiB; default: the memory of the machine")
        command.add_argument("--optimizer", default="AdamW", help="name of the framework's optimizer")
        command.add_argument("--recompute", nargs="?", const="layers", help="recompute layers, or those of a path")
        command.add_argument("--data-parallel", default="fully_shard", choices=("fully_shard", "replicate", "none"))
        command.add_argument("--mixed-precision", action="store_true", help="bfloat16 in forward and backward")
        command.add_argument("--search", action="store_true", help="rank the ways to spread the model over the ranks")
        command.add_argument(
            "--sequences",
            action="append",
            nargs="?",
            const=ATTENTION,
            metavar="PATH",
            help=f"with --search: cut sequences too; path of attention modules, repeatable, default {ATTENTION}",
        )
        command.add_argument(
            "--cp", action="append", type=int, metavar="N", help="ranks of a sequence to try; repeatable"
        )

    compared = add("compare", "Show where two recorded runs part: hyper_parallel.debug.record writes records.")
    compared.add_argument("a", help="folder of the run that is taken for right")
    compared.add_argument("b", help="folder of the other run")
    compared.add_argument("--reference", help="folder of a third run, such as one in float64")
    compared.add_argument(
        "--name", action="append", default=[], help="PATH=PATH, of modules in A and in B, with * for a part; repeatable"
    )
    compared.add_argument("--all", action="store_true", help="list all tensors")
    compared.add_argument("--svg", help="write a picture to this file")

    checkpoint = add("checkpoint", "Show or convert checkpoints, as python -m hyper_parallel.checkpoint does.")
    checkpoint.add_argument("arguments", nargs=argparse.REMAINDER, help="show DIRECTORY, or convert ...")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status: 0 success, 1 failure or not possible, 2 wrong arguments."""
    given = parser().parse_args(arguments)
    try:
        try:
            words()
        except ValueError as error:
            raise UsageError(str(error)) from None
        return through_pipe(_run, given)
    except (UsageError, PlatformError) as error:
        print(printable_lines(f"hyper-parallel {given.command}: {error}"), file=sys.stderr)
        return 2


def _run(given: argparse.Namespace) -> int:
    # Each command imports its modules when it runs, because `env` must run without any framework.
    if given.command == "env":
        from hyper_parallel.cli import environment

        return environment.run(given)
    if given.command == "launch":
        from hyper_parallel.cli import launch

        return launch.run(given)
    if given.command == "test":
        from hyper_parallel.cli import selftest

        return selftest.run(given)
    if given.command == "compare":
        from hyper_parallel.cli import comparing

        return comparing.run(given)
    if given.command == "check":
        from hyper_parallel.cli import checking

        return checking.run(given)
    if given.command == "checkpoint":
        from hyper_parallel.checkpoint.__main__ import main as look

        return look([*given.arguments, *(["--json"] if given.json else [])], "hyper-parallel checkpoint")
    from hyper_parallel.cli import planning

    return planning.run_explain(given) if given.command == "explain" else planning.run_dry_run(given)
