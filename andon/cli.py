"""The `andon` command: a thin front that imports a part only when it is asked for.

Exit code 2 is a wrong use or an unreadable input, for every part; the other codes are each part's.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

from andon import __version__
from andon.wire_version import VERSION

# name → (module with add_arguments(parser) and run(args), what it does)
COMMANDS: dict[str, tuple[str, str]] = {
    "detect": ("andon.detect.command", "judge a series: findings as JSON lines; exit 1 on a halt"),
    "tail": ("andon.tail.command", "post what a training log says; no change to the trainer"),
    "read": ("andon.read_command", "what a file of another tool says, printed or posted"),
    "agent": ("andon.agent.command", "watch this node; hold and upload its evidence"),
    "supervise": ("andon.supervise.command", "start a job, keep it held, start it again by permit"),
    "replay": ("andon.replay", "post a recording through the real client"),
    "probe": ("andon.probe_command", "run a frozen step again with one condition changed"),
    "verify": ("andon.bag", "check an exported evidence bag offline"),
    "ledger": ("andon.ledger_command", "check an exported ledger offline: andon ledger verify FILE"),
    "megatron": ("andon.integrations.megatron", "a permit as Megatron's arguments; check its resumed lr"),
    "permit": ("andon.permit", "check a permit offline: andon permit verify FILE"),
}

EXIT_USAGE = 2


def build_parser(command: str | None) -> argparse.ArgumentParser:
    """Return the parser; only `command`'s own module is imported, so the others cost nothing."""
    parser = argparse.ArgumentParser(
        prog="andon", description="The andon cord for LLM training: beside the trainer, and offline."
    )
    parser.add_argument("--version", action="version", version=f"andon {__version__} (wire {VERSION})")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, (module, help_text) in COMMANDS.items():
        one = commands.add_parser(name, help=help_text, description=help_text)
        if name == command:
            importlib.import_module(module).add_arguments(one)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = next((word for word in given if not word.startswith("-")), None)
    try:
        parser = build_parser(command if command in COMMANDS else None)
    except ImportError as error:
        missing = error.name or str(error)
        print(f"andon {command}: needs {missing!r}, which is not installed here", file=sys.stderr)
        return EXIT_USAGE
    try:
        args = parser.parse_args(given)
    except SystemExit as error:  # argparse: 0 after --help and --version, 2 on wrong use
        return error.code if isinstance(error.code, int) else EXIT_USAGE
    if args.command is None:
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    try:
        code: int = importlib.import_module(COMMANDS[args.command][0]).run(args)
    except BrokenPipeError:  # `andon detect … | head`
        sys.stderr.close()
        return EXIT_USAGE
    except KeyboardInterrupt:
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
