"""Write the single initial migration of each app anew from its models, while nothing has been released.

The apps in the order in which they depend on each other: Django then sees each with those below it.
The hand-written SQL of an app (`OPERATIONS` of its sql.py) goes last.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
APPS = ("runs", "evidence", "incidents")


def _write(app: str, path: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, "-W", "ignore", "manage.py", "makemigrations", app, "--verbosity", "0"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    text = path.read_text().rstrip().removesuffix("]").rstrip()
    text = re.sub(
        r"(from django\.db import migrations, models\n)",
        rf"\1\nfrom {app}.sql import OPERATIONS\n",
        text,
        count=1,
    )
    path.write_text(f"{text}\n        *OPERATIONS,\n    ]\n")


def main() -> None:
    """Regenerate all three, or leave all three as they were."""
    paths = {app: ROOT / app / "migrations" / "0001_initial.py" for app in APPS}
    before = {path: path.read_text() for path in paths.values()}
    with tempfile.TemporaryDirectory(prefix="andon-migrations-") as data:
        try:
            for path in paths.values():
                path.unlink()
            for app, path in paths.items():
                _write(app, path, os.environ | {"ANDON_DATA_DIR": data})
        except BaseException:
            for path, text in before.items():
                path.write_text(text)
            raise


if __name__ == "__main__":
    main()
