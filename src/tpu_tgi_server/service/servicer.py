"""The RPCs that both versions of the protocol share: protobuf in, protobuf out, and nothing decided here."""

from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import quote

from tpu_tgi_server.engine.types import ModelInfo
from tpu_tgi_server.profiling import task_span
from tpu_tgi_server.service.convert import Converter, Message
from tpu_tgi_server.service.errors import grpc_errors
from tpu_tgi_server.service.shard import Shard

MODEL_FOLDER_KEY = "tpu-tgi-model-folder"
"""Metadata of the Info response, quoted as in a URL: where clients on the same host find the model's chat template."""

Context = Any  # grpc.aio.ServicerContext, whose type parameters gRPC's generated code does not use


class Servicer:
    """Owns nothing: passes each RPC of one version to the shard.

    Args:
        shard: where the RPCs go.
        convert: the version's messages.
        info_fields: what Info says.
        warm_up: how the version words a Warmup.
    """

    def __init__(
        self,
        shard: Shard,
        convert: Converter,
        info_fields: Callable[[ModelInfo], dict[str, Any]],
        warm_up: Callable[[Shard, Message], Awaitable[Message]],
    ) -> None:
        self._shard = shard
        self._convert = convert
        self._pb = convert.pb
        self._info_fields = info_fields
        self._warm_up = warm_up

    async def Health(self, request: Message, context: Context) -> Message:
        async with grpc_errors(context):
            self._shard.check_health()
        return self._pb.HealthResponse()

    async def Info(self, request: Message, context: Context) -> Message:
        await context.send_initial_metadata([(MODEL_FOLDER_KEY, quote(self._shard.info.folder))])
        return self._pb.InfoResponse(**self._info_fields(self._shard.info))

    async def ServiceDiscovery(self, request: Message, context: Context) -> Message:
        return self._pb.ServiceDiscoveryResponse(urls=[self._shard.url])

    async def ClearCache(self, request: Message, context: Context) -> Message:
        async with grpc_errors(context):
            await self._shard.clear(request.id if request.HasField("id") else None)
        return self._pb.ClearCacheResponse()

    async def FilterBatch(self, request: Message, context: Context) -> Message:
        async with grpc_errors(context):
            batch = await self._shard.filter(request.batch_id, tuple(request.request_ids))
        return self._pb.FilterBatchResponse(batch=self._convert.cached_batch_message(batch))

    async def Warmup(self, request: Message, context: Context) -> Message:
        async with grpc_errors(context):
            return await self._warm_up(self._shard, request)

    async def Prefill(self, request: Message, context: Context) -> Message:
        async with grpc_errors(context):
            with task_span("Prefill"):
                result = await self._shard.prefill(self._convert.batch(request.batch))
                return self._convert.prefill_response(result)

    async def Decode(self, request: Message, context: Context) -> Message:
        async with grpc_errors(context):
            with task_span("Decode"):
                result = await self._shard.decode(tuple(map(self._convert.cached_batch, request.batches)))
                return self._convert.decode_response(result)
