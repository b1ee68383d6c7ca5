"""What `dcgmi` prints: `diag` as JSON (DCGM 3 and 4) and as a table, `nvlink -s`, `nvlink -e -j`, and health.

The content decides, never the exit code: dcgmi exits 0 with a test that failed and 205 with all passed. All
results are looked at: in DCGM 4 a test may say Pass and one of its GPUs Fail. In a table a cell is cut at the
column's width, in the middle of words. (https://docs.nvidia.com/datacenter/dcgm/latest/user-guide)
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import msgspec

Status = Literal["pass", "fail", "warn", "skip"]
Kind = Literal["diag", "nvlink", "nvlink errors", "health"]

_STATUS = re.compile(r"(pass|fail|warn|skip)\w*", re.I)
_CELL = re.compile(r"\|([^|]*)\|(.*)\|$")
_CATEGORY = re.compile(r"\|-----\s+(.+?)\s+-[-+]*\+?-*\|")
_OF_GPUS = re.compile(r"(pass|fail|warn|skip)\w*\s+-\s+(?:GPUs?:\s*([\d, ]+)|All)\s*$", re.I)
_OF_GPU = re.compile(r"GPU\s*(\d{1,4}):\s*(pass|fail|warn|skip)\w*\s*$", re.I)
_NOTE = re.compile(r"(?:warning|error|info)\b(?::\s*GPU\s*(\d{1,4}))?", re.I)
_GPU_ID = re.compile(r"^\s*(gpuId|physicalId)\s+(\d{1,6})\s*:?\s*((?:[UDX_]\s*)*)$")
_LETTERS = re.compile(r"^\s*[UDX_](?:\s+[UDX_])*\s*$")
_LINK = re.compile(r"Link (\d{1,4})")
_DOUBLE_BIT = re.compile(r"(\d{1,12})\s+volatile double-bit|double-bit[^.]{0,60}?:\s*(\d{1,12})", re.I)
_SYSTEMS = {
    1: "PCIe",
    2: "NVLink",
    4: "PMU",
    8: "MCU",
    16: "memory",
    32: "SM",
    64: "InfoROM",
    128: "thermal",
    256: "power",
    512: "driver",
    1024: "NVSwitch, not fatal",
    2048: "NVSwitch, fatal",
}
_HEALTH = {0: "pass", 10: "warn", 20: "fail"}  # an enum, no percentage
_GPU_GROUP = 1  # DCGM_FE_GPU
_MAX = 10_000  # results of one output


class DcgmiError(ValueError):
    """The text is no output of dcgmi that is known here; the message says what it lacks."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What one test said of one device; `gpu` None: of the node.

    Attributes:
        links: links that the result is about, by number.
        severity: DCGM's own number, where it gives one.
    """

    test: str
    status: Status
    category: str = ""
    gpu: int | None = None
    detail: str = ""
    error_id: int | None = None
    severity: int | None = None
    links: tuple[int, ...] = ()


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One output as read; `told` holds what it says of itself (versions, counts)."""

    kind: Kind
    results: tuple[Result, ...] = ()
    told: dict[str, Any] = {}

    @property
    def failed(self) -> tuple[Result, ...]:
        """Every result that is a failure."""
        return tuple(one for one in self.results if one.status == "fail")


def is_output(text: str) -> bool:
    """Return whether a text looks like one of these outputs."""
    return any(
        word in text
        for word in (
            "DCGM GPU Diagnostic",
            "DCGM Diagnostic",
            "| Diagnostic ",
            "NvLink Link Status",
            "NVLINK Error Counts",
            "overall_health",
            "gpuId ",
        )
    ) or bool(_table(text))


def read(text: str) -> Report:
    """Read one output, whichever it is.

    Raises:
        DcgmiError: it is none of them, or holds no result.
    """
    document = _document(text)
    if document is not None:
        if any(name in document for name in ("DCGM GPU Diagnostic", "DCGM Diagnostic")):
            return _diag(document)
        if "overall_health" in document or "incidents" in document:
            return _health(document)
        if isinstance(document.get("body"), dict):
            return _link_errors(document)
        raise DcgmiError(
            f"JSON with {', '.join(sorted(map(str, document))[:6]) or 'no key'}: none of dcgmi's"
        )
    links = _link_status(text)
    if links:
        return Report(kind="nvlink", results=tuple(links))
    found, told = _read_table(text)
    if not found:
        raise DcgmiError("neither dcgmi's JSON, nor its table of tests, nor its list of links")
    return Report(kind="diag", results=tuple(found), told=told)


