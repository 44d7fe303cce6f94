"""Failures as gRPC statuses."""

from typing import Any, cast

import grpc
import pytest

from tpu_tgi_server.engine.types import EngineError, ErrorKind
from tpu_tgi_server.mailbox.process import AgentDiedError
from tpu_tgi_server.service.errors import STATUS, grpc_errors


class Context:
    """Owns what a call was aborted with."""

    def __init__(self) -> None:
        self.status: Any = None
        self.details = ""

    async def abort(self, status: grpc.StatusCode, details: str) -> None:
        self.status, self.details = status, details


async def aborted_by(error: Exception) -> Context:
    context = Context()

    async def call() -> None:
        async with grpc_errors(cast(Any, context)):
            raise error

    await call()
    return context


@pytest.mark.parametrize("kind", ErrorKind)
async def test_refusal_has_the_status_of_its_kind_and_its_message(kind: ErrorKind) -> None:
    context = await aborted_by(EngineError(kind, "the message"))
    assert (context.status, context.details) == (STATUS[kind], "the message")


async def test_death_of_the_agent_is_unavailable_with_the_reason() -> None:
    context = await aborted_by(AgentDiedError("the reason"))
    assert (context.status, context.details) == (grpc.StatusCode.UNAVAILABLE, "the reason")


async def test_unexpected_failure_is_internal_and_says_nothing_of_a_prompt() -> None:
    context = await aborted_by(KeyError("my prompt"))
    assert context.status is grpc.StatusCode.INTERNAL
    assert context.details.startswith("the server failed: KeyError in test_errors.py:")
    assert "my prompt" not in context.details
