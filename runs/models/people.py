"""Projects, people and who may do what."""

import uuid

from django.contrib.auth.models import AbstractUser
from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import Q


class Project(models.Model):
    """Who may see what: runs, nodes and policies belong to one."""

    slug = models.SlugField(max_length=64, unique=True)
    name = models.CharField(max_length=200)
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.slug


class Person(AbstractUser):
    """A person who signs in.

    Custody, ledger and approvals name people by `opaque_id` only, so that a name or an address can
    be erased here without breaking a chain that must stay verifiable.
    """

    opaque_id = models.UUIDField(default=uuid.uuid4, unique=True, editable=False)
    theme = models.CharField(
        max_length=8, default="system", choices=[(t, t) for t in ("system", "light", "dark")]
    )

    def __str__(self) -> str:
        return self.username


class Role(models.TextChoices):
    """What a member may do in a project; a person may hold several."""

    VIEWER = "viewer"
    RESPONDER = "responder"
    APPROVER = "approver"
    VAULT_OFFICER = "vault_officer"
    ADMIN = "admin"


class Membership(models.Model):
    """A person's roles in a project."""

    project = models.ForeignKey(Project, models.CASCADE, related_name="memberships", db_index=False)
    person = models.ForeignKey(Person, models.CASCADE, related_name="memberships")
    roles = ArrayField(models.CharField(max_length=16, choices=Role.choices), default=list)

    class Meta:
        constraints = [
            models.UniqueConstraint(fields=["project", "person"], name="one_membership_per_project"),
            models.CheckConstraint(
                condition=Q(roles__contained_by=[role.value for role in Role]), name="membership_roles_known"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.person} in {self.project}"


class Scope(models.TextChoices):
    """What a personal token may do; never more than its person's roles."""

    READ = "read"
    RESPOND = "respond"
    APPROVE = "approve"


def _every_scope() -> list[str]:
    return list(Scope.values)


class Token(models.Model):
    """A personal API token; only its SHA-256 is kept."""

    person = models.ForeignKey(Person, models.CASCADE, related_name="tokens")
    name = models.CharField(max_length=100)
    sha256 = models.CharField(max_length=64, unique=True)
    scopes = ArrayField(models.CharField(max_length=16, choices=Scope.choices), default=_every_scope)
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField(null=True)
    revoked_at = models.DateTimeField(null=True)
    last_used_at = models.DateTimeField(null=True)

    class Meta:
        constraints = [
            models.CheckConstraint(
                condition=Q(scopes__contained_by=[scope.value for scope in Scope]), name="token_scopes_known"
            )
        ]

    def __str__(self) -> str:
        return f"{self.name} of {self.person}"