def _document(text: str) -> dict[str, Any] | None:
    """Return the JSON object in a text; warnings may stand before it."""
    start = text.find("{")
    if start < 0:
        return None
    try:
        document, _ = json.JSONDecoder().raw_decode(text[start:])
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


# --- diag as JSON


def _diag(document: Mapping[str, Any]) -> Report:
    root = document.get("DCGM GPU Diagnostic", document.get("DCGM Diagnostic"))
    root = root if isinstance(root, dict) else {}
    results: list[Result] = []
    for category in _dicts(root.get("test_categories")):
        for test in _dicts(category.get("tests")):
            results += _of_test(_text(category.get("category")), test)
    for error in _texts([root.get("runtime_error"), document.get("runtime_error")]):
        results.append(Result(test="run", status="fail", detail=error))
    if not results:
        raise DcgmiError("the diagnostic holds no test: it did not run")
    told = {
        name: _text(value)
        for source in (root, root.get("metadata"), document.get("metadata"))
        if isinstance(source, dict)
        for name, value in source.items()
        if isinstance(value, str | int | float) and name != "runtime_error"
    }
    return Report(kind="diag", results=tuple(results[:_MAX]), told=dict(list(told.items())[:20]))


def _of_test(category: str, test: Mapping[str, Any]) -> Iterator[Result]:
    name, entities = _text(test.get("name")) or "unnamed", 0
    for one in _dicts(test.get("results")):
        status = _status(one.get("status"))
        if status is None:
            continue
        entities += 1
        warnings = one.get("warnings", one.get("info"))
        detail = "; ".join(_texts(warnings if isinstance(warnings, list) else [warnings]))
        first = next(iter(_dicts(warnings)), {})
        for gpu in _gpus(one):
            yield Result(
                test=name,
                category=category,
                status=status,
                gpu=gpu,
                detail=detail[:500],
                error_id=_whole(first.get("error_id")),
                severity=_whole(first.get("error_severity")),
            )
    summary = test.get("test_summary")
    said = _status(summary.get("status")) if isinstance(summary, dict) else None
    if said is not None and not entities:
        yield Result(test=name, category=category, status=said)


def _gpus(result: Mapping[str, Any]) -> list[int | None]:
    if "entity_id" in result:
        group = _text(result.get("entity_group"))
        return [_whole(result.get("entity_id")) if group.upper() in ("GPU", "1", "") else None]
    listed = re.findall(r"\d{1,4}", _text(result.get("gpu_ids")))
    return [int(one) for one in listed[:64]] or [None]


# --- diag as a table


def _table(text: str) -> list[tuple[str, str]]:
    """Return (name, cell) of every row, and ("=", category) of every heading."""
    rows: list[tuple[str, str]] = []
    for line in text.splitlines():
        heading = _CATEGORY.match(line.strip())
        if heading is not None:
            rows.append(("=", heading[1].strip()))
            continue
        cells = _CELL.match(line.rstrip())
        if cells is None or set(line.strip()) <= set("|+-= "):
            continue
        # One blank stands before a cell; what stands behind it is kept, since a cut may fall on a blank.
        rows.append((cells[1].strip(), cells[2].removeprefix(" ")))
    return rows


