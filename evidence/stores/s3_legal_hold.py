"""Legal holds of very many versions: the two requests that a hold is made of, without the client's weight.

boto3 spends as much on such a request as the store does, and whoever holds a thousand versions must ask of
each whether somebody else holds it already. These are signed and sent by botocore's own parts. Whatever is
not a plain answer is asked again by the client, which knows how to try again and what to call an error.
"""

import base64
import hashlib
import os
import re
from typing import Any
from urllib.parse import quote

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest, AWSResponse
from botocore.exceptions import BotoCoreError
from botocore.httpsession import URLLib3Session
from botocore.utils import get_environ_proxies
from django.conf import settings

from evidence.stores import s3_client
from evidence.stores.s3_lock import Locks

# Some gateways leave the second packet of an answer lying for 40 ms: it takes many to keep them busy.
AT_ONCE = 96
_ON = b'<LegalHold xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Status>ON</Status></LegalHold>'
_ON_MD5 = base64.b64encode(hashlib.md5(_ON, usedforsecurity=False).digest()).decode("ascii")
_STATUS = re.compile(rb"<Status>\s*(ON|OFF)\s*</Status>")
_NONE = re.compile(
    rb"<Code>\s*(NoSuchObjectLockConfiguration|ObjectLockConfigurationNotFoundError)\s*</Code>"
)


class LegalHolds:
    """Legal holds on versions of one bucket of the sources' endpoint."""

    def __init__(self, locks: Locks) -> None:
        self.locks = locks
        self._credentials = s3_client.source_credentials()
        self._region = locks.client.meta.region_name
        self._base = _base_of(locks.client, locks.bucket)
        make: Any = URLLib3Session  # its types know of no bundle of certificates, and of one timeout
        self._session: URLLib3Session = make(
            verify=os.environ.get("AWS_CA_BUNDLE") or True,
            proxies=get_environ_proxies(self._base),
            timeout=(s3_client.CONNECT_TIMEOUT_S, settings.VAULT_READ_TIMEOUT_S),
            max_pool_connections=AT_ONCE,
        )

    def is_held(self, key: str, version_id: str) -> bool | None:
        """Return whether a version has a legal hold; None when we may not look."""
        answer = self._send("GET", key, version_id)
        if answer is not None and answer.status_code == 200 and (found := _STATUS.search(answer.content)):
            return found[1] == b"ON"
        if answer is not None and answer.status_code == 404 and _NONE.search(answer.content):
            return False
        return self.locks.is_held(key, version_id)

    def hold(self, key: str, version_id: str) -> None:
        """Put a legal hold on one version. Raises what `Locks.hold` does."""
        answer = self._send("PUT", key, version_id, _ON)
        if answer is None or answer.status_code != 200:
            self.locks.hold(key, version_id)

    def close(self) -> None:
        """Let its connections go."""
        self._session.close()

    def _send(self, method: str, key: str, version_id: str, body: bytes = b"") -> AWSResponse | None:
        """Return the store's answer, None when there was none."""
        if self._credentials is None:
            return None
        url = f"{self._base}/{quote(key, safe='/~')}"
        headers = {"Content-MD5": _ON_MD5} if body else {}
        query = {"legal-hold": "", "versionId": version_id}
        request = AWSRequest(method, url, headers, body, query)
        try:
            S3SigV4Auth(self._credentials, "s3", self._region).add_auth(request)
            return self._session.send(request.prepare())
        except BotoCoreError:
            return None


def _base_of(client: Any, bucket: str) -> str:
    """Return the URL of a bucket as the client writes it: by path or by host name, at whichever endpoint."""
    url: str = client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": "x"})
    return url.partition("?")[0].removesuffix("/x")
