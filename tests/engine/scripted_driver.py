"""A generator over the scripted model, driven as a router drives a shard."""

from tests.driver import Driver, GeneratorStub, new_request
from tests.scripted import Script, ScriptedModel, arithmetic_id, logprob_of
from tests.tiny_model import byte_level_tokenizer
from tpu_tgi_server.engine.generator import Generator
from tpu_tgi_server.engine.tokenizer import Tokenizer
from tpu_tgi_server.engine.types import Limits, Pace
from tpu_tgi_server.pb.v2 import generate_pb2 as pb

NUM_SLOTS = 4
MAX_TOTAL_TOKENS = 256


class ScriptedDriver(Driver):
    """Owns a generator of its own, whose model follows the arithmetic script unless another is given."""

    def __init__(
        self,
        num_slots: int = NUM_SLOTS,
        script: Script | None = None,
        tokenizer: Tokenizer | None = None,
        max_prefill_tokens: int | None = None,
        pace: Pace = Pace(),  # noqa: B008 - it is frozen
        steps_ahead: bool = False,
    ) -> None:
        self.limits = Limits(num_slots, max_input_tokens=MAX_TOTAL_TOKENS - 1, max_total_tokens=MAX_TOTAL_TOKENS)
        self.tokenizer = tokenizer or TOKENIZER
        self.model = ScriptedModel(self.limits, script, max_prefill_tokens)
        self.generator = Generator(self.model, self.tokenizer, self.limits, pace=pace)
        super().__init__(GeneratorStub(self.generator, steps_ahead))

    def check(self, request: pb.Request) -> None:
        """Fail unless what a request has brought so far is what the arithmetic script gives to it alone."""
        answer = self.answers[request.id]
        prompt_ids = self.tokenizer.encode(request.inputs, request.truncate, None)
        assert answer.ids == [arithmetic_id(prompt_ids, step) for step in range(len(answer.ids))]
        assert answer.logprobs == [round_to_float32(logprob_of(id)) for id in answer.ids]

    def check_all_slots_free(self) -> None:
        """Fail unless as many requests as there are slots start at once."""
        first = max(self.answers, default=0) + 1
        requests = [new_probe(first + number) for number in range(self.limits.num_slots)]
        batch = self.prefill(first, *requests)
        assert all(len(self.answers[request.id].ids) == 1 for request in requests), "a slot has leaked"
        self.drain(batch)
        for request in requests:
            self.check(request)


def new_probe(request_id: int) -> pb.Request:
    return new_request(request_id, f"probe {request_id}", new=2)


def round_to_float32(value: float) -> float:
    """What is left of a number in a `float` field of protobuf."""
    return pb.Tokens(logprobs=[value]).logprobs[0]


TOKENIZER = Tokenizer(byte_level_tokenizer())
