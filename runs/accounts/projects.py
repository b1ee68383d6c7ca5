"""A project's own pages of accounts: its people, hook tokens, webhook secrets, and the log of all that."""

from collections.abc import Callable

from django.conf import settings
from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_http_methods

from andon.readers.hooks import SOURCES
from runs import proof
from runs.access import project_member
from runs.accounts import audit, invitations, members, run_secrets, tokens
from runs.accounts.refused import Refused
from runs.errors import forbidden
from runs.models import Person, Project, Role, Run, RunSecret
from runs.views import person_of, visible_run_or_404

LOG_PAGE = 100


def _project_or_404(request: HttpRequest, slug: str) -> Project:
    """Return a project the person belongs to; any other answers 404, like one that does not exist."""
    found = Project.objects.filter(slug=slug, memberships__person=person_of(request)).first()
    if found is None:
        raise Http404
    return found


def _is_admin(request: HttpRequest, project: Project) -> bool:
    return project_member(person_of(request), project, Role.ADMIN)


def _done(request: HttpRequest, do: Callable[[], str | None]) -> tuple[str, str, int]:
    """Do what was posted, given a proof; returns what is shown once, or a refusal, with a status."""
    try:
        proof.prove_recently(request, person_of(request))
        return do() or "", "", 200
    except (Refused, proof.NotAgain) as refused:
        return "", refused.says, refused.status


def _not_admin(request: HttpRequest, project: Project) -> HttpResponse:
    admins = ", ".join(one.person.username for one in members.of(project) if Role.ADMIN in one.roles)
    who = f"{admins} may." if admins else "Nobody has this role yet: the operator can give it."
    return forbidden(request, PermissionError(f"Only an admin of {project.name or project.slug} may. {who}"))


@never_cache
@require_http_methods(["GET", "POST"])
@login_required
def people(request: HttpRequest, project: str) -> HttpResponse:
    """Show who holds which role; its admins change roles, add people, invite them."""
    found = _project_or_404(request, project)
    shown, says, status = "", "", 200
    if request.method == "POST":
        if not _is_admin(request, found):
            return _not_admin(request, found)
        shown, says, status = _done(request, lambda: _change(request, found))
        if not shown and not says:
            return redirect("people", project)
    member_of = members.of(found)
    waiting = invitations.waiting(found) if _is_admin(request, found) else []
    context = {
        "project": found,
        "members": member_of,
        "invited": {one.person_id for one in waiting},
        "waiting": waiting,
        "roles": [(role.value, members.WORDS[role.value]) for role in Role],
        "about": ROLES,
        "by_groups": sorted(settings.SSO_ROLES.get(found.slug, {})),
        "admin": _is_admin(request, found),
        "shown": shown,
        "says": says,
        "given": request.POST,
        "chosen": request.POST.getlist("role"),
    }
    return render(request, "accounts/people.html", context, status=status)


ROLES = {
    "viewer": "sees everything of the project",
    "responder": "acknowledges, plans, asks to resume, waives evidence",
    "approver": "approves what another asked for",
    "vault officer": "keeps longer, agrees to release and deletion",
    "admin": "gives roles, tokens, secrets; approves nothing by it",
}


def _change(request: HttpRequest, project: Project) -> str | None:
    """Do what the form says; returns an address to show once."""
    post, by, do = request.POST, person_of(request), request.POST.get("do", "")
    roles = post.getlist("role")
    if do == "add":
        members.add(project=project, by=by, username=post.get("name", ""), roles=roles, request=request)
    elif do == "invite":
        _, address = invitations.invite(
            project=project, by=by, username=post.get("name", ""), roles=roles, request=request
        )
        return address
    elif do == "withdraw":
        row = next((i for i in invitations.waiting(project) if str(i.pk) == post.get("invitation")), None)
        if row is None:
            raise Refused("over", "This invitation is over already.")
        invitations.withdraw(invitation=row, by=by, request=request)
    else:
        person = _person(project, post.get("person", ""))
        if do == "roles":
            members.set_roles(project=project, by=by, person=person, roles=roles, request=request)
        elif do == "remove":
            members.remove(project=project, by=by, person=person, request=request)
        else:
            raise Refused("nothing", "Nothing was chosen.")
    return None


