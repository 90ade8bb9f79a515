"""``python -m hyper_parallel.checkpoint show PATH`` and ``... convert PATH --to huggingface|one-file --out PATH``."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from hyper_parallel.checkpoint.errors import CheckpointError
from hyper_parallel.checkpoint.tool import contents, convert, show
from hyper_parallel.cli.output import Parser, through_pipe
from hyper_parallel.platform.terminal import printable


def main(arguments: Sequence[str] | None = None, name: str = "python -m hyper_parallel.checkpoint") -> int:
    """Run the command; return its exit status. The status is 1 if the checkpoint cannot be read, or files cannot be
    written. ``name`` is the command's name in messages."""
    parser = Parser(prog=name, description="Looks into a checkpoint, without any framework.")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("show", help="list tensors and values")
    command.add_argument("path", type=Path)
    command = commands.add_parser("convert", help="write the weights as other files")
    command.add_argument("path", type=Path)
    command.add_argument("--to", choices=["huggingface", "one-file"], required=True)
    command.add_argument("--out", type=Path, required=True, help="the new directory, or the new file")
    command.add_argument("--part", help="the part to convert, such as model; default: the only module, or everything")
    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args(arguments)
    try:
        if given.command == "show" and given.json:
            print(json.dumps(contents(given.path), indent=2))
        elif given.command == "show":
            print(show(given.path, shutil.get_terminal_size().columns if sys.stdout.isatty() else None))
        else:
            written = [str(path) for path in convert(given.path, given.to, given.out, given.part)]
            print(json.dumps({"files": written}, indent=2) if given.json else "\n".join(map(printable, written)))
    except BrokenPipeError:
        raise
    except (CheckpointError, ValueError, OSError) as error:
        print(printable(f"{parser.prog}: {error}"), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(through_pipe(main, None))