def _read_table(text: str) -> tuple[list[Result], dict[str, Any]]:
    rows = _table(text)
    width = max((len(cell.rstrip()) for _, cell in rows), default=0)
    results: list[Result] = []
    told: dict[str, Any] = {}
    category = test = ""
    note: list[Any] | None = None  # [gpu, text so far, its last chunk]
    overall: Status | None = None

    def end() -> None:
        nonlocal note, overall
        if overall is not None:  # a test that says nothing of single devices
            results.append(Result(test=test, category=category, status=overall))
        overall = None
        _attach(results, test, note)
        note = None

    for name, cell in rows[:_MAX]:
        if name == "=":
            end()
            category, test = cell, ""
            continue
        value = cell.rstrip()
        of_gpus, of_gpu = _OF_GPUS.match(value), _OF_GPU.match(value)
        if name and not _NOTE.match(name):
            end()
            test = name
            if of_gpus is None and _STATUS.fullmatch(value):
                overall = _status(value)
            elif of_gpus is None and category.lower().startswith("metadata"):
                told[name[:60]] = value[:200]
        if test and (of_gpus is not None or of_gpu is not None):
            _attach(results, test, note)
            note, overall = None, None
            results += _rows_of(test, category, of_gpus, of_gpu)
        elif name and (named := _NOTE.match(name)) is not None:
            _attach(results, test, note)
            note = [int(named[1]) if named[1] else None, "", cell]
        elif not name and note is not None:
            note = [note[0], note[1] + note[2][:width].ljust(width), cell]
    end()
    return results, told


def _rows_of(test: str, category: str, of_gpus: Any, of_gpu: Any) -> list[Result]:
    word = of_gpus[1] if of_gpus is not None else of_gpu[2]
    status = _status(word)
    assert status is not None
    listed = re.findall(r"\d{1,4}", (of_gpus[2] or "") if of_gpus is not None else of_gpu[1])
    gpus: list[int | None] = [int(one) for one in listed[:64]] or [None]
    return [Result(test=test, category=category, status=status, gpu=gpu) for gpu in gpus]


def _attach(results: list[Result], test: str, note: list[Any] | None) -> None:
    """Give a note to the result that it explains: of its GPU, else of what failed, else of the test's
    last."""
    if note is None:
        return
    text = (note[1] + note[2]).strip()
    mine = [at for at, one in enumerate(results) if one.test == test]
    chosen = [at for at in mine if note[0] is not None and results[at].gpu == note[0]]
    chosen = chosen or [at for at in mine if results[at].status in ("fail", "warn")] or mine[-1:]
    for at in chosen:
        joined = "; ".join(one for one in (results[at].detail, text) if one)
        results[at] = msgspec.structs.replace(results[at], detail=joined[:1_000])


# --- links and health


def _link_status(text: str) -> list[Result]:
    """Read `nvlink -s`: a device's number stands over its letters, or before them; a link is a place among
    them."""
    results: list[Result] = []
    device: tuple[str, int] | None = None
    for line in text.splitlines():
        named = _GPU_ID.match(line)
        letters = ""
        if named is not None:
            device, letters = (named[1], int(named[2])), named[3]
        elif _LETTERS.match(line):
            letters = line
        states = letters.split()
        if device is None or not states or len(results) >= _MAX:
            continue
        down = tuple(at for at, one in enumerate(states) if one == "D")
        off = tuple(at for at, one in enumerate(states) if one == "X")
        is_gpu = device[0] == "gpuId"
        name = "NVLink" if is_gpu else f"NVLink of switch {device[1]}"
        words = [f"link {_list(down)} down" if down else "", f"link {_list(off)} disabled" if off else ""]
        results.append(
            Result(
                test=name,
                # Disabled links may be by design, as on boards with fewer of them.
                status="fail" if down else "pass",
                gpu=device[1] if is_gpu else None,
                detail=", ".join(word for word in words if word),
                links=down,
            )
        )
        device = None
    return results


