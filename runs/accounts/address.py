"""Where a request comes from: the address that brakes count by and the log of accounts keeps."""

import ipaddress

from django.conf import settings
from django.http import HttpRequest


def client_address(request: HttpRequest) -> str | None:
    """Return the client's address, None where it is none (a unix socket, a test).

    Behind a proxy it is the last one of X-Forwarded-For: the one the proxy itself wrote. What stands
    before it may be anybody's invention.
    """
    said: str = request.META.get("REMOTE_ADDR") or ""
    if settings.BEHIND_PROXY and (forwarded := request.META.get("HTTP_X_FORWARDED_FOR", "")):
        said = forwarded.rpartition(",")[2].strip()
    try:
        return str(ipaddress.ip_address(said))
    except ValueError:
        return None
