"""Several prompts in one batch, streamed: what a router does with one client, without the router."""

import os
import random
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import grpc

from tpu_tgi_server.client.display import AnswerDisplay, open_display
from tpu_tgi_server.pb.v2 import generate_pb2 as pb
from tpu_tgi_server.pb.v2 import generate_pb2_grpc

MODEL_FOLDER_KEY = "tpu-tgi-model-folder"
"""Metadata of the server's Info response: where its model is, and so its chat template, on the same host."""


class ClientError(Exception):
    """Something the person at the terminal can act on."""


@dataclass
class Figures:
    """Owns the timestamps of one run, in seconds."""

    started: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    num_tokens: int = 0

    def count(self, num_tokens: int) -> None:
        """Tokens have just arrived."""
        if self.first_token is None:
            self.first_token = time.perf_counter()
        self.num_tokens += num_tokens

    def __str__(self) -> str:
        elapsed = time.perf_counter() - self.started
        to_first = (self.first_token or self.started) - self.started
        return (
            f"{self.num_tokens} tokens, first after {to_first * 1000:.0f} ms, {self.num_tokens / elapsed:.1f} tokens/s"
        )


async def generate(prompts: list[str], socket_path: Path, max_new_tokens: int, chat: bool) -> None:
    """Answer the prompts on standard output and end with a line of figures.

    Raises:
        ClientError: no server is there, it refused a prompt, or it died.
        OSError: standard output takes no more.
    """
    if not socket_path.exists():
        raise ClientError(f"no server at {socket_path}: start one with tpu-tgi-serve, or give --uds-path")
    async with grpc.aio.insecure_channel(f"unix:{socket_path}") as channel:
        stub: Any = generate_pb2_grpc.TextGenerationServiceStub(channel)
        try:
            inputs = await _apply_chat_template(stub, prompts) if chat else prompts
            figures = Figures()
            batch = _new_batch(inputs, max_new_tokens)
            try:
                with open_display(prompts) as display:
                    await _stream(stub, batch, display, figures)
            finally:
                # or an answer that cannot be shown any more would keep its slot for ever
                with suppress(grpc.aio.AioRpcError):
                    await stub.ClearCache(pb.ClearCacheRequest(id=batch.id))
            print(figures, flush=True)
        except grpc.aio.AioRpcError as error:
            raise ClientError(error.details()) from error


async def _stream(stub: Any, batch: pb.Batch, display: AnswerDisplay, figures: Figures) -> None:
    rows = {request.id: row for row, request in enumerate(batch.requests)}
    response = await stub.Prefill(pb.PrefillRequest(batch=batch))
    while True:
        for generation in response.generations:
            row = rows[generation.request_id]
            figures.count(len(generation.tokens.ids))
            display.add(row, _visible_text(generation.tokens))
            if generation.HasField("generated_text"):
                display.finish(row)
        if not response.HasField("batch"):
            return
        response = await stub.Decode(pb.DecodeRequest(batches=[response.batch]))


def _visible_text(tokens: pb.Tokens) -> str:
    return "".join(text for text, special in zip(tokens.texts, tokens.is_special, strict=True) if not special)


def _new_batch(inputs: Iterable[str], max_new_tokens: int) -> pb.Batch:
    """Ids are random, so that several clients and a router can use one server.

    Raises:
        ClientError: a prompt is not text, or the number does not fit the wire format.
    """
    try:
        return _batch(inputs, max_new_tokens)
    except ValueError as error:
        raise ClientError(f"this cannot be sent: {error}") from error


def _batch(inputs: Iterable[str], max_new_tokens: int) -> pb.Batch:
    requests = [
        pb.Request(
            id=random.getrandbits(63),
            inputs=text,
            parameters=pb.NextTokenChooserParameters(temperature=1.0, top_p=1.0, typical_p=1.0, repetition_penalty=1.0),
            stopping_parameters=pb.StoppingCriteriaParameters(max_new_tokens=max_new_tokens),
        )
        for text in inputs
    ]
    return pb.Batch(id=random.getrandbits(63), requests=requests, size=len(requests))


async def _apply_chat_template(stub: Any, prompts: list[str]) -> list[str]:
    call = stub.Info(pb.InfoRequest())
    metadata = dict(await call.initial_metadata())
    folder = metadata.get(MODEL_FOLDER_KEY)
    if folder is None:
        raise ClientError("the server does not say where its model is: use --raw")
    folder = unquote(str(folder))
    os.environ["USE_TORCH_XLA"] = "0"  # or importing transformers imports torch_xla too
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ClientError(f"the model's tokenizer cannot be read: {error}: use --raw") from error
    if tokenizer.chat_template is None:
        raise ClientError(f"{folder} has no chat template: use --raw")
    return [
        tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True)
        for prompt in prompts
    ]
