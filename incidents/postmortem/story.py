"""Hypotheses, cause, recovery, regime, evidence: what was thought, done and kept."""

from andon.diagnose.board import Line
from andon.postmortem.document import Commands, Group, Item, Row, Sentence, Table
from evidence.models import Item as Kept
from evidence.models import Seal, StoredObject
from incidents import board
from incidents.board import FamilyView
from incidents.models import Incident, Plan, Probe, ResumeRequest
from incidents.postmortem.book import Book, Source
from incidents.postmortem.facts import Facts
from incidents.postmortem.words import plain, stamp, who, who_by_id
from runs import formatting

_OBJECTS = 3  # files of one item in the table; the bag's manifest has them all
_ITEMS = 200


def hypotheses(book: Book, facts: Facts) -> list[Item]:
    """Return every family with what spoke for and against it, and its probes; what nobody tried, too."""
    probes: dict[str, list[Probe]] = {}
    for probe in facts.probes:
        probes.setdefault(probe.family, []).append(probe)
    return [_family(book, facts.incident, row, probes.get(row.family, [])) for row in facts.board.rows]


def _family(book: Book, incident: Incident, row: FamilyView, probes: list[Probe]) -> Group:
    # A probe decided, else the first line that speaks, else nothing does.
    lines = [*row.supports, *row.contradicts]
    source: Source = row.by or (lines[0].id if lines else incident)
    said = [book.say(f"{row.standing.capitalize()}: {plain(row.why)}.", source)]
    said += [_line(book, "For", line) for line in row.supports]
    said += [_line(book, "Against", line) for line in row.contradicts]
    said += [_probe(book, probe) for probe in probes]
    if not any(probe.result for probe in probes):
        said.append(book.say("No probe of it was brought to a result.", incident))
    return Group(row.family.capitalize(), tuple(said))


def _line(book: Book, side: str, line: Line) -> Sentence:
    more = f", and {line.more:,} alike" if line.more else ""
    return book.say(f"{side}: {plain(line.text)}{more}; {line.because}.", line.id)


def _probe(book: Book, probe: Probe) -> Sentence:
    known = board.known(probe)
    only = f"only the {plain(probe.condition, 120)} differed" if probe.condition else "it only read"
    head = f"Probe by {who(probe.owner)}: {plain(probe.name, 300)} ({only})"
    if probe.state != Probe.State.DONE:
        return book.say(
            f"{head}; {'running' if probe.state == 'running' else 'stopped without a result'}.", probe
        )
    result = known.result(probe.result)
    note = f" {plain(probe.note)}" if probe.note else ""
    words = result.words if result else probe.result
    return book.say(f"{head}; {words}, recorded by {who(probe.recorded_by)}.{note}", probe)


def cause(book: Book, facts: Facts) -> list[Item]:
    """Return what the cause was closed as, and by which rows it is carried."""
    closed = facts.cause
    if closed is None:
        return [
            book.say("The cause is open: nobody has closed it as known, probable or unknown.", facts.incident)
        ]
    certainty = str(closed.data.get("certainty"))
    by = f"closed by {who(closed.person)} at {stamp(closed.at)}"
    if certainty == "unknown":
        return [book.say(f"Cause unknown, {by}: {plain(closed.text)}", closed)]
    carried = [str(one) for one in closed.data.get("ids") or []]
    text = f"Cause {certainty}: {closed.family}, {by}: {plain(closed.text)}"
    return [book.say(text, closed, *carried)]


def recovery(book: Book, facts: Facts) -> list[Item]:
    """Return how the run went on: plan, loader, skip, permit, who asked and who approved, what was waived."""
    incident, done = facts.incident, facts.carried_out
    items: list[Item] = []
    if done is None:
        over = incident.state in (Incident.State.RESOLVED, Incident.State.FALSE_ALARM)
        text = "The incident ended without a resume." if over else "The run has not been resumed yet."
        items.append(book.say(text, incident))
    else:
        permit, request, plan = done
        items.append(
            book.say(f"Plan {plan.number}: {plan.get_kind_display()}. {plain(plan.why)}".rstrip(), plan)
        )
        items.append(book.say(_from(plan), plan))
        items += [book.say(text, row) for text, row in _moved(facts)]
        items.append(book.say(_asked(request), request))
        for approval in facts.approvals:
            if approval.request_id == request.pk:
                at = f"{who(approval.approver)} approved at {stamp(approval.at)}"
                items.append(book.say(f"{at}, signing digest {approval.digest}.", approval))
        text = (
            f"Permit {permit.public_id} was issued at {stamp(permit.issued_at)} for attempt {permit.attempt}"
        )
        items.append(book.say(f"{text} and taken at {stamp(permit.exchanged_at)}.", permit))
    items += [_waived(book, item) for item in facts.items if item.waived_at is not None]
    rejected = [one for one in facts.requests if one.state in ("rejected", "voided", "expired")]
    for one in rejected:
        why = "; ".join(plain(reason, 200) for reason in one.ended_why) or "no reason was written"
        text = f"The request of {who(one.requested_by)} at {stamp(one.requested_at)} was {one.state}: {why}."
        items.append(book.say(text, one))
    return items


