"""A postmortem as one HTML file: no script, nothing loaded, figures inside; prints on A4."""

import html as markup
from importlib import resources
from itertools import groupby

from andon.postmortem.document import (
    Action,
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

STYLE = (resources.files("andon.postmortem") / "style.css").read_text()
_LONG_WORD = 40  # characters
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def render(document: Document) -> str:
    """Return the whole file."""
    title = f"{document.title}: postmortem of incident {document.incident.removeprefix('I-')}"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{_text(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"{body(document)}</main>\n</body>\n</html>\n"
    )


def body(document: Document) -> str:
    """Return what stands inside `main`: the page and the file show the same."""
    version = document.version
    said = version.says or f"Final, version {version.number}"
    parts = [f"<h1>{_text(document.title)}</h1>\n"]
    parts.append(
        f'<p><span class="{"draft" if version.status == "draft" else "final"}">{_text(said)}</span></p>\n'
    )
    parts.append(_meta(document))
    parts.append(_table(document.head, "Head"))
    for number, section in enumerate(document.sections, start=1):
        parts.append(f'<section id="s-{_text(section.key)}">\n<h2>{number}. {_text(section.title)}</h2>\n')
        parts += [_item(item, section.title) for item in section.items]
        if not section.items:
            parts.append('<p class="todo">Not written yet.</p>\n')
        parts.append("</section>\n")
    parts.append('<section id="appendix">\n<h2>Appendix: every cited row</h2>\n')
    for _, rows in groupby(document.appendix, key=lambda row: row.id[0]):
        parts += [_cited(row) for row in rows]
    parts.append("</section>\n")
    return "".join(parts)


def _text(value: str) -> str:
    return markup.escape(value, quote=True)


def _meta(document: Document) -> str:
    version = document.version
    told = [("Digest of inputs", document.digest)]
    if version.at:
        told.append(("Made final", version.at))
    if version.authors:
        told.append(("Written by", ", ".join(version.authors)))
    if version.reviewers:
        told.append(("Reviewed by", ", ".join(version.reviewers)))
    lines = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in told)
    return f"<dl>{lines}</dl>\n"


def _ids(ids: tuple[str, ...]) -> str:
    return "".join(f'<a href="#{one}">[{one}]</a>' for one in ids)


def _fact(sentence: Sentence) -> str:
    ids = f'<span class="ids">{_ids(sentence.ids)}</span>'
    return f'<div class="fact"><p>{_text(sentence.text)}</p>{ids}</div>\n'


def _item(item: Item, where: str) -> str:
    match item:
        case Sentence():
            return _fact(item)
        case Table():
            return _table(item, f"{where}: {', '.join(filter(None, item.head)) or 'table'}")
        case Group():
            inner = f"<h3>{_text(item.title)}</h3>\n{''.join(map(_fact, item.facts))}"
            return f'<div class="mark">{inner}</div>\n' if item.mark else inner
        case Prose():
            return _prose(item)
        case Actions():
            return _actions(item)
        case Figure():
            return _figure(item)
        case Commands():
            lines = "\n".join(item.lines)
            return f"{_fact(item.says)}<pre {_scroll('Commands')}>{_text(lines)}</pre>\n"


def _figure(figure: Figure) -> str:
    title = _text(figure.title)
    return (
        f'<figure id="figure-{_text(figure.key)}">\n'
        f'<div class="scroll" {_scroll(figure.title)}>{figure.svg}</div>\n'
        f"<figcaption><b>{title}.</b>{_fact(figure.caption)}</figcaption>\n"
        f"<details><summary>Data of this figure</summary>"
        f"<pre {_scroll(f'Data of {figure.title}')}>{_text(figure.data)}</pre></details></figure>\n"
    )


def _scroll(name: str) -> str:
    """Return the attributes of what scrolls by itself: reached by keyboard, and named."""
    return f'tabindex="0" role="region" aria-label="{_text(name)}"'


def _table(table: Table, name: str) -> str:
    # Names with their values need no width of their own: they wrap on a phone.
    named = "" if any(table.head) else ' class="facts"'
    long = _long_columns(table)
    head = "".join(
        f"<th{_wide(n in long)}>{_text(cell)}</th>" for n, cell in enumerate((*table.head, "from"))
    )
    rows = "".join(
        f"<tr>{''.join(f'<td{_wide(n in long)}>{_text(cell)}</td>' for n, cell in enumerate(row.cells))}"
        f'<td class="ids">{_ids(row.ids)}</td></tr>\n'
        for row in table.rows
    )
    return (
        f'<div class="scroll" {_scroll(name)}><table{named}>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{rows}</tbody></table></div>\n"
    )


def _long_columns(table: Table) -> set[int]:
    """Return the columns of digests and addresses: without room of their own they are a few letters wide."""
    return {
        n
        for row in table.rows
        for n, cell in enumerate(row.cells)
        if any(len(word) > _LONG_WORD for word in cell.split())
    }


def _wide(long: bool) -> str:
    return ' class="long"' if long else ""


def _prose(prose: Prose) -> str:
    paragraphs = [part for part in prose.text.replace("\r\n", "\n").split("\n\n") if part.strip()]
    inner = "".join(f"<p>{_text(part.strip()).replace(chr(10), '<br>')}</p>" for part in paragraphs)
    return f'<div class="prose">{inner}{_by(prose.by, prose.at)}</div>\n'


def _by(name: str, at: str) -> str:
    return f'<p class="by">{_text(name)}, {_text(at)}</p>'


def _actions(actions: Actions) -> str:
    head = "".join(f"<th>{name}</th>" for name in ("what", "owner", "due", "ticket"))
    rows = "".join(map(_action, actions.rows))
    return (
        f'<div class="prose"><div class="scroll" {_scroll("Actions")}><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>{_by(actions.by, actions.at)}</div>\n"
    )


def _action(action: Action) -> str:
    cells = (action.what, action.owner, action.due, action.ticket)
    return f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in cells)}</tr>"


def _cited(row: Cited) -> str:
    fields = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in row.fields)
    return (
        f'<div class="cited" id="{_text(row.id)}"><h3>{_text(row.id)} {_text(row.what)}</h3>'
        f"<dl>{fields}</dl></div>\n"
    )
