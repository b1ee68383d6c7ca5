"""The policy documents against the operations that the server's code calls."""

import json
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

PLACE = Path(__file__).resolve().parent.parent / "docs" / "policies"
ROLES = ("vault", "trainer", "agent")
ARN = "arn:aws:s3:::"
# Nobody that Andon knows may do these, on any bucket.
NEVER = {
    "s3:BypassGovernanceRetention",
    "s3:PutBucketVersioning",
    "s3:PutBucketObjectLockConfiguration",
    "s3:PutBucketPolicy",
    "s3:PutLifecycleConfiguration",
    "s3:DeleteBucket",
}
# Operation of the SDK → the rights it needs. Source: AWS, Service Authorization Reference, Amazon S3.
NEEDS = {
    "DeleteObject": {"s3:DeleteObjectVersion"},  # always by version: the bucket has them
    "GetObject": {"s3:GetObject", "s3:GetObjectVersion"},
    "HeadObject": {"s3:GetObject", "s3:GetObjectVersion"},
    "AbortMultipartUpload": {"s3:AbortMultipartUpload"},
    "CompleteMultipartUpload": {"s3:PutObject"},
    "CopyObject": {"s3:PutObject"},
    "CreateMultipartUpload": {"s3:PutObject"},
    "GetBucketVersioning": {"s3:GetBucketVersioning"},
    "GetObjectLegalHold": {"s3:GetObjectLegalHold"},
    "GetObjectLockConfiguration": {"s3:GetBucketObjectLockConfiguration"},
    "GetObjectRetention": {"s3:GetObjectRetention"},
    "HeadBucket": {"s3:ListBucket"},
    "ListMultipartUploads": {"s3:ListBucketMultipartUploads"},
    "ListObjectVersions": {"s3:ListBucketVersions"},
    "ListObjectsV2": {"s3:ListBucket"},
    "ListParts": {"s3:ListMultipartUploadParts"},
    "PutBucketVersioning": {"s3:PutBucketVersioning"},
    "PutObject": {"s3:PutObject"},
    "PutObjectLegalHold": {"s3:PutObjectLegalHold"},
    "PutObjectRetention": {"s3:PutObjectRetention"},
    "UploadPart": {"s3:PutObject"},
    "UploadPartCopy": {"s3:PutObject"},
}
# What the probe does in order to be refused.
TRIED = {"s3:PutBucketVersioning", "s3:BypassGovernanceRetention"}


def policy(role: str) -> list[dict[str, Any]]:
    document = json.loads((PLACE / f"{role}.json").read_text("utf-8"))
    assert document["Version"] == "2012-10-17"
    statements: list[dict[str, Any]] = document["Statement"]
    return statements


def listed(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def says(statements: list[dict[str, Any]], effect: str, action: str, resource: str) -> bool:
    return any(
        one["Effect"] == effect
        and "Condition" not in one
        and any(fnmatchcase(action, pattern) for pattern in listed(one["Action"]))
        and any(fnmatchcase(resource, pattern) for pattern in listed(one["Resource"]))
        for one in statements
    )


def is_allowed(role: str, action: str, resource: str) -> bool:
    statements = policy(role)
    return says(statements, "Allow", action, resource) and not says(statements, "Deny", action, resource)


def called() -> set[str]:
    """Return the operations that the server's code calls on a store, by reading it."""
    found: set[str] = set()
    for file in (PLACE.parent.parent / "evidence").rglob("*.py"):
        text = file.read_text("utf-8")
        found |= set(re.findall(r"(?:client|_call)\.([a-z_0-9]+)", text))
        found |= set(re.findall(r'get_paginator\(\s*"([a-z_0-9]+)"', text))
    names = {"".join(word.capitalize() for word in name.split("_")) for name in found}
    return names & set(NEEDS)


def test_the_servers_policy_allows_what_its_code_calls_and_nothing_else() -> None:
    operations = called()
    assert {"PutObject", "UploadPart", "ListParts", "PutObjectLegalHold", "DeleteObject"} <= operations
    needed = {action for name in operations for action in NEEDS[name]}
    allowed = {
        action for one in policy("vault") if one["Effect"] == "Allow" for action in listed(one["Action"])
    }
    assert needed - TRIED - allowed == set()
    assert allowed - needed == set()
    assert not TRIED & allowed


@pytest.mark.parametrize("role", ROLES)
def test_no_role_may_bypass_a_lock_or_change_a_bucket(role: str) -> None:
    for bucket in ("VAULT_BUCKET", "CHECKPOINT_BUCKET"):
        for action in NEVER:
            for resource in (f"{ARN}{bucket}", f"{ARN}{bucket}/evidence/x"):
                assert not is_allowed(role, action, resource)
        on_bucket = NEVER - {"s3:BypassGovernanceRetention"}
        assert all(says(policy(role), "Deny", action, f"{ARN}{bucket}") for action in on_bucket)
        assert says(policy(role), "Deny", "s3:BypassGovernanceRetention", f"{ARN}{bucket}/step-900/x")


@pytest.mark.parametrize("role", ROLES)
def test_nothing_is_allowed_by_a_pattern(role: str) -> None:
    for statement in policy(role):
        assert set(statement) <= {"Sid", "Effect", "Action", "Resource", "Condition"}
        if statement["Effect"] == "Allow":
            assert not any("*" in action for action in listed(statement["Action"]))
        for resource in listed(statement["Resource"]):
            assert resource.removeprefix(ARN).split("/")[0] in {"VAULT_BUCKET", "CHECKPOINT_BUCKET"}


def test_the_trainer_may_rotate_and_never_destroy_and_the_agent_may_nothing() -> None:
    shard, evidence = f"{ARN}CHECKPOINT_BUCKET/step-900/x", f"{ARN}VAULT_BUCKET/evidence/x"
    assert is_allowed("trainer", "s3:DeleteObject", shard)
    for action in ("s3:DeleteObjectVersion", "s3:PutObjectLegalHold", "s3:PutObjectRetention"):
        assert says(policy("trainer"), "Deny", action, shard)
    for action in ("s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:ListBucket"):
        assert says(policy("trainer"), "Deny", action, evidence)
        for resource in (shard, evidence):
            assert says(policy("agent"), "Deny", action, resource)
