"""Command lines of probes, with the names of an incident filled in and quoted for a shell.

A name that is not known leaves its command out (None): half a command is worse than none. Commands
that run the failing step again first write out what was frozen of it. Where the launch told how its step is
built (`frozen_step`, "module:function"), `andon probe` runs that step with one condition changed; else the
launch's own command line follows, where it told one, without Andon watching it.
"""

import re
import shlex
from collections.abc import Callable

from andon.diagnose.record import Launch, Record
from andon.wire_values import fold_ranks

_ENTRY = re.compile(r"[A-Za-z_][\w.]{0,199}:[A-Za-z_]\w{0,99}", re.ASCII)
_REVISION = re.compile(r"[0-9A-Za-z][0-9A-Za-z._/-]{0,199}")  # never read as an option


def _shell(*words: str) -> str:
    return shlex.join(words)


def _on(node: str, *words: str) -> str:
    """Return a command on a node; `--` keeps a node's name from being read as an option."""
    return _shell("ssh", "--", node, shlex.join(words))


def _frozen(record: Record) -> str:
    """Return the command that writes out the frozen step: batch, snapshot, configuration."""
    number = record.incident.removeprefix("I-")
    return _shell("python", "manage.py", "export_bag", number, _bag(record))


def _again(record: Record, *environment: str) -> str:
    """Return how to run the frozen step again: the launch's own command, where it told one."""
    lines = [_frozen(record)]
    words = _launched(record.launch.data.get("command") if record.launch else None)
    if words:
        lines.append(_shell("env", "ANDON_MODE=off", *environment, *words))
    return "\n".join(lines)


def probe(change: str = "") -> Callable[[Record], str | None]:
    """Return the command that runs the frozen step with `change` ("" = only the number of ranks)."""
    return lambda record: _probe(record, change) or _again(record)


def _probe(record: Record, change: str) -> str | None:
    """Return the `andon probe` command; None where the launch did not tell how its step is built."""
    entry = record.launch.data.get("frozen_step") if record.launch else None
    if not isinstance(entry, str) or not _ENTRY.fullmatch(entry):
        return None
    words = ["andon", "probe", _bag(record), "--step", entry]
    if record.ranks:
        words += ["--rank", str(record.ranks[0])]
    return f"{_frozen(record)}\n{_shell(*words, *(['--change', change] if change else []))}"


def other_batch(record: Record) -> str | None:
    """Return the command that runs the step on the batch of the step before it."""
    if not record.step:
        return _again(record)
    return _probe(record, f"batch={record.step - 1}") or _again(record)


def _bag(record: Record) -> str:
    return f"incident-{record.incident.removeprefix('I-')}"


def _launched(command: object) -> list[str]:
    """Return the words of a launch's command line; none when they cannot be read or shown."""
    if isinstance(command, str):
        try:
            command = shlex.split(command)
        except ValueError:  # an open quote
            return []
    words = [str(word) for word in command] if isinstance(command, list) else []
    return words if all(word.isprintable() for word in words) else []


def _suspect(record: Record) -> str | None:
    return next(iter(_plain(record.bad_nodes)), None)


def _others(record: Record) -> list[str]:
    return [node for node in _plain(sorted(record.nodes)) if node not in record.bad_nodes]


def _plain(names: list[str]) -> list[str]:
    """Return the names that can be typed: a control or a bidirectional character would hide what runs."""
    return [name for name in names if name and name.isprintable()]


def replay(record: Record) -> str | None:
    return _again(record)


def batch(record: Record) -> str | None:
    where = f"{_bag(record)}/data"
    words = ["grep", "-rE", f'"step": ?{record.step}\\b', where, "--include=*batch*"]
    return f"{_frozen(record)}\n{_shell(*words)}" if record.step is not None else _frozen(record)


def collectives(record: Record) -> str | None:
    ranks = fold_ranks(record.ranks) if record.ranks else "all"
    listing = _shell("find", f"{_bag(record)}/data", "-name", "*flight*")
    return f"{_frozen(record)}\n{listing}  # ranks {ranks} first"


def dcgm(record: Record) -> str | None:
    node = _suspect(record)
    return _on(node, "dcgmi", "diag", "-r", "3", "-j") if node else None


def ecc(record: Record) -> str | None:
    node = _suspect(record)
    if node is None:
        return None
    return "\n".join(
        (
            _on(node, "nvidia-smi", "-q", "-d", "ECC,ROW_REMAPPER"),
            _on(node, "dmesg", "-T", "--level=err,warn"),
        )
    )


def all_reduce(record: Record) -> str | None:
    nodes = [*_plain(record.bad_nodes), *_others(record)][:2]
    if not nodes:
        return None
    run = ("all_reduce_perf", "-b", "8M", "-e", "1G", "-f", "2")
    if len(nodes) == 1:
        return _on(nodes[0], *run, "-g", "8")
    hosts = ",".join(f"{node}:8" for node in nodes)
    return _shell("mpirun", "--host", hosts, "-np", "16", *run, "-g", "1")


def counters(record: Record) -> str | None:
    node = _suspect(record) or next(iter(_others(record)), None)
    # The node's own shell expands the pattern.
    read = "grep -H . /sys/class/infiniband/*/ports/*/hw_counters/*"
    return _shell("ssh", "--", node, read) if node else None


def network(record: Record) -> str | None:
    return _again(record, "NCCL_IB_DISABLE=1", "NCCL_DEBUG=INFO")


def twin(record: Record) -> str | None:
    return _probe(record, "device=cuda:1") or _again(record, "CUBLAS_WORKSPACE_CONFIG=:4096:8")


def _code(launch: Launch | None) -> str:
    names = ("revision", "git_revision", "git_sha", "commit")
    data = launch.data if launch else {}
    told = [data[name] for name in names if isinstance(data.get(name), str)]
    return next((name for name in told if _REVISION.fullmatch(name)), "")


def diff(record: Record) -> str | None:
    old, new = _code(record.launch_before), _code(record.launch)
    return _shell("git", "diff", "--stat", old, new) if old and new else None


def older_code(record: Record) -> str | None:
    old = _code(record.launch_before)
    return f"{_shell('git', 'switch', '--detach', old)}\n{_again(record)}" if old else None


def checkpoint(record: Record) -> str | None:
    kept = [one for one in record.checkpoints if _plain([one.uri]) and one.state != "deleted"]
    if not kept:
        return None
    newest = max(kept, key=lambda one: (one.step, one.id))
    return _shell("python", "-c", _VERIFY, newest.uri.removeprefix("file://"))


_VERIFY = "import sys, pathlib, andon.checkpoints as c; print(c.verify(pathlib.Path(sys.argv[1])))"
