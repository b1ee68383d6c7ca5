"""A postmortem as Markdown (CommonMark with tables)."""

import base64
import re

from andon.postmortem.document import (
    Actions,
    Cited,
    Commands,
    Document,
    Figure,
    Group,
    Item,
    Prose,
    Sentence,
    Table,
)

# Everything that could begin markup is escaped; a line's first character may be a number or a plus, too.
_MARKUP = re.compile(r"([\\`*_{}\[\]<>#|~&!])")
_AT_START = re.compile(r"^(\s*)([-+=]|\d+[.)])", re.M)


def render(document: Document) -> str:
    """Return the Markdown text, ending in a newline."""
    lines = [f"# {escape(document.title)}", ""]
    version = document.version
    lines += [f"**{escape(version.says)}**" if version.says else f"Final, version {version.number}", ""]
    lines += _meta(document)
    lines += _table(document.head)
    for number, section in enumerate(document.sections, start=1):
        lines += ["", f"## {number}. {escape(section.title)}"]
        for item in section.items:
            lines += ["", *_item(item)]
        if not section.items:
            lines += ["", "*Not written yet.*"]
    lines += ["", "## Appendix: every cited row"]
    for row in document.appendix:
        lines += ["", *_cited(row)]
    figures = [item for section in document.sections for item in section.items if isinstance(item, Figure)]
    if figures:
        lines.append("")
    for figure in figures:
        body = base64.b64encode(figure.svg.encode()).decode()
        lines.append(f"[figure-{figure.key}]: data:image/svg+xml;base64,{body}")
    return "\n".join(lines) + "\n"


def escape(text: str) -> str:
    """Return text that CommonMark shows as it is, on one line."""
    flat = " ".join(text.split()) if "\n" in text or "\r" in text else text
    return _AT_START.sub(_escape_start, _MARKUP.sub(r"\\\1", flat))


def _escape_start(match: re.Match[str]) -> str:
    mark = match[2]
    return f"{match[1]}{mark[:-1]}\\{mark[-1]}"


def _meta(document: Document) -> list[str]:
    version = document.version
    told = [f"Digest of inputs: `{document.digest}`"]
    if version.at:
        told.append(f"Made final: {escape(version.at)}")
    if version.authors:
        told.append(f"Written by: {escape(', '.join(version.authors))}")
    if version.reviewers:
        told.append(f"Reviewed by: {escape(', '.join(version.reviewers))}")
    return [*(f"- {line}" for line in told), ""]


def _ids(ids: tuple[str, ...]) -> str:
    return " ".join(f"[\\[{one}\\]](#{one.lower()})" for one in ids)


def _fact(sentence: Sentence) -> str:
    return f"{escape(sentence.text)} {_ids(sentence.ids)}"


def _item(item: Item) -> list[str]:
    match item:
        case Sentence():
            return [_fact(item)]
        case Table():
            return _table(item)
        case Group():
            body = [f"**{escape(item.title)}**", "", *(f"- {_fact(fact)}" for fact in item.facts)]
            return ["---", "", *body, "", "---"] if item.mark else body
        case Prose():
            return _prose(item)
        case Actions():
            return _actions(item)
        case Figure():
            picture = f"![{escape(item.title)}][figure-{item.key}]"
            return [picture, "", f"*{escape(item.title)}.* {_fact(item.caption)}", "", *_code(item.data)]
        case Commands():
            return [_fact(item.says), "", *_code("\n".join(item.lines))]


def _table(table: Table) -> list[str]:
    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(escape(cell) or " " for cell in cells) + " | "

    head = line(table.head) + "from |"
    rule = "|" + "---|" * (len(table.head) + 1)
    return [head, rule, *(f"{line(row.cells)}{_ids(row.ids)} |" for row in table.rows)]


def _prose(prose: Prose) -> list[str]:
    body = [f"> {escape(line)}".rstrip() for line in prose.text.splitlines()]
    return [*body, ">", f"> {escape(prose.by)}, {escape(prose.at)}"]


def _actions(actions: Actions) -> list[str]:
    head = ["| what | owner | due | ticket |", "|---|---|---|---|"]
    rows = [
        "| " + " | ".join(escape(cell) or " " for cell in (one.what, one.owner, one.due, one.ticket)) + " |"
        for one in actions.rows
    ]
    return [*head, *rows, "", f"> {escape(actions.by)}, {escape(actions.at)}"]


def _code(text: str) -> list[str]:
    """Return a fenced block that its content cannot close."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [fence, *text.splitlines(), fence]


def _cited(row: Cited) -> list[str]:
    fields = [f"- {escape(name)}: {escape(value)}" for name, value in row.fields]
    # An address of its own, because headings with brackets have none that all readers agree on.
    return [f'### <a id="{row.id.lower()}"></a>{row.id} {escape(row.what)}', "", *fields]
