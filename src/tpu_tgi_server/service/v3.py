"""generate.v3: what the third version of the protocol has of its own."""

from typing import Any

from tpu_tgi_server.engine.types import EngineError, ErrorKind, ModelInfo
from tpu_tgi_server.pb.v3 import generate_pb2 as pb
from tpu_tgi_server.pb.v3.generate_pb2_grpc import add_TextGenerationServiceServicer_to_server as add_to_server
from tpu_tgi_server.service import v2
from tpu_tgi_server.service.convert import Converter, Message
from tpu_tgi_server.service.servicer import Servicer
from tpu_tgi_server.service.shard import Shard

__all__ = ["CONVERTER", "add_to_server", "make_servicer", "pb"]


def read_prompt(request: Message) -> tuple[str, bool | None]:
    """The text chunks if there are any, else `inputs`, which holds the same.

    Raises:
        EngineError: INVALID; there is an image.
    """
    chunks = request.input_chunks.chunks
    if any(chunk.WhichOneof("chunk") == "image" for chunk in chunks):
        raise EngineError(
            ErrorKind.INVALID, f"request {request.id}: input_chunks has an image, and this is a text model"
        )
    text = "".join(chunk.text for chunk in chunks) if chunks else request.inputs
    return text, request.add_special_tokens


CONVERTER = Converter(pb, read_prompt)


def make_servicer(shard: Shard) -> Servicer:
    """The servicer of generate.v3."""
    return Servicer(shard, CONVERTER, info_fields, warm_up)


def info_fields(info: ModelInfo) -> dict[str, Any]:
    """As v2, and: no blocks, no chunks, no prefix cache. The router divides by `block_size` in any case."""
    return {
        **v2.info_fields(info),
        "support_chunking": False,
        "use_prefix_caching": False,
        "attention_impl": "slot_cache",
        "block_size": 1,
    }


async def warm_up(shard: Shard, request: Message) -> Message:
    """The router asserts that limits which it has sent come back as they were, and takes ours where it has none.

    The warm-up batch itself (its image, its identical ids, its numbers that may have wrapped around) is not read: what
    is run are the shard's own graphs, which are the largest work that the limits allow.
    """
    limits = shard.info.limits
    max_prefill_tokens = request.max_prefill_tokens
    if max_prefill_tokens > limits.num_cached_tokens:
        raise EngineError(
            ErrorKind.INVALID,
            f"the router's max_batch_prefill_tokens {max_prefill_tokens} is more than the {limits.num_cached_tokens} "
            f"tokens that all slots hold: start the router with --max-batch-prefill-tokens {limits.num_cached_tokens}, "
            "or the shard with a larger --max-batch-size",
        )
    has_input, has_total = request.HasField("max_input_tokens"), request.HasField("max_total_tokens")
    max_total_tokens = request.max_total_tokens if has_total else limits.max_total_tokens
    longest_input = min(limits.max_input_tokens, max_total_tokens - 1, max_prefill_tokens or limits.max_input_tokens)
    max_input_tokens = request.max_input_tokens if has_input else longest_input
    if not 1 <= max_input_tokens < max_total_tokens:
        raise EngineError(
            ErrorKind.INVALID,
            f"the router's max_input_tokens {max_input_tokens} and max_total_tokens {max_total_tokens} leave no room",
        )
    total = await shard.warm_up(max_input_tokens, max_total_tokens)
    return pb.WarmupResponse(
        max_supported_total_tokens=total, max_input_tokens=max_input_tokens, max_total_tokens=max_total_tokens
    )
