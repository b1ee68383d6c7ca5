"""Mail: the one address a person confirmed, and the link by which they set a password they lost.

Nobody learns who is here: an address that nobody has gets the same answer after the same work. A worker
sends, so that a slow relay keeps no page waiting. Only who has a password may set a new one: to who signs in
by SSO or passkey alone, mail would be a way in that they never chose.
"""

import smtplib
from datetime import timedelta

from allauth.account.forms import UserTokenForm, default_token_generator
from allauth.account.models import EmailAddress, EmailConfirmationHMAC
from allauth.account.utils import user_pk_to_url_str
from allauth.core.internal import ratelimit
from django.conf import settings
from django.core.exceptions import ValidationError
from django.core.mail import send_mail
from django.core.validators import validate_email
from django.db import transaction
from django.http import HttpRequest
from django.utils import timezone
from django.utils.dateparse import parse_datetime

from runs import work
from runs.accounts import audit
from runs.accounts.address import client_address
from runs.accounts.invitations import set_password
from runs.accounts.refused import Refused
from runs.models import AccountEvent, Person

K = AccountEvent.Kind
LOST, CONFIRM = "lost_password", "confirm_mail"  # kinds of work
_LONGEST = 254
_MOST_PEOPLE = 20  # who share one mailbox
_NO_LINK = "This link was used already, or its hour is over."


def of(person: Person) -> EmailAddress | None:
    """Return the mail address that a person confirmed."""
    return EmailAddress.objects.filter(user=person, verified=True).order_by("-pk").first()


def ask_to_confirm(*, request: HttpRequest, person: Person, email: str) -> None:
    """Mail a link that makes an address this person's; until it is opened the one before stays.

    Raises:
        Refused: bad-address, too-many.
    """
    email = _address(email)
    if not _may_mail(request, email):
        raise Refused("too-many", "Several mails went there already: wait 15 minutes.", status=429)
    with transaction.atomic():
        EmailAddress.objects.filter(user=person, verified=False).delete()
        if EmailAddress.objects.filter(user=person, email=email, verified=True).exists():
            return
        made = EmailAddress.objects.create(user=person, email=email, verified=False)
        work.enqueue(kind=CONFIRM, key=str(made.pk), payload={"address": made.pk})


def waiting(*, person: Person, key: str) -> EmailAddress | None:
    """Return the address that a link would confirm; None for another's, an old one, and one used already."""
    found = EmailConfirmationHMAC.from_key(key)
    return found.email_address if found is not None and found.email_address.user_id == person.pk else None


def confirm(*, request: HttpRequest, person: Person, key: str) -> None:
    """Make an address this person's only one.

    Raises:
        Refused: over.
    """
    with transaction.atomic():
        found = waiting(person=person, key=key)
        if found is None:
            raise Refused("over", _NO_LINK, status=404)
        give(person, found.email)
        audit.note(K.MAIL_SET, request=request, by=person)


def give(person: Person, email: str) -> None:
    """Let an address be a person's, whoever has made sure of that.

    Raises:
        Refused: bad-address.
    """
    email = _address(email)
    with transaction.atomic():
        EmailAddress.objects.filter(user=person).delete()
        EmailAddress.objects.create(user=person, email=email, verified=True, primary=True)
        Person.objects.filter(pk=person.pk).update(email=email)


def take_away(*, request: HttpRequest, person: Person) -> None:
    """Forget a person's mail address: no link will be sent any more."""
    with transaction.atomic():
        gone, _ = EmailAddress.objects.filter(user=person).delete()
        Person.objects.filter(pk=person.pk).update(email="")
        if gone:
            audit.note(K.MAIL_REMOVED, request=request, by=person)


def ask_for_link(*, request: HttpRequest, email: str) -> None:
    """Have a link mailed to whoever confirmed this address. Says nothing about whether anybody did."""
    if not _may_mail(request, email):
        return
    found = Person.objects.filter(
        is_active=True, emailaddress__email__iexact=email.strip()[:_LONGEST], emailaddress__verified=True
    )
    ids = [one.pk for one in found.order_by("pk")[:_MOST_PEOPLE] if one.has_usable_password()]
    asked = {"from": client_address(request), "at": timezone.now().isoformat()}
    for pk in ids or [0]:  # the same to do for an address that nobody has
        work.enqueue(kind=LOST, key=str(pk), payload={"person": pk, **asked})


