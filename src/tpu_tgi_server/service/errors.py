"""Failures of the rooms below, as gRPC statuses. The router shows the message to the client as it is."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
from loguru import logger

from tpu_tgi_server.engine.types import EngineError, ErrorKind
from tpu_tgi_server.logs import origin
from tpu_tgi_server.mailbox.process import AgentDiedError

STATUS = {
    ErrorKind.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    ErrorKind.UNKNOWN_BATCH: grpc.StatusCode.NOT_FOUND,
    ErrorKind.BUSY: grpc.StatusCode.FAILED_PRECONDITION,
    ErrorKind.TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


@asynccontextmanager
async def grpc_errors(context: "grpc.aio.ServicerContext[object, object]") -> AsyncIterator[None]:
    """Abort the RPC with the status that fits whatever the body raises."""
    try:
        yield
    except EngineError as error:
        await context.abort(STATUS[error.kind], error.message)
    except AgentDiedError as error:
        logger.error("call failed: {}", error)
        await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
    except Exception as error:  # gRPC would log its text, which may quote a prompt
        logger.exception("call failed")
        logger.opt(exception=True).debug("call failed")
        await context.abort(grpc.StatusCode.INTERNAL, f"the server failed: {origin(error)}")
