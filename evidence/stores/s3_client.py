"""boto3 clients for the vault and for sources in S3, with settings that compatible stores understand."""

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

import boto3
from botocore.config import Config
from botocore.credentials import Credentials
from botocore.exceptions import ClientError, ConnectTimeoutError, EndpointConnectionError
from django.conf import settings

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

CONNECT_TIMEOUT_S = 5
ATTEMPTS = 3  # in one call; work rows try again for as long as it takes
POOL = 48  # objects and parts that one vault moves at the same time
# Done twice, these make a second version or a second upload, perhaps under a lock.
_NOT_TWICE = ("PutObject", "CopyObject", "CreateMultipartUpload")
_MAY_BE_DONE = {500, 502, 504}  # so does a gateway answer that lost its store on the way


@dataclass(frozen=True)
class Place:
    """What `ANDON_VAULT_URL` says. Credentials are only there when the URL holds them."""

    bucket: str
    endpoint: str | None
    region: str
    telemetry: str = ""
    access_key: str | None = None
    secret_key: str | None = None


def parse(url: str) -> Place:
    """Read `s3://bucket?endpoint=…&region=…&telemetry=…`, or `s3+https://[KEY:SECRET@]host/bucket`.

    Raises:
        ValueError: no bucket, or a parameter nobody knows.
    """
    parts = urlsplit(url)
    options = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    unknown = set(options) - {"endpoint", "region", "telemetry"}
    if unknown:
        raise ValueError(f"ANDON_VAULT_URL: unknown parameter {', '.join(sorted(unknown))}")
    endpoint, bucket = options.get("endpoint"), parts.hostname or ""
    if parts.scheme in {"s3+http", "s3+https"}:
        port = f":{parts.port}" if parts.port else ""
        endpoint = f"{parts.scheme.removeprefix('s3+')}://{parts.hostname}{port}"
        bucket = parts.path.strip("/")
    elif parts.scheme != "s3":
        raise ValueError(f"ANDON_VAULT_URL: expected file:///dir or s3://bucket, got {parts.scheme}://")
    if not bucket or "/" in bucket:
        raise ValueError("ANDON_VAULT_URL: names no bucket")
    return Place(
        bucket=bucket,
        endpoint=endpoint,
        region=options.get("region", "us-east-1"),
        telemetry=options.get("telemetry", ""),
        access_key=unquote(parts.username) if parts.username else None,
        secret_key=unquote(parts.password) if parts.password else None,
    )


@cache
def client(place: Place, *, quick: bool = False) -> "S3Client":
    """Return the process's client of a place (see `make`)."""
    return make(place, quick=quick)


def make(place: Place, *, quick: bool = False) -> "S3Client":
    """Return a new client. Credentials not in the URL come from boto3's own chain.

    A `quick` one asks once and waits 2 s: for health checks, which must answer while the store does not.

    boto3 sends CRC32 trailers by default, which many compatible stores refuse: here a checksum is sent
    only where an operation requires one, and integrity is ours (Content-MD5, signed payloads, SHA-256).
    """
    made: S3Client = boto3.client(
        "s3",
        endpoint_url=place.endpoint,
        region_name=place.region,
        aws_access_key_id=place.access_key,
        aws_secret_access_key=place.secret_key,
        config=Config(
            signature_version="s3v4",
            # A custom endpoint rarely has a wildcard name for every bucket.
            s3={
                "addressing_style": "path" if place.endpoint else "auto",
                "payload_signing_enabled": True,
            },
            retries={"total_max_attempts": 1 if quick else ATTEMPTS, "mode": "standard"},
            connect_timeout=2 if quick else CONNECT_TIMEOUT_S,
            read_timeout=2 if quick else settings.VAULT_READ_TIMEOUT_S,
            max_pool_connections=POOL,
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )
    for name in _NOT_TWICE:
        made.meta.events.register(f"needs-retry.s3.{name}", _not_blindly)
    return made


def _not_blindly(
    operation: Any, response: Any = None, caught_exception: Exception | None = None, **_: Any
) -> None:
    """Give up a call whose answer was lost: the store may have done it, and the next try looks first.

    boto3 would send it again at once. What surely did not arrive, or was refused as too much, it still does.
    """
    if caught_exception is not None:
        if not isinstance(caught_exception, ConnectTimeoutError | EndpointConnectionError):
            raise caught_exception
    elif response is not None and response[0].status_code in _MAY_BE_DONE:
        raise ClientError(response[1], operation.name)


def source_client() -> "S3Client":
    """Return the client for sources: the vault's endpoint when it is S3, else boto3's own settings.

    A trainer's bucket at another endpoint is reached by `AWS_ENDPOINT_URL_S3`, which boto3 reads.
    """
    return client(_source_place())


def source_credentials() -> Credentials | None:
    """Return what the client for sources signs with; None where boto3's chain has nothing."""
    place = _source_place()
    if place.access_key and place.secret_key:
        return Credentials(place.access_key, place.secret_key)
    return boto3.Session().get_credentials()


def _source_place() -> Place:
    url = settings.VAULT_URL
    return parse(url) if url.startswith("s3") else Place(bucket="", endpoint=None, region="us-east-1")