def owner_of_link(key: str) -> Person | None:
    """Return who may set a new password by this link."""
    uid, _, token = key.partition("-")
    form = UserTokenForm({"uidb36": uid, "key": token})
    person: Person | None = form.reset_user if form.is_valid() else None
    return person if person is not None and person.is_active and person.has_usable_password() else None


def set_new_password(*, request: HttpRequest, key: str, password: str) -> Person:
    """Set the password of a link's owner; the link, and every session of theirs, is over by that.

    Raises:
        Refused: over, weak-password.
    """
    with transaction.atomic():
        found = owner_of_link(key)
        if found is None:
            raise Refused("over", _NO_LINK, status=404)
        person = Person.objects.select_for_update(no_key=True).get(pk=found.pk)
        if not default_token_generator.check_token(person, key.partition("-")[2]):
            raise Refused("over", _NO_LINK, status=404)  # of two at once, the second
        set_password(person, password)
        audit.note(K.PASSWORD, request=request, about=person, method="a mailed link")
    return person


# What a worker does


@work.handler(LOST)
def _mail_link(payload: work.Payload, lease: work.Lease) -> None:
    person = Person.objects.filter(pk=int(str(payload["person"])), is_active=True).first()
    mail = of(person) if person is not None else None
    if person is None or mail is None or not person.has_usable_password():
        return
    asked = parse_datetime(str(payload["at"]))
    lasts = timedelta(seconds=settings.PASSWORD_RESET_TIMEOUT)
    if asked is None or timezone.now() - asked > lasts:
        raise work.GiveUp("asked for too long ago")
    key = f"{user_pk_to_url_str(person)}-{default_token_generator.make_token(person)}"
    _send(
        mail.email,
        "Andon: set a new password",
        f"Somebody asked for a new password for {person.username} at {settings.PUBLIC_URL}.\n\n"
        f"Set it within an hour, once:\n{settings.PUBLIC_URL}/sign-in/lost/{key}\n\n"
        "If it was not you, do nothing: your password stays as it is.\n",
    )
    audit.note(K.LINK_MAILED, about=person, address=str(payload["from"] or "") or None)


@work.handler(CONFIRM)
def _mail_confirmation(payload: work.Payload, lease: work.Lease) -> None:
    mail = (
        EmailAddress.objects.select_related("user")
        .filter(pk=int(str(payload["address"])), verified=False)
        .first()
    )
    if mail is None:
        return
    key = EmailConfirmationHMAC.create(mail).key
    _send(
        mail.email,
        "Andon: confirm your address",
        f"{mail.user.username} at {settings.PUBLIC_URL} says that this is their address.\n\n"
        f"Confirm it, signed in, within a day:\n{settings.PUBLIC_URL}/account/mail/{key}\n\n"
        "If that is not you, do nothing.\n",
    )


def _send(to: str, subject: str, text: str) -> None:
    try:
        send_mail(subject, text, None, [to])
    except (OSError, smtplib.SMTPException) as error:
        # Words of a relay repeat addresses, which must not outlive a person here.
        code = getattr(error, "smtp_code", None)
        said = f"{type(error).__name__}{f' {code}' if code else ''}"
        if isinstance(error, smtplib.SMTPRecipientsRefused):
            raise work.GiveUp(f"the relay does not take the address: {said}") from None
        raise work.Retry(None, f"the relay did not take the mail: {said}") from None


def _address(email: str) -> str:
    email = email.strip().lower()
    try:
        validate_email(email)
    except ValidationError as error:
        raise Refused(
            "bad-address", "That is no mail address, as in mira@example.org.", status=400
        ) from error
    if len(email) > _LONGEST:
        raise Refused("bad-address", f"An address has at most {_LONGEST} characters.", status=400)
    return email


def _may_mail(request: HttpRequest, email: str) -> bool:
    """Count one mail to an address, known here or not: nobody's mailbox is filled from here."""
    key = email.strip().lower()[:_LONGEST]
    return bool(ratelimit.consume(request, app="allauth.account", action="mail_to", key=key))
