"""Machine endpoint of what a fleet's own tools send."""

from django.http import HttpRequest
from ninja import Router, Schema, Status

from runs import hooks
from runs.api import ProblemDocument

router = Router(tags=["hooks"])

_ERRORS = dict.fromkeys([400, 401, 403, 404, 413, 422, 429], ProblemDocument)
_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"type": ["object", "array"]}}},
    },
}


class HookTaken(Schema):
    """How many reports were read, and how many said something new."""

    accepted: int
    new: int


@router.post("/hooks/{source}", response={202: HookTaken, **_ERRORS}, openapi_extra=_BODY)
def hook(request: HttpRequest, source: str) -> Status[dict[str, int]]:
    """Post what Alertmanager, nvrx-watch, NVSentinel, gpud or trackio send; token as Bearer or password."""
    taken = hooks.receive(request, source)
    return Status(202, {"accepted": taken.reports, "new": taken.new})


@router.post("/hooks/{source}/{token}", response={202: HookTaken, **_ERRORS}, include_in_schema=False)
def hook_with_token(request: HttpRequest, source: str, token: str) -> Status[dict[str, int]]:
    """Post with the token last in the path, for tools that can set no header."""
    taken = hooks.receive(request, source, token)
    return Status(202, {"accepted": taken.reports, "new": taken.new})
