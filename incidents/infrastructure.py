"""Whether machines, fabric or the scheduler ended an attempt: then it is restarted and no person is needed.

Only what was said counts: the launcher's own attribution of the exit, or a hardware fault recorded in
that attempt. An exit code alone says nothing about whose fault it was.
"""

from incidents import diagnosis, rules
from runs.models import Attempt

# Names under which launchers attribute an exit, and their words for what is not the job's own doing.
_KEYS = ("attributed_to", "failure_class", "failure", "class", "category", "reason")
_WORDS = frozenset(
    {
        *("hardware", "fabric", "network", "infrastructure", "node", "gpu", "scheduler"),
        *("node_loss", "node_failure", "node_fail", "preemption", "preempted", "time_limit", "timeout"),
        *("gpu_error", "hardware_failure", "link_failure", "ecc_error", "xid", "drain"),
    }
)
# A failure of the numbers is a person's matter, whatever else was recorded.
_NOT = rules.NONFINITE_KINDS | rules.ALWAYS_HOLDS


def ended(attempt: Attempt) -> bool:
    """Return whether the exit of `attempt` was attributed to infrastructure."""
    if attempt.exited_at is None:
        return False
    if attempt.run.findings.filter(attempt=attempt.number, kind__in=_NOT, severity="halt").exists():
        return False
    said = {_plain(attempt.exit.get(key)) for key in _KEYS}
    return bool(said & _WORDS) or bool(diagnosis.hardware_nodes(attempt.run, attempt.number))


def _plain(value: object) -> str:
    return value.strip().lower().replace(" ", "_").replace("-", "_")[:64] if isinstance(value, str) else ""
