"""Any order of prefill, decode, filter and clear leaves every survivor with the tokens that it gets alone."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.driver import new_request
from tests.engine.scripted_driver import ScriptedDriver
from tpu_tgi_server.engine.types import LIVENESS_ID, Pace
from tpu_tgi_server.pb.v2 import generate_pb2 as pb

NUM_SLOTS = 3


class Router(RuleBasedStateMachine):
    """Owns the live batches, as a router that may do anything the protocol allows."""

    def __init__(self) -> None:
        super().__init__()
        self.driver = ScriptedDriver(NUM_SLOTS)
        self.requests: dict[int, pb.Request] = {}
        self.batches: dict[int, pb.CachedBatch] = {}
        self.next_id = 0

    @initialize(
        row_tokens=st.integers(5, 40), pace=st.builds(Pace, st.just(40), st.integers(1, 4)), ahead=st.booleans()
    )
    def start(self, row_tokens: int, pace: Pace, ahead: bool) -> None:
        """Prompts longer than a row go through in chunks."""
        self.driver = ScriptedDriver(NUM_SLOTS, max_prefill_tokens=row_tokens, pace=pace, steps_ahead=ahead)

    @rule(shapes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 6)), min_size=1, max_size=5))
    def prefill(self, shapes: list[tuple[int, int]]) -> None:
        requests = []
        for prompt_len, new in shapes:
            self.next_id += 1
            requests.append(new_request(self.next_id, f"{self.next_id}".zfill(prompt_len), new=new))
        self.requests.update((request.id, request) for request in requests)
        self._keep(self.driver.prefill(self.next_id, *requests))

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def decode(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(sorted(self.batches)), min_size=1, unique=True))
        named = [self._forget_some(data, self.batches[id]) for id in ids]
        for id in ids:
            del self.batches[id]
        self._keep(self.driver.decode(*named))

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def filter(self, data: st.DataObject) -> None:
        batch = self._pick(data)
        kept = data.draw(st.lists(st.sampled_from(list(batch.request_ids)), unique=True))
        del self.batches[batch.id]
        filtered = self.driver.filter(batch, kept)
        assert sorted(filtered.request_ids if filtered else []) == sorted(kept)
        self._keep(filtered)

    @precondition(lambda self: self.batches)
    @rule(data=st.data())
    def clear(self, data: st.DataObject) -> None:
        batch = self._pick(data)
        self.driver.clear(batch)
        del self.batches[batch.id]

    @rule()
    def probe(self) -> None:
        self.driver.answers.pop(LIVENESS_ID, None)
        assert self.driver.prefill(LIVENESS_ID, new_request(LIVENESS_ID, "liveness", new=1)) is None
        assert len(self.driver.answers.pop(LIVENESS_ID).ids) == 1

    @invariant()
    def every_answer_is_the_one_it_gets_alone(self) -> None:
        for request in self.requests.values():
            self.driver.check(request)
            assert len(self.driver.answers[request.id].ids) <= request.stopping_parameters.max_new_tokens

    def teardown(self) -> None:
        """What is left ends together, and all slots are free."""
        left = list(self.batches.values())
        ids = [id for batch in left for id in batch.request_ids]
        self.driver.drain(self.driver.decode(*left) if left else None)
        for id in ids:
            assert len(self.driver.answers[id].ids) == self.requests[id].stopping_parameters.max_new_tokens
        self.every_answer_is_the_one_it_gets_alone()
        self.driver.check_all_slots_free()

    def _keep(self, batch: pb.CachedBatch | None) -> None:
        if batch is not None:
            self.batches[batch.id] = batch

    def _pick(self, data: st.DataObject) -> pb.CachedBatch:
        """Any of them. It stays there until everything is drawn, as hypothesis may end an example in every draw."""
        return self.batches[data.draw(st.sampled_from(sorted(self.batches)))]

    def _forget_some(self, data: st.DataObject, batch: pb.CachedBatch) -> pb.CachedBatch:
        """Sometimes the router leaves out requests whose clients are gone."""
        ids = list(batch.request_ids)
        if len(ids) > 1 and data.draw(st.booleans()):
            ids = data.draw(st.lists(st.sampled_from(ids), min_size=1, unique=True))
        return pb.CachedBatch(id=batch.id, request_ids=ids, size=len(ids), max_tokens=batch.max_tokens)


TestRouter = Router.TestCase
TestRouter.settings = settings(max_examples=80, stateful_step_count=25)
