"""The servicer of generate.v2: protobuf in, protobuf out, and nothing decided here."""

from typing import Any

from tpu_tgi_server.pb.v2 import generate_pb2 as pb
from tpu_tgi_server.pb.v2 import generate_pb2_grpc
from tpu_tgi_server.service import convert_v2 as convert
from tpu_tgi_server.service.errors import grpc_errors
from tpu_tgi_server.service.shard import Shard

MODEL_FOLDER_KEY = "tpu-tgi-model-folder"
"""Metadata of the Info response, for clients on the same host that want the model's chat template."""

Context = Any  # grpc.aio.ServicerContext, whose type parameters gRPC's generated code does not use


class ServicerV2(generate_pb2_grpc.TextGenerationServiceServicer):
    """Owns nothing: passes each RPC to the shard."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    async def Health(self, request: pb.HealthRequest, context: Context) -> pb.HealthResponse:
        async with grpc_errors(context):
            self._shard.check_health()
        return pb.HealthResponse()

    async def Info(self, request: pb.InfoRequest, context: Context) -> pb.InfoResponse:
        await context.send_initial_metadata([(MODEL_FOLDER_KEY, self._shard.info.folder)])
        return convert.info_response(self._shard.info)

    async def ServiceDiscovery(
        self, request: pb.ServiceDiscoveryRequest, context: Context
    ) -> pb.ServiceDiscoveryResponse:
        return pb.ServiceDiscoveryResponse(urls=[self._shard.url])

    async def ClearCache(self, request: pb.ClearCacheRequest, context: Context) -> pb.ClearCacheResponse:
        async with grpc_errors(context):
            await self._shard.clear(request.id if request.HasField("id") else None)
        return pb.ClearCacheResponse()

    async def FilterBatch(self, request: pb.FilterBatchRequest, context: Context) -> pb.FilterBatchResponse:
        async with grpc_errors(context):
            batch = await self._shard.filter(request.batch_id, tuple(request.request_ids))
        return pb.FilterBatchResponse(batch=convert.cached_batch_to_pb(batch))

    async def Warmup(self, request: pb.WarmupRequest, context: Context) -> pb.WarmupResponse:
        async with grpc_errors(context):
            total = await self._shard.warm_up(request.max_input_length, request.max_total_tokens)
        return pb.WarmupResponse(max_supported_total_tokens=total)

    async def Prefill(self, request: pb.PrefillRequest, context: Context) -> pb.PrefillResponse:
        async with grpc_errors(context):
            result = await self._shard.prefill(convert.batch_from_pb(request.batch))
        return convert.prefill_response(result)

    async def Decode(self, request: pb.DecodeRequest, context: Context) -> pb.DecodeResponse:
        async with grpc_errors(context):
            result = await self._shard.decode(tuple(map(convert.cached_batch_from_pb, request.batches)))
        return convert.decode_response(result)