def _list(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


def _link_errors(document: Mapping[str, Any]) -> Report:
    header = " ".join(_texts(document.get("header")))
    named = re.search(r"GPU (\d{1,4})", header)
    results = []
    total = 0
    for link, told in list(document["body"].items())[:_MAX]:
        number = _LINK.fullmatch(_text(link))
        children = told.get("children") if isinstance(told, dict) else None
        if number is None or not isinstance(children, dict):
            continue
        counts = {
            _text(name): value
            for name, child in children.items()
            if isinstance(child, dict) and (value := _whole(child.get("value"))) is not None
        }
        total += sum(counts.values())
        grown = ", ".join(f"{name} {value}" for name, value in counts.items() if value)
        results.append(
            Result(
                test="NVLink errors",
                # A count since the driver was loaded: how fast it grows would tell.
                status="warn" if grown else "pass",
                gpu=int(named[1]) if named else None,
                detail=grown[:300],
                links=(int(number[1]),),
            )
        )
    if not results:
        raise DcgmiError("the body names no link")
    return Report(kind="nvlink errors", results=tuple(results), told={"nvlink_errors": total})


def _health(document: Mapping[str, Any]) -> Report:
    results = []
    for one in _dicts(document.get("incidents")):
        code = _whole(one.get("health"))
        error = one.get("error")
        said = _text(one.get("error_message") or (error.get("msg") if isinstance(error, dict) else error))
        system = _whole(one.get("system")) or 0
        gpu = _whole(one.get("entity_id")) if one.get("entity_group_id") in (_GPU_GROUP, None) else None
        results.append(
            Result(
                test=_SYSTEMS.get(system, f"system {system}"),
                status=_HEALTH.get(code if code is not None else -1, "warn"),  # type: ignore[arg-type]
                gpu=gpu,
                detail=said[:500],
                error_id=_whole(one.get("error_code")),
            )
        )
    overall = _HEALTH.get(_whole(document.get("overall_health")) or 0, "warn")
    if not results:
        results.append(Result(test="health", status=overall))  # type: ignore[arg-type]
    return Report(kind="health", results=tuple(results[:_MAX]), told={"overall": overall})


# --- as events


def events(report: Report) -> list[dict[str, Any]]:
    """Return a report as events: a diagnosis is a `preflight.report`; links that are down and damaged
    memory are what they are, also outside a preflight."""
    failed, found = report.failed, []
    if report.kind in ("diag", "nvlink"):
        warned = [one for one in report.results if one.status == "warn"]
        data: dict[str, Any] = {
            "check": "diagnostics" if report.kind == "diag" else "links",
            "tool": f"dcgmi {report.kind}",
            "verdict": "fail" if failed else "pass",
            "detail": "; ".join(map(words, [*failed, *warned][:8]))[:1_000],
            "failed": [_row(one) for one in failed[:64]],
            "warned": [_row(one) for one in warned[:64]],
            "told": report.told,
        }
        data |= {"tests": len({one.test for one in report.results})}
        found.append(
            {"type": "preflight.report", "data": {k: v for k, v in data.items() if v not in ([], "", {})}}
        )
    for one in failed if report.kind in ("nvlink", "health") else ():
        who = {} if one.gpu is None else {"gpu": one.gpu}
        damaged = _DOUBLE_BIT.search(one.detail)
        if one.test.startswith("NVLink"):
            data = {"state": "down", "links": list(one.links), "detail": words(one)}
            found.append({"type": "hardware.link", "data": {**who, **data}})
        elif one.test == "memory" and damaged is not None:
            data = {"uncorrected": int(damaged[1] or damaged[2]), "detail": one.detail}
            found.append({"type": "hardware.ecc", "data": {**who, **data}})
        else:
            data = {"state": "health_fail", "reason": words(one)}
            found.append({"type": "node.state", "data": {**who, **data}})
    if report.kind == "nvlink errors":
        rows = [_row(one) for one in report.results if one.status == "warn"]
        data = {"state": "sampled", "nvlink_errors": report.told["nvlink_errors"], "links": rows[:64]}
        found.append({"type": "node.state", "data": data})
    return found


def words(result: Result) -> str:
    """Return a result in a few words."""
    where = "" if result.gpu is None else f" on GPU {result.gpu}"
    return f"{result.test}{where}: {result.detail or result.status}"


def _row(result: Result) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(result)
    plain["links"] = list(result.links)
    return {name: value for name, value in plain.items() if value not in (None, "", [])}


# --- narrow values


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)][:_MAX] if isinstance(value, list) else []


def _texts(values: Any) -> list[str]:
    found = []
    for one in values if isinstance(values, list) else []:
        text = _text(one.get("warning", one.get("info")) if isinstance(one, dict) else one).strip()
        if text:
            found.append(text[:500])
    return found


def _text(value: Any) -> str:
    return str(value)[:500] if isinstance(value, str | int | float) and not isinstance(value, bool) else ""


def _whole(value: Any) -> int | None:
    if isinstance(value, str) and re.fullmatch(r"\d{1,15}", value, re.A):
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53 else None


def _status(value: Any) -> Status | None:
    found = _STATUS.fullmatch(_text(value).strip())
    return found[1].lower() if found is not None else None  # type: ignore[return-value]
