"""Two agents behind the root's mailbox that answer with one tiny model after the other.

An agent takes seconds to start and a tiny model takes none to load, so the agents stay and the models change.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from tests.families import Answers, outputs, settings_of
from tpu_tgi_server.config import Device, Settings
from tpu_tgi_server.engine.types import ModelInfo
from tpu_tgi_server.mailbox.root import RootMailbox
from tpu_tgi_server.pb.v2 import generate_pb2 as pb
from tpu_tgi_server.runtime.interface import Runtime
from tpu_tgi_server.service.v2 import CONVERTER

LOADER = "tests.family_replicas:load_one_by_one"

ResultT = TypeVar("ResultT")


class OneByOne:
    """Owns the generator of one of several models. A Clear of everything goes on to the next, in a circle."""

    def __init__(self, settings: Settings, runtime: Runtime) -> None:
        self._settings = settings
        self._runtime = runtime
        self._folders = json.loads(settings.model_id)
        self.info = self._load()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def clear(self, batch_id: int | None) -> None:
        self._generator.clear(batch_id)
        if batch_id is None:
            self._folders = [*self._folders[1:], self._folders[0]]
            self._load()

    def _load(self) -> ModelInfo:
        from tpu_tgi_server.engine.loading import load_generator

        settings = replace(self._settings, model_id=self._folders[0])
        self._generator, info = load_generator(settings, self._runtime, lambda *_: None)
        return info


def load_one_by_one(
    settings: Settings, runtime: Runtime, _on_stage: Callable[[str, int, int], None]
) -> tuple[OneByOne, ModelInfo]:
    """A loader for agents: the model id is a JSON list of folders."""
    generator = OneByOne(settings, runtime)
    return generator, generator.info


class MailboxStub:
    """Owns the event loop of a mailbox, and runs it while a call lasts."""

    def __init__(self, mailbox: RootMailbox, runner: asyncio.Runner) -> None:
        self._mailbox = mailbox
        self._runner = runner

    def Prefill(self, request: pb.PrefillRequest, /) -> Any:  # noqa: N802
        return CONVERTER.prefill_response(self._run(self._mailbox.prefill(CONVERTER.batch(request.batch))))

    def Decode(self, request: pb.DecodeRequest, /) -> Any:  # noqa: N802
        batches = tuple(map(CONVERTER.cached_batch, request.batches))
        return CONVERTER.decode_response(self._run(self._mailbox.decode(batches)))

    def FilterBatch(self, request: pb.FilterBatchRequest, /) -> pb.FilterBatchResponse:  # noqa: N802
        batch = self._run(self._mailbox.filter(request.batch_id, tuple(request.request_ids)))
        return pb.FilterBatchResponse(batch=CONVERTER.cached_batch_message(batch))

    def ClearCache(self, request: pb.ClearCacheRequest, /) -> pb.ClearCacheResponse:  # noqa: N802
        self._run(self._mailbox.clear(request.id if request.HasField("id") else None))
        return pb.ClearCacheResponse()

    def _run(self, work: Coroutine[Any, Any, ResultT]) -> ResultT:
        return self._runner.run(work)


def collect_from_replicas(folders: list[Path]) -> dict[str, Answers]:
    """The answers of all models. What is on the device is not to be had through a mailbox."""
    settings = settings_of(
        json.dumps([str(folder) for folder in folders]), Device.CPU, replicas=2, logger_level="ERROR"
    )

    async def make() -> RootMailbox:
        mailbox = RootMailbox(settings, lambda _: None, LOADER)
        await mailbox.start()
        return mailbox

    with asyncio.Runner() as runner:
        mailbox = runner.run(make())
        stub = MailboxStub(mailbox, runner)
        answers = {}
        try:
            for folder in folders:
                answers[folder.name] = Answers(*outputs(stub), logits=[], ring_lens=[])
                stub.ClearCache(pb.ClearCacheRequest())
        finally:
            runner.run(mailbox.close())
    return answers