def _person(project: Project, text: str) -> Person:
    found = Person.objects.filter(pk=tokens.number(text), memberships__project=project).first()
    if found is None:
        raise Refused("not-a-member", "That person is not a member any more.")
    return found


@never_cache
@require_http_methods(["GET", "POST"])
@login_required
def hook_tokens(request: HttpRequest, project: str) -> HttpResponse:
    """List the tokens by which the fleet's own tools post; make one, shown this once; revoke one."""
    found = _project_or_404(request, project)
    if not _is_admin(request, found):
        return _not_admin(request, found)
    shown, says, status = "", "", 200
    post, person = request.POST, person_of(request)

    def revoke() -> None:
        tokens.revoke_hook(project=found, person=person, token_id=post.get("token", ""), request=request)

    def make() -> str:
        return tokens.make_hook(
            project=found,
            person=person,
            name=post.get("name", ""),
            source=post.get("source", ""),
            days=post.get("days", ""),
            request=request,
        )

    if request.method == "POST":
        shown, says, status = _done(request, revoke if post.get("do") == "revoke" else make)
        if not shown and not says:
            return redirect("hook_tokens", project)
    context = {
        "project": found,
        "tokens": tokens.of_hooks(found),
        "sources": sorted(SOURCES),
        "source": post.get("source", ""),
        "shown": shown,
        "says": says,
        "given": post,
        "url": settings.PUBLIC_URL,
    }
    return render(request, "accounts/hook_tokens.html", context, status=status)


@never_cache
@require_GET
@login_required
def secrets(request: HttpRequest, project: str) -> HttpResponse:
    """List the webhook secrets of a project's runs: how old, until when, last used."""
    found = _project_or_404(request, project)
    if not _is_admin(request, found):
        return _not_admin(request, found)
    context = {"project": found, "runs": run_secrets.of_project(found)}
    return render(request, "accounts/secrets.html", context)


@never_cache
@require_http_methods(["GET", "POST"])
@login_required
def run_secret(request: HttpRequest, slug: str) -> HttpResponse:
    """Show the webhook secrets of one run; rotate, or let an older one sign no more."""
    run: Run = visible_run_or_404(request, slug)
    if not _is_admin(request, run.project):
        return _not_admin(request, run.project)
    shown, says, status = "", "", 200
    post, person = request.POST, person_of(request)

    def withdraw() -> None:
        run_secrets.withdraw(run=run, person=person, secret_id=post.get("secret", ""), request=request)

    def rotate() -> str:
        return run_secrets.rotate(run=run, person=person, hours=post.get("hours", ""), request=request)

    if request.method == "POST":
        shown, says, status = _done(request, withdraw if post.get("do") == "withdraw" else rotate)
        if not shown and not says:
            return redirect("run_secret", slug)
    live: list[RunSecret] = run_secrets.of(run)
    context = {
        "run": run,
        "secrets": live,
        "overlaps": list(run_secrets.OVERLAPS.items()),
        "shown": shown,
        "says": says,
        "hours": post.get("hours", "24"),
    }
    return render(request, "accounts/run_secret.html", context, status=status)


@never_cache
@require_GET
@login_required
def log(request: HttpRequest, project: str) -> HttpResponse:
    """Show the log of accounts to a project's admins, newest first."""
    found = _project_or_404(request, project)
    if not _is_admin(request, found):
        return _not_admin(request, found)
    rows = audit.of_project(found)
    kind = request.GET.get("kind", "")
    if kind in audit.K.values:
        rows = rows.filter(kind=kind)
    if before := tokens.number(request.GET.get("before", "")):
        rows = rows.filter(pk__lt=before)
    events = list(rows[: LOG_PAGE + 1])
    context = {
        "project": found,
        "events": events[:LOG_PAGE],
        "people": audit.names(events),
        "kinds": audit.K.values,
        "kind": kind,
        "older": events[LOG_PAGE - 1].pk if len(events) > LOG_PAGE else None,
    }
    return render(request, "accounts/log.html", context)
