"""Errors as problem documents (RFC 9457): what was wrong, in which field, what to do."""

import json
from collections.abc import Mapping
from http import HTTPStatus

from django.http import HttpRequest, HttpResponse
from ninja import NinjaAPI

CONTENT_TYPE = "application/problem+json"
# The types are relative references on purpose: they name the error and need no host to stay valid.
TYPE_PREFIX = "/problems/"


class Problem(Exception):
    """An answer that is an error. Raise it anywhere below a machine endpoint.

    Args:
        status: HTTP status code, 4xx or 5xx.
        kind: stable name of the error, the last part of its type ("unknown-run").
        detail: a sentence for people: what was wrong, where, what to do.
        field: the field, header or parameter at fault, when there is one.
        extra: more members of the document (for example `server_time`).
        headers: more response headers (for example `Retry-After`).
    """

    def __init__(
        self,
        status: int,
        kind: str,
        detail: str,
        *,
        field: str | None = None,
        extra: Mapping[str, object] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.kind = kind.removeprefix(TYPE_PREFIX)
        self.detail = detail
        self.field = field
        self.extra = dict(extra or {})
        self.headers = dict(headers or {})

    def document(self) -> dict[str, object]:
        """Return the problem document."""
        document: dict[str, object] = {
            "type": TYPE_PREFIX + self.kind,
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": self.detail,
        }
        if self.field is not None:
            document["field"] = self.field
        return document | self.extra

    def response(self) -> HttpResponse:
        """Return the HTTP answer."""
        return HttpResponse(
            json.dumps(self.document()), content_type=CONTENT_TYPE, status=self.status, headers=self.headers
        )


def install(api: NinjaAPI) -> None:
    """Make `api` answer a raised `Problem` with its document."""

    def answer(request: HttpRequest, error: Problem | type[Problem]) -> HttpResponse:
        assert isinstance(error, Problem)
        return error.response()

    api.add_exception_handler(Problem, answer)
