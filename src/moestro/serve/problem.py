"""What an endpoint answers when it cannot do what it was asked: JSON of one shape, and a status."""

from __future__ import annotations

import json
from typing import Any

from moestro.errors import MoestroError, invalid_input
from moestro.serve.request import OPERATION

_NEEDS = {
    400: "a request that can be read",
    401: "a key",
    404: "something that is here",
    405: "another method",
    408: "a whole request in time",
    413: "a smaller body",
    415: "a body in JSON",
    429: "a place to wait",
    500: "an answer without an error",
    503: "a server that goes on",
}
_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "server_error"}


class ApiError(MoestroError):
    """A request that is answered with a status and a reason.

    Attributes:
        status: of HTTP.
        param: the field of the body that is to be changed, if it is one.
        code: a word for programs.
        headers: that the response has besides.
    """

    def __init__(
        self,
        message: str,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = headers or {}

    @property
    def body(self) -> dict[str, Any]:
        """As OpenAI writes errors."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def event(self) -> str:
        """The error as an event in a stream."""
        return f"data: {json.dumps(self.body)}\n\n"


def refused(param: str | None, *, got: str, needs: str, fix: str, code: str | None = None) -> ApiError:
    """The error for a field of a body, in the four parts that every error has."""
    return ApiError(str(invalid_input(OPERATION, got=got, needs=needs, fix=fix)), 400, param, code)


def as_told(error: MoestroError, status: int = 400, param: str | None = None, code: str | None = None) -> ApiError:
    """The engine's own error, word for word."""
    return ApiError(str(error), status, param, code)


def answered(status: int, *, got: str, fix: str, code: str | None = None, **headers: str) -> ApiError:
    """The error for a request that is refused whatever its body says: its status says what it needs."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return ApiError(str(invalid_input(OPERATION, got=got, needs=_NEEDS[status], fix=fix)), status, None, code, named)
