"""Requests with any mix of parameters, joined, filtered and dropped in any order, get what they get alone."""

import random
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from tests.driver import Answer, Driver, GeneratorStub
from tests.parameters import random_request
from tests.tiny_model import save_tiny_model
from tpu_tgi_server.config import Device, Settings
from tpu_tgi_server.engine.generator import Generator
from tpu_tgi_server.engine.loading import load_generator
from tpu_tgi_server.pb.v2 import generate_pb2 as pb
from tpu_tgi_server.runtime.cpu import CpuRuntime

MAX_INPUT_TOKENS = 24
MAX_NEW_TOKENS = 8
NUM_SLOTS = 4
MAX_REQUESTS = 8


@cache
def shared_generator(name: str, prefill_chunk_tokens: int, decode_steps: int) -> Generator:
    """One model for all runs together, and another that answers every request alone."""
    with TemporaryDirectory(name) as folder:
        save_tiny_model(Path(folder))
        options = Settings(
            folder,
            device=Device.CPU,
            max_batch_size=NUM_SLOTS,
            max_total_tokens=48,
            prefill_chunk_tokens=prefill_chunk_tokens,
            decode_steps=decode_steps,
        )
        return load_generator(options, CpuRuntime(), lambda *_: None)[0]


def alone(request: pb.Request) -> Answer:
    generator = shared_generator("alone", prefill_chunk_tokens=512, decode_steps=1)
    (answer,) = Driver(GeneratorStub(generator)).run(request.id, request)
    return answer


class Router(RuleBasedStateMachine):
    """Owns the live batches of a router that may do anything the protocol allows."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = Driver(None)
        self.requests: dict[int, pb.Request] = {}
        self.batches: dict[int, pb.CachedBatch] = {}

    @initialize(chunk_tokens=st.sampled_from([16, 512]), decode_steps=st.sampled_from([1, 3]), ahead=st.booleans())
    def start(self, chunk_tokens: int, decode_steps: int, ahead: bool) -> None:
        """Prompts longer than a chunk, several tokens a call, and steps ahead of the router."""
        generator = shared_generator("together", chunk_tokens, decode_steps)
        self.driver = Driver(GeneratorStub(generator, ahead))
        self.driver.clear()

    @rule(seed=st.integers(0, 10**6), size=st.integers(1, 3))
    def prefill(self, seed: int, size: int) -> None:
        if len(self.requests) >= MAX_REQUESTS:
            return
        chance = random.Random(seed)
        first = len(self.requests) + 1
        new = [random_request(chance, first + n, MAX_INPUT_TOKENS, MAX_NEW_TOKENS) for n in range(size)]
        self.requests.update((request.id, request) for request in new)
        self._keep(self.driver.prefill(first, *new))

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.batches)), min_size=1, unique=True))
        self._keep(self.driver.decode(*[self.batches.pop(id) for id in ids]))

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def filter(self, data: st.DataObject) -> None:
        batch = self.batches[data.draw(st.sampled_from(sorted(self.batches)))]
        kept = data.draw(st.lists(st.sampled_from(list(batch.request_ids)), unique=True))
        del self.batches[batch.id]
        self._keep(self.driver.filter(batch, kept))

    def teardown(self) -> None:
        """What is left goes on to its end; whatever each request has brought is what it gets alone."""
        left = list(self.batches.values())
        survivors = {id for batch in left for id in batch.request_ids}
        self.driver.drain(self.driver.decode(*left) if left else None)
        for id, request in self.requests.items():
            answer, expected = self.driver.answers[id], alone(request)
            assert answer.ids == expected.ids[: len(answer.ids)]
            assert answer.logprobs == pytest.approx(expected.logprobs[: len(answer.ids)], abs=1e-4)
            assert [list(top.ids) for top in answer.top_tokens] == [
                list(top.ids) for top in expected.top_tokens[: len(answer.ids)]
            ]
            assert answer.texts == expected.texts[: len(answer.ids)]
            if id in survivors:
                assert answer.end == expected.end

    def _keep(self, batch: pb.CachedBatch | None) -> None:
        if batch is not None:
            self.batches[batch.id] = batch


TestRouter = Router.TestCase
TestRouter.settings = settings(max_examples=40, stateful_step_count=20, deadline=None, derandomize=True, database=None)
