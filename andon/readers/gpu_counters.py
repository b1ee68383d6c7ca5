"""Counters of GPUs: `nvidia-smi --query-gpu … csv`, `nvidia-smi -q`, and dcgm-exporter's text.

Units are the wire's (°C, W, MHz, counts since the driver was loaded). "[N/A]" and "[Not Supported]" are not
measured, never 0. dcgm-exporter's XID_ERRORS is a gauge that keeps the last code for ever: an Xid is told
where it changes, or where DCGM_EXP_XID_ERRORS_COUNT grew.
"""

import re
from collections.abc import Iterable

import msgspec

from andon.readers.kernel_log import address

# nvidia-smi's query field → the wire's metric. Old and new names of one field both stand here.
FIELDS: dict[str, str] = {
    "index": "index",
    "uuid": "uuid",
    "pci.bus_id": "pci",
    "temperature.gpu": "gpu_temp_c",
    "temperature.memory": "mem_temp_c",
    "power.draw": "power_w",
    "power.limit": "power_limit_w",
    "clocks.sm": "sm_clock_mhz",
    "clocks.mem": "mem_clock_mhz",
    "clocks_throttle_reasons.active": "throttle_reasons",
    "ecc.errors.corrected.volatile.total": "ecc_sbe",
    "ecc.errors.uncorrected.volatile.total": "ecc_dbe",
    "remapped_rows.pending": "row_remap_pending",
    "remapped_rows.failure": "row_remap_failure",
}
QUERY = ",".join(FIELDS)
_DCGM = {
    "GPU_TEMP": "gpu_temp_c",
    "MEMORY_TEMP": "mem_temp_c",
    "POWER_USAGE": "power_w",
    "SM_CLOCK": "sm_clock_mhz",
    "MEM_CLOCK": "mem_clock_mhz",
    "ECC_SBE_VOL_TOTAL": "ecc_sbe",
    "ECC_DBE_VOL_TOTAL": "ecc_dbe",
    "PCIE_REPLAY_COUNTER": "pcie_replays",
    "ROW_REMAP_FAILURE": "row_remap_failure",
    "XID_ERRORS": "xid_last",
}
_NVLINK = re.compile(r"DCGM_FI_DEV_NVLINK_(?:CRC_FLIT|CRC_DATA|REPLAY|RECOVERY)_ERROR_COUNT_TOTAL")
_SAMPLE = re.compile(
    r"^(?P<name>DCGM_[A-Z0-9_]{1,120})\{(?P<labels>[^}]{0,4000})\}\s+(?P<value>\S+)(?:\s+\d+)?$"
)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_PLAIN = re.compile(r"[+-]?\d+(?:\.\d+)?(?:e[+-]?\d+)?", re.I | re.A)
_MAX_GPUS = 64


class Gpu(msgspec.Struct, kw_only=True):
    """One GPU at one moment: `values` by the wire's metrics; `xids`: how often each Xid came, where told."""

    index: int | None = None
    uuid: str = ""
    pci: str = ""
    values: dict[str, float] = {}
    xids: dict[int, int] = {}

    @property
    def name(self) -> str:
        """What identifies it across samples."""
        return self.uuid or self.pci or str(self.index)


def read_csv(text: str) -> list[Gpu]:
    """Read `nvidia-smi --query-gpu=<QUERY> --format=csv,noheader,nounits`; other rows are left out."""
    found = []
    for line in text.splitlines()[:_MAX_GPUS]:
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(FIELDS):
            continue
        gpu = Gpu()
        for name, cell in zip(FIELDS.values(), cells, strict=True):
            _take(gpu, name, cell)
        if gpu.uuid or gpu.pci:
            found.append(gpu)
    return found


def _take(gpu: Gpu, name: str, cell: str) -> None:
    if name == "uuid":
        gpu.uuid = cell[:80] if cell.startswith("GPU-") else ""
    elif name == "pci":
        gpu.pci = (
            address(cell)
            if re.fullmatch(r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]", cell)
            else ""
        )
    elif name == "index":
        gpu.index = int(cell) if re.fullmatch(r"\d{1,4}", cell, re.A) else None
    elif name == "throttle_reasons":
        if re.fullmatch(r"0x[0-9a-fA-F]{1,16}", cell):
            gpu.values[name] = float(int(cell, 16))
    elif cell.lower() in ("yes", "no"):
        gpu.values[name] = float(cell.lower() == "yes")
    elif _PLAIN.fullmatch(cell):
        gpu.values[name] = float(cell)


