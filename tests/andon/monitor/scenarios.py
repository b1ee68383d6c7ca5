"""Every scenario of the launch, in order."""

from tests.andon.monitor import scenarios_checked, scenarios_seen, scenarios_stopped

ALL = {**scenarios_seen.ALL, **scenarios_checked.ALL, **scenarios_stopped.ALL}