def _asked(request: ResumeRequest) -> str:
    """Return how the resume was asked for; what one person did alone stands out."""
    by, at, kinds = who(request.requested_by), stamp(request.requested_at), ResumeRequest.Kind
    signing = f"signing digest {request.digest}"
    if request.kind == kinds.BREAK_GLASS:
        return (
            f"BREAK-GLASS: {by} resumed the run alone at {at}, without a second person and without waiting "
            f"for evidence, {signing}. Reason: {plain(request.note)}"
        )
    if request.kind == kinds.SOLO:
        return f"{by} resumed as sole approver on duty, asking at {at}, {signing}; nobody rejected it."
    if request.kind == kinds.STANDING:
        return f"{plain(request.note).capitalize()}, allowed the resume at {at}, {signing}."
    if request.kind == kinds.FALSE_ALARM:
        return f"Declared a false alarm at {at}, {signing}. Reason: {plain(request.note)}"
    return f"{by} asked at {at}, {signing}."


def _from(plan: Plan) -> str:
    if not plan.checkpoint:
        return "No checkpoint was loaded: the ranks went on from memory."
    at = f"the checkpoint of step {formatting.count(plan.checkpoint['step'])}"
    digest = plan.checkpoint.get("digest")
    return f"It began from {at}" + (f", digest {plain(digest, 64)}." if digest else ".")


def _moved(facts: Facts) -> list[tuple[str, Source]]:
    said: list[tuple[str, Source]] = []
    for row in facts.ledger:
        before, after = ((row.before or {}), (row.after or {}))
        old, new = before.get("loader_position"), after.get("loader_position")
        if row.action in ("rollback", "skip", "resume") and old is not None and new is not None:
            text = f"{row.action.capitalize()}: loader {formatting.count(old)} → {formatting.count(new)}"
            if row.samples_skipped is not None:
                text += f", {formatting.count(row.samples_skipped)} samples skipped"
            said.append((f"{text}, decided by {who_by_id(row.decided_by)}.", row))
    return said


def _waived(book: Book, item: Kept) -> Sentence:
    by = who_by_id(item.waived_by)
    return book.say(f"{by} waived “{plain(item.name, 200)}”: {plain(item.waived_why)}.", item)


def regime(book: Book, facts: Facts) -> list[Item]:
    """Return declared changes of the training regime, or that results stay comparable."""
    plan = facts.carried_out[2] if facts.carried_out else (facts.plans[-1] if facts.plans else None)
    if plan is None:
        return [book.say("None: nothing was changed, results stay comparable.", facts.incident)]
    if not plan.changes:
        return [book.say("None: results stay comparable.", plan)]
    items: list[Item] = []
    for change in plan.changes:
        says = (
            f"{plain(change['what'], 200)}: {plain(change.get('was'), 100)} → {plain(change.get('to'), 100)}"
        )
        regime_words = "changes the regime: not comparable" if change["changes_regime"] else "same regime"
        items.append(book.say(f"{says} ({regime_words}).", plan))
    return items


def evidence(book: Book, facts: Facts) -> list[Item]:
    """Return what was kept, where it lies and until when, and how a stranger checks it."""
    objects: dict[int, list[StoredObject]] = {}
    found = StoredObject.objects.filter(item__in=facts.items).order_by("item_id", "path")
    for one in found.iterator(chunk_size=2_000):
        kept = objects.setdefault(one.item_id, [])
        if len(kept) <= _OBJECTS:
            kept.append(one)
    rows: list[Row] = []
    for item in facts.items[:_ITEMS]:
        rows += _kept(book, item, objects.get(item.pk, []))
    items: list[Item] = []
    if rows:
        items.append(
            Table(("Item", "State", "Object", "Version", "SHA-256", "Locked until", "Where"), tuple(rows))
        )
    else:
        items.append(book.say("Nothing was planned to be kept.", facts.incident))
    if len(facts.items) > _ITEMS:
        left = len(facts.items) - _ITEMS
        items.append(book.say(f"{left:,} further items stand in the bag's manifest.", facts.incident))
    return [*items, _check(book, facts)]


def _kept(book: Book, item: Kept, objects: list[StoredObject]) -> list[Row]:
    state = item.state.replace("_", " ")
    until = stamp(item.retain_until) if item.retain_until else ""
    name = plain(item.name, 200)
    if not objects:
        return [book.row((name, state, plain(item.why, 200), "", item.digest, until, ""), item)]
    rows = [
        book.row(
            (
                name,
                state,
                plain(one.path, 200),
                plain(one.version_id, 100),
                one.sha256,
                until,
                plain(one.key, 300),
            ),
            item,
        )
        for one in objects[:_OBJECTS]
    ]
    if len(objects) > _OBJECTS:
        rows.append(
            book.row((name, state, "further files: see the bag's manifest", "", item.digest, until, ""), item)
        )
    return rows


def _check(book: Book, facts: Facts) -> Commands:
    incident = facts.incident
    seal = Seal.objects.filter(dossier=incident.dossier).order_by("-number").first()
    key = f" --key {seal.key_id}" if seal else ""
    lines = (
        f"python manage.py export_bag {incident.pk} incident-{incident.pk}.zip",
        f"andon verify incident-{incident.pk}.zip{key}",
    )
    if seal is None:
        return Commands(
            book.say("Nothing is sealed yet; a bag can be checked all the same.", incident), lines
        )
    text = f"The newest seal was made at {stamp(seal.made_at)} with the key {seal.key_id}. To check it:"
    return Commands(book.say(text, seal), lines)
