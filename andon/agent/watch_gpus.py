"""The GPUs of a node: counters that grew and clocks that are held back become events.

A counter counts since the driver was loaded, so what stands in the first sample is no news; only what grows
while the agent looks is told. One sample a minute is told as it is.
"""

import logging
import shutil
import subprocess
import urllib.request
from collections.abc import Callable
from typing import Any

from andon.readers.gpu_counters import QUERY, Gpu, read_csv, read_dcgm

logger = logging.getLogger("andon.agent")

Source = Callable[[], list[Gpu]]

_TIMEOUT_S = 20.0
_MAX_BYTES = 8 << 20
# NVML's clocks_event_reasons that say "too hot" or "too much power for the board" (nvml.h).
THERMAL_REASONS = {
    0x08: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
_ECC = {"ecc_dbe": "uncorrected", "ecc_sbe": "corrected"}


def source_of(where: str) -> Source | None:
    """Return what reads counters: an address of dcgm-exporter, a program (nvidia-smi), "auto"; None: none."""
    if where.startswith(("http://", "https://")):
        return lambda: _dcgm(where)
    program = shutil.which("nvidia-smi" if where == "auto" else where)
    return None if program is None else lambda: _smi(program)


def _smi(program: str) -> list[Gpu]:
    shown = subprocess.run(
        [program, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"],
        capture_output=True,
        timeout=_TIMEOUT_S,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    return read_csv(shown.stdout[:_MAX_BYTES].decode("utf-8", "replace"))


def _dcgm(url: str) -> list[Gpu]:
    with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as answer:  # noqa: S310  (the scheme was looked at)
        return read_dcgm(answer.read(_MAX_BYTES).decode("utf-8", "replace").splitlines())


class Gpus:
    """Compares samples."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._before: dict[str, Gpu] = {}
        self._failed = ""

    def look(self) -> list[dict[str, Any]]:
        """Take a sample and return the events of what changed since the last."""
        try:
            gpus = self._source()
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            if str(error) != self._failed:
                logger.warning("counters of GPUs: %s", error)
            self._failed = str(error)
            return []
        self._failed = ""
        events = []
        for gpu in gpus:
            before = self._before.get(gpu.name)
            if before is not None:
                events += changes(before, gpu)
        gone = self._before.keys() - {gpu.name for gpu in gpus}
        for name in sorted(gone):
            data = {**_who(self._before[name]), "state": "gone", "detail": f"{name}: is no longer listed"}
            events.append({"type": "node.state", "data": data})
        self._before = {gpu.name: gpu for gpu in gpus}
        return events

    def sample(self) -> list[dict[str, Any]]:
        """Return the last sample as one event."""
        if not self._before:
            return []
        rows = [{**_who(gpu), **gpu.values} for gpu in self._before.values()]
        return [{"type": "node.state", "data": {"state": "sampled", "gpus": rows}}]


def changes(before: Gpu, now: Gpu) -> list[dict[str, Any]]:
    """Return the events of what changed on one GPU. A count that fell began anew (driver loaded, reset)."""
    events: list[dict[str, Any]] = []

    def tell(kind: str, **data: Any) -> None:
        events.append({"type": kind, "data": {**_who(now), **data}})

    grown = {}
    for metric, word in _ECC.items():
        old, new = before.values.get(metric), now.values.get(metric)
        if old is not None and new is not None and new > old:
            grown[word] = int(new - old)
    if now.values.get("row_remap_pending") and not before.values.get("row_remap_pending"):
        grown["row_remap_pending"] = 1
        grown.setdefault("corrected", 1)  # a row is put aside for an error that it had
    if grown:
        tell("hardware.ecc", **grown)
    for code, count in now.xids.items():
        if count > before.xids.get(code, 0):
            tell("hardware.xid", xid=code, count=count - before.xids.get(code, 0))
    last = now.values.get("xid_last", 0.0)
    if not now.xids and last and last != before.values.get("xid_last"):
        tell("hardware.xid", xid=int(last))
    old_reasons, reasons = (int(gpu.values.get("throttle_reasons", 0)) for gpu in (before, now))
    begun = [words for bit, words in THERMAL_REASONS.items() if reasons & bit and not old_reasons & bit]
    if begun:
        known = {
            name: now.values[name] for name in ("gpu_temp_c", "power_w", "sm_clock_mhz") if name in now.values
        }
        tell("hardware.thermal", reason=", ".join(begun), **known)
    return events


def _who(gpu: Gpu) -> dict[str, Any]:
    known = {"gpu": gpu.index, "gpu_uuid": gpu.uuid or None, "pci": gpu.pci or None}
    return {name: value for name, value in known.items() if value is not None}