_QUERIED_GPU = re.compile(r"^GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])\s*$")
_QUERIED = re.compile(r"^(\s*)([A-Za-z][\w /]*?)\s*(?::\s*(.*?))?\s*$")
# Path of headings in `nvidia-smi -q` → metric; several add up.
_PATHS = {
    ("ECC Errors", "Volatile", "SRAM Correctable"): "ecc_sbe",
    ("ECC Errors", "Volatile", "DRAM Correctable"): "ecc_sbe",
    ("ECC Errors", "Volatile", "SRAM Uncorrectable"): "ecc_dbe",
    ("ECC Errors", "Volatile", "DRAM Uncorrectable"): "ecc_dbe",
    ("Remapped Rows", "Correctable Error"): "rows_remapped_correctable",
    ("Remapped Rows", "Uncorrectable Error"): "rows_remapped_uncorrectable",
    ("Remapped Rows", "Pending"): "row_remap_pending",
    ("Remapped Rows", "Remapping Failure Occurred"): "row_remap_failure",
}


def read_query(text: str) -> list[Gpu]:
    """Read the text of `nvidia-smi -q`: errors and remapped rows by GPU."""
    found: list[Gpu] = []
    path: list[tuple[int, str]] = []
    for line in text.splitlines():
        gpu = _QUERIED_GPU.match(line)
        if gpu is not None:
            if len(found) >= _MAX_GPUS:
                break
            found.append(Gpu(pci=address(gpu[1])))
            path = []
            continue
        entry = _QUERIED.match(line)
        if entry is None or not found:
            continue
        depth = len(entry[1])
        path = [(at, name) for at, name in path if at < depth] + [(depth, entry[2])]
        names = tuple(name for _, name in path)
        metric = next((_PATHS[names[-length:]] for length in (3, 2) if names[-length:] in _PATHS), None)
        value = (entry[3] or "").strip()
        if metric is None or not value:
            continue
        if value in ("Yes", "No"):
            found[-1].values[metric] = float(value == "Yes")
        elif _PLAIN.fullmatch(value):
            found[-1].values[metric] = found[-1].values.get(metric, 0.0) + float(value)
    return found


def read_dcgm(lines: Iterable[str]) -> list[Gpu]:
    """Read dcgm-exporter's metrics. Samples without a GPU, and values that are no numbers, are left out."""
    gpus: dict[str, Gpu] = {}
    for line in lines:
        sample = _SAMPLE.match(line.strip())
        if sample is None or not _PLAIN.fullmatch(sample["value"]):
            continue
        labels = dict(_LABEL.findall(sample["labels"]))
        key = labels.get("UUID") or labels.get("gpu")
        if not key or (key not in gpus and len(gpus) >= _MAX_GPUS):
            continue
        gpu = gpus.setdefault(key, Gpu(uuid=labels.get("UUID", "")[:80]))
        if re.fullmatch(r"\d{1,4}", labels.get("gpu", ""), re.A):
            gpu.index = int(labels["gpu"])
        pci = labels.get("pci_bus_id", "")
        if re.fullmatch(r"[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7]", pci):
            gpu.pci = address(pci)
        value = float(sample["value"])
        name = sample["name"]
        if name == "DCGM_EXP_XID_ERRORS_COUNT":
            if re.fullmatch(r"\d{1,4}", labels.get("xid", ""), re.A):
                gpu.xids[int(labels["xid"])] = int(min(value, 2**53))
        elif _NVLINK.fullmatch(name):
            gpu.values["nvlink_errors"] = gpu.values.get("nvlink_errors", 0.0) + value
        elif (metric := _DCGM.get(name.removeprefix("DCGM_FI_DEV_"))) is not None:
            gpu.values[metric] = value
    return list(gpus.values())
