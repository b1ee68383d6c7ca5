"""Uploads into an S3 bucket: multipart, by presigned URLs that the agent puts parts to."""

import base64
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from botocore.awsrequest import AWSRequest
from botocore.exceptions import BotoCoreError, ClientError
from django.conf import settings

from evidence.models import AgentTask
from evidence.sources import SourceError
from evidence.stores import s3_client
from evidence.stores.intake import URL_VALID_S, Elsewhere, Part, PartUrl, UploadGone, key_of, put
from evidence.stores.s3 import S3Vault
from evidence.stores.s3_lock import error_code
from evidence.vault import BytesDiffer, Stored, VaultError

T = TypeVar("T")
_GONE = {"NoSuchUpload", "NoSuchKey"}  # radosgw says the second


class S3Intake:
    """Multipart uploads by presigned URLs."""

    def __init__(self, store: S3Vault) -> None:
        self.store = store
        self.bucket = store.place.bucket

    def begin(self, task: AgentTask) -> str:
        """See `Intake.begin`."""
        if not task.bytes_total:
            return "empty"
        headers = self.store.locks.headers(task.item.lock, task.item.retain_until)
        return self._call(
            task,
            lambda: str(
                self.store.client.create_multipart_upload(Bucket=self.bucket, Key=key_of(task), **headers)[
                    "UploadId"
                ]
            ),
        )

    def have(self, task: AgentTask, parts: Sequence[Part]) -> set[int]:
        """See `Intake.have`."""
        if not parts:
            return set()
        there = self._call(task, lambda: self._there(task))
        # The tag of a part is its MD5, which the store checked on the way in.
        return {part.n for part in parts if there.get(part.n, ("", 0))[0] == part.md5}

    def _there(self, task: AgentTask) -> dict[int, tuple[str, int]]:
        pages = self.store.client.get_paginator("list_parts").paginate(
            Bucket=self.bucket, Key=key_of(task), UploadId=task.store_upload
        )
        return {
            int(row["PartNumber"]): (str(row["ETag"]).strip('"'), int(row["Size"]))
            for page in pages
            for row in page.get("Parts", [])
        }

    def urls(self, task: AgentTask, parts: Sequence[Part]) -> list[PartUrl]:
        """See `Intake.urls`."""
        client = _presigner(self.store.place)
        made = []
        for part in parts:
            md5 = base64.b64encode(bytes.fromhex(part.md5)).decode()
            url = client.generate_presigned_url(
                "upload_part",
                Params={
                    "Bucket": self.bucket,
                    "Key": key_of(task),
                    "UploadId": task.store_upload,
                    "PartNumber": part.n,
                    "ContentMD5": md5,
                    # Becomes the payload hash of the signature (`_bind_payload`).
                    "ChecksumSHA256": base64.b64encode(bytes.fromhex(part.sha256)).decode(),
                },
                ExpiresIn=URL_VALID_S,
            )
            made.append(PartUrl(part.n, url, {"Content-MD5": md5, "X-Amz-Content-SHA256": part.sha256}))
        return made

    def take(self, task: AgentTask, parts: Sequence[Part]) -> Stored:
        """See `Intake.take`."""
        if task.bytes_total:
            self._complete(task, parts)
        try:
            return put(self.store, task, Elsewhere(int(task.bytes_total or 0)))
        except SourceError as error:
            raise BytesDiffer(
                f"{key_of(task)}: holds no version of {task.bytes_total} bytes with SHA-256 {task.sha256}"
            ) from error

    def _complete(self, task: AgentTask, parts: Sequence[Part]) -> None:
        client = self.store.client
        try:
            there = self._there(task)
        except ClientError as error:
            if error_code(error) in _GONE:
                return  # completed by a worker that was killed after it; the version is looked for
            raise self._error(task, error) from error
        except BotoCoreError as error:
            raise self._error(task, error) from error
        lacking = [part.n for part in parts if there.get(part.n) != (part.md5, part.bytes_total)]
        if lacking:
            raise BytesDiffer(f"{key_of(task)}: part {lacking[0]} is missing or damaged in the store")
        self._call(
            task,
            lambda: client.complete_multipart_upload(
                Bucket=self.bucket,
                Key=key_of(task),
                UploadId=task.store_upload,
                MultipartUpload={
                    "Parts": [{"PartNumber": part.n, "ETag": f'"{part.md5}"'} for part in parts]
                },
            ),
        )

    def forget(self, task: AgentTask) -> None:
        """See `Intake.forget`."""
        if not task.bytes_total or not task.store_upload:
            return
        with contextlib.suppress(BotoCoreError, ClientError):  # the bucket's own rule ends what is left
            self.store.client.abort_multipart_upload(
                Bucket=self.bucket, Key=key_of(task), UploadId=task.store_upload
            )

    def _call(self, task: AgentTask, call: Callable[[], T]) -> T:
        try:
            return call()
        except (BotoCoreError, ClientError) as error:
            raise self._error(task, error) from error

    def _error(self, task: AgentTask, error: Exception) -> VaultError:
        code = error_code(error) if isinstance(error, ClientError) else type(error).__name__
        kind = UploadGone if code in _GONE else VaultError
        return kind(f"{self.store.name}: {key_of(task)}: {code}")


_presigners: dict[s3_client.Place, Any] = {}


def _presigner(place: s3_client.Place) -> Any:
    """Return a client that signs URLs for the address at which agents reach the store."""
    public = replace(place, endpoint=settings.VAULT_PUBLIC_URL or place.endpoint)
    if public not in _presigners:
        made = s3_client.make(public)
        made.meta.events.register("before-sign.s3.UploadPart", _bind_payload)
        _presigners[public] = made
    return _presigners[public]


def _bind_payload(request: AWSRequest, **_: Any) -> None:
    """Sign the SHA-256 of the part's bytes in place of UNSIGNED-PAYLOAD: the store then checks it.

    Source: AWS, "Authenticating Requests: Using Query Parameters", canonical request, payload hash.
    """
    given = request.headers.get("x-amz-checksum-sha256")
    if given is not None:
        # Stores check the payload hash everywhere, this newer header only where the upload asked for it.
        del request.headers["x-amz-checksum-sha256"]
        request.headers["X-Amz-Content-SHA256"] = base64.b64decode(given).hex()
