"""What happened to accounts, and links by which people become able to sign in."""

from django.db import models

from runs.models.people import Person, Project


class AccountEvent(models.Model):
    """One row of the log of accounts: append-only, people by opaque id.

    Whoever tries a name that nobody has is not named: people type their password into that field.
    """

    class Kind(models.TextChoices):
        SIGN_IN = "signed in"
        SIGN_IN_FAILED = "sign-in failed"
        BRAKED = "too many tries"
        SIGN_OUT = "signed out"
        PROOF = "proved again"
        PROOF_FAILED = "proof failed"
        PASSWORD = "password changed"  # noqa: S105  (what happened, not a secret)
        PASSKEY_ADDED = "passkey added"
        PASSKEY_REMOVED = "passkey removed"
        CODES_ON = "codes switched on"
        CODES_OFF = "codes switched off"
        RECOVERY_MADE = "recovery codes made"
        RECOVERY_USED = "recovery code used"
        LINK_MAILED = "link for a new password mailed"
        MAIL_SET = "mail address confirmed"
        MAIL_REMOVED = "mail address removed"
        SSO_LINKED = "SSO linked"
        SSO_UNLINKED = "SSO unlinked"
        SIGNED_UP = "signed up by SSO"
        INVITED = "invited"
        INVITATION_USED = "invitation used"
        INVITATION_ENDED = "invitation withdrawn"
        RESET = "sign-in reset"
        ROLES = "roles changed"
        TOKEN_MADE = "token made"  # noqa: S105
        TOKEN_REVOKED = "token revoked"  # noqa: S105
        HOOK_MADE = "hook token made"
        HOOK_REVOKED = "hook token revoked"
        SECRET_ROTATED = "webhook secret rotated"  # noqa: S105
        SECRET_ENDED = "webhook secret withdrawn"  # noqa: S105
        ERASED = "person erased"

    at = models.DateTimeField()
    kind = models.CharField(max_length=32, choices=Kind.choices)
    by = models.UUIDField(null=True)  # who did it; null: nobody known, or a command on the server
    about = models.UUIDField(null=True)  # whose account it is
    project = models.ForeignKey(Project, models.PROTECT, null=True, related_name="+", db_index=False)
    address = models.GenericIPAddressField(null=True)
    agent = models.CharField(max_length=200, blank=True)
    data = models.JSONField(default=dict)

    class Meta:
        indexes = [
            models.Index(fields=["about", "-id"], name="account_event_about"),
            models.Index(fields=["project", "-id"], name="account_event_project"),
        ]

    def __str__(self) -> str:
        return f"{self.kind} {self.at:%Y-%m-%d %H:%M:%S}"


class Invitation(models.Model):
    """A link by which one person sets how they sign in, once; only its SHA-256 is kept."""

    person = models.ForeignKey(Person, models.CASCADE, related_name="invitations")
    project = models.ForeignKey(Project, models.CASCADE, null=True, related_name="invitations")
    sha256 = models.CharField(max_length=64, unique=True)
    made_by = models.ForeignKey(Person, models.SET_NULL, null=True, related_name="+")
    made_at = models.DateTimeField()
    expires_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True)  # used, withdrawn, or another took its place

    def __str__(self) -> str:
        return f"invitation of {self.person}"
