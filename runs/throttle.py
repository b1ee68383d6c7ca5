"""A brake on guessing passwords: failures per name and address, and per address.

Never per name alone: that would let anybody keep a person out of a held run. Passkeys pass by it, because
there is nothing to guess.
"""

import ipaddress
import math
import time

from django.core.cache import cache
from django.http import HttpRequest

from runs.accounts.address import client_address

WINDOW_S = 60
PER_NAME = 5  # a person mistypes twice; five in a minute is a machine or a forgotten password
PER_ADDRESS = 30  # an office behind one address


def _keys(request: HttpRequest, name: str) -> list[tuple[str, int]]:
    address = _place(request)
    # Names are compared in one case: the brake must not be passed by writing Alice for alice.
    return [
        (f"sign-in:{address}:{name.lower()[:150].encode().hex()}", PER_NAME),
        (f"sign-in:{address}", PER_ADDRESS),
    ]


def _place(request: HttpRequest) -> str:
    """Return the address, of IPv6 the network that one customer is given: a machine has 2^64 of them."""
    address = client_address(request)
    if address is None or ":" not in address:
        return address or ""
    return str(ipaddress.ip_network(f"{address}/64", strict=False))


def wait_s(request: HttpRequest, name: str) -> int:
    """Return how many seconds this name must wait at this address, 0 when it may try now."""
    now = time.time()
    waits = [0.0]
    for key, most in _keys(request, name):
        failures = [at for at in cache.get(key, []) if now - at < WINDOW_S]
        if len(failures) >= most:
            waits.append(WINDOW_S - (now - failures[-most]))
    return math.ceil(max(waits))


def failed(request: HttpRequest, name: str) -> None:
    """Count one wrong password."""
    now = time.time()
    for key, most in _keys(request, name):
        failures = [at for at in cache.get(key, []) if now - at < WINDOW_S]
        cache.set(key, [*failures, now][-most:], WINDOW_S)


def forget(request: HttpRequest, name: str) -> None:
    """Forget the failures of a name after a right password."""
    cache.delete(_keys(request, name)[0][0])
