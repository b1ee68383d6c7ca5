"""The kernel's log: Xids of GPUs, SXids of NVSwitches, links that went down, processes killed for memory.

Lines of `/dev/kmsg`, `dmesg`, `dmesg -T` and syslog. The number of an Xid decides, never its text or the
process it names, which only happened to call the driver (docs.nvidia.com/deploy/xid-errors). Forms seen in
the wild: the PCI domain missing, or not 0000; Xid 79 without its number, over three lines.
"""

import re
from datetime import datetime
from typing import Any

import msgspec

_KMSG = re.compile(r"^\d{1,4},\d{1,20},(?P<us>\d{1,18}),[^;]*;")
_DMESG = re.compile(r"^\[(?P<date>[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4})\] ")
_ADDRESS = r"(?:PCI:)?(?P<pci>(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?)"
_XID = re.compile(rf"NVRM:.{{0,40}}?(?<!S)Xid\s*\({_ADDRESS}\)\s*:\s*(?P<code>\d{{1,4}})\b,?\s*(?P<text>.*)")
_XID_NOT_PLAIN = re.compile(r"(?<!S)Xid\s*\(")
_GPU = re.compile(rf"NVRM:.*?\bGPU\s+(?:at\s+)?{_ADDRESS}")
_BARE = re.compile(rf"NVRM:.*?\({_ADDRESS}\)")
_OFF_THE_BUS = re.compile(r"NVRM:.*\bfallen off the bus", re.I)
_SXID = re.compile(
    rf"nvidia-nvswitch(?P<switch>\d+): SXid\s*\({_ADDRESS}\)\s*:\s*(?P<code>\d{{1,6}}),\s*(?P<text>.*)"
)
_SXID_LINK = re.compile(r"\bLink (\d+)\b", re.I)
_ACTION = re.compile(r"\bto\s+0x[0-9a-f]+\s*\(([^)]+)\)", re.I)
_LINK = re.compile(
    r"\b(?P<device>[a-z][\w.\-]{1,31}):\s+(?:NIC )?link (?:is )?(?:now )?(?P<state>down|lost)\b", re.I
)
_OOM = re.compile(r"\bOut of memory: Killed process (?P<pid>\d{1,9}) \((?P<name>[^)]{1,64})\)", re.I)
_OOM_GROUP = re.compile(
    r"\bMemory cgroup out of memory: Killed process (?P<pid>\d{1,9}) \((?P<name>[^)]{1,64})\)", re.I
)
_THREE_LINES = 3


class KernelMemory(msgspec.Struct):
    """What reading needs to know of the lines before.

    Attributes:
        gpu: the GPU named in one of the last lines, for a message spread over three of them.
        boot_ns: when the kernel's own clock began, nanoseconds since 1970, for lines of /dev/kmsg.
    """

    gpu: str = ""
    gpu_lines: int = 0
    boot_ns: int | None = None


class KernelLog:
    """Reads lines in their order."""

    def __init__(self, memory: KernelMemory | None = None) -> None:
        self.memory = memory or KernelMemory()

    @property
    def is_open(self) -> bool:
        """Whether something was begun: a message over three lines says nothing before its last."""
        return False

    def flush(self) -> list[dict[str, Any]]:
        """End what is open: nothing ever is."""
        return []

    def feed(self, raw: str) -> list[dict[str, Any]]:
        """Return the events of one line."""
        time_ns = self._time(raw)
        event = self._read(raw[:4_000])
        if event is None:
            return []
        if time_ns is not None:
            event["time"] = time_ns
        return [event]

    def _read(self, text: str) -> dict[str, Any] | None:
        self.memory.gpu_lines += 1
        if self.memory.gpu_lines > _THREE_LINES:
            self.memory.gpu = ""
        found = _XID.search(text)
        if found is not None:
            data: dict[str, Any] = {"xid": int(found["code"]), "pci": address(found["pci"])}
            data["detail"] = found["text"].strip()[:300]
            action = _ACTION.search(found["text"])
            if data["xid"] == 154 and action is not None:
                data["action"] = action[1].strip()[:80]
            return {"type": "hardware.xid", "data": data}
        named = _GPU.search(text) or _BARE.search(text)
        if named is not None and not _XID_NOT_PLAIN.search(text):
            self.memory.gpu, self.memory.gpu_lines = address(named["pci"]), 0
        if _OFF_THE_BUS.search(text) and self.memory.gpu:
            data = {
                "xid": 79,
                "pci": self.memory.gpu,
                "detail": "fallen off the bus (printed without a number)",
            }
            self.memory.gpu = ""
            return {"type": "hardware.xid", "data": data}
        return _switch(text) or _link(text) or _killed(text)

    def _time(self, raw: str) -> int | None:
        kmsg = _KMSG.match(raw)
        if kmsg is not None:
            return None if self.memory.boot_ns is None else self.memory.boot_ns + int(kmsg["us"]) * 1_000
        date = _DMESG.match(raw)
        if date is not None:
            try:
                # `dmesg -T` prints the node's local time.
                return (
                    int(datetime.strptime(date["date"], "%a %b %d %H:%M:%S %Y").astimezone().timestamp())
                    * 10**9
                )
            except (ValueError, OverflowError):
                return None
        return None


def _switch(text: str) -> dict[str, Any] | None:
    found = _SXID.search(text)
    if found is None:
        return None
    words = found["text"].strip()
    if not words.lower().startswith(("fatal", "non-fatal")):
        return None  # severity and payload of the line before
    data: dict[str, Any] = {"sxid": int(found["code"]), "switch": int(found["switch"])}
    data |= {"pci": address(found["pci"]), "detail": f"SXid {found['code']}: {words}"[:300]}
    link = _SXID_LINK.search(words)
    if link is not None:
        data["link"] = int(link[1])
    if words.lower().startswith("non-fatal"):
        # A switch that corrected itself is no fault of a link.
        return {"type": "node.state", "data": {"state": "switch_warning", **data}}
    return {"type": "hardware.link", "data": data}


def _link(text: str) -> dict[str, Any] | None:
    found = _LINK.search(text)
    if found is None:
        return None
    data = {"device": found["device"], "state": "down", "detail": text.strip()[-300:]}
    return {"type": "hardware.link", "data": data}


def _killed(text: str) -> dict[str, Any] | None:
    found = _OOM.search(text) or _OOM_GROUP.search(text)
    if found is None:
        return None
    message = f"oom-kill: the kernel killed process {found['pid']} ({found['name']}) for memory"
    return {
        "type": "process.error",
        "data": {"class": "oom_killed", "message": message, "pid": int(found["pid"])},
    }


def address(pci: str) -> str:
    """Return a PCI address as dmesg writes it, however it is spelled: "00000000:10:1C.0" → "0000:10:1c"."""
    parts = pci.lower().partition(".")[0].split(":")
    if len(parts) == 2:
        parts = ["0000", *parts]
    return ":".join([parts[0][-4:], *parts[1:]])
