"""`python -m config.settings_table`: print docs/settings.md, the table of every environment variable."""

import sys

_HEAD = """# Settings

Every setting is an environment variable. A value that is not understood, and an `ANDON_` variable that
nobody reads, stop the process at once with a line that names it. `NAME_FILE` in place of `NAME` names a
file that holds the value, for secrets. An empty variable is the same as none.

This table is made from `config/settings.py` by `make settings`; a test keeps the two equal.

| variable | takes | default | what it is |
|---|---|---|---|
"""


def table() -> str:
    """Return the page as Markdown."""
    from config import env, settings  # noqa: F401 - reading the settings fills the table

    rows = [
        f"| `{setting.name}` | {setting.kind} | {setting.default or '–'} | {setting.about} |\n"
        for setting in env.SETTINGS.values()
    ]
    return _HEAD + "".join(rows)


if __name__ == "__main__":
    sys.stdout.write(table())
