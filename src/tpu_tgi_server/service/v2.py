"""generate.v2: what the second version of the protocol has of its own."""

from typing import Any

from tpu_tgi_server.engine.types import ModelInfo
from tpu_tgi_server.pb.v2 import generate_pb2 as pb
from tpu_tgi_server.pb.v2.generate_pb2_grpc import add_TextGenerationServiceServicer_to_server as add_to_server
from tpu_tgi_server.service.convert import Converter, Message
from tpu_tgi_server.service.servicer import Servicer
from tpu_tgi_server.service.shard import Shard

__all__ = ["CONVERTER", "add_to_server", "make_servicer", "pb"]


def read_prompt(request: Message) -> tuple[str, bool | None]:
    """v2 says nothing of special tokens: the engine adds them unless the text already starts with BOS."""
    return request.inputs, None


CONVERTER = Converter(pb, read_prompt)


def make_servicer(shard: Shard) -> Servicer:
    """The servicer of generate.v2."""
    return Servicer(shard, CONVERTER, info_fields, warm_up)


def info_fields(info: ModelInfo) -> dict[str, Any]:
    """`requires_padding` makes the router count slots of full length, which is what they are."""
    return {
        "requires_padding": True,
        "dtype": info.dtype,
        "device_type": info.device_type,
        "window_size": info.sliding_window,
        "speculate": 0,
    }


async def warm_up(shard: Shard, request: Message) -> Message:
    """The router asks with its limits, and takes the answer as its budget of tokens."""
    total = await shard.warm_up(request.max_input_length, request.max_total_tokens)
    return pb.WarmupResponse(max_supported_total_tokens=total)
