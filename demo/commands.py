"""Several management commands in one process: to start Django costs more than any of them.

Reads a JSON array of `[[command, argument, …], its standard input]` and prints a JSON array of what each
printed. The first that fails ends all.
"""

import contextlib
import io
import json
import os
import sys

import django
from django.core.management import CommandError, call_command


def main() -> None:
    """Run what standard input names, in order."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "config.settings")
    django.setup()
    wanted = json.load(sys.stdin)
    printed = []
    for arguments, text in wanted:
        sys.stdin = io.StringIO(text)
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            try:
                call_command(*arguments)
            except CommandError as error:
                sys.exit(f"{arguments[0]}: {error}")
        printed.append(output.getvalue())
    print(json.dumps(printed))


if __name__ == "__main__":
    main()
