"""The shard under both of TGI's routers: their start, their batching loop, and clients that come, go and fail."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import psutil
import pytest

from tests.reference import NUM_REFERENCE_TOKENS, encode, greedy_reference, prompt_of_len
from tests.router import Entry, Router, RouterLimits, random_patience
from tests.servers import ServerProcess, ready_server, start_model_server
from tpu_tgi_server.pb.v2 import generate_pb2 as pb2
from tpu_tgi_server.pb.v2 import generate_pb2_grpc as grpc2
from tpu_tgi_server.pb.v3 import generate_pb2 as pb3
from tpu_tgi_server.pb.v3 import generate_pb2_grpc as grpc3

NUM_SLOTS = 8
MAX_TOTAL_TOKENS = 128
LIMITS = RouterLimits(max_input_tokens=100, max_total_tokens=MAX_TOTAL_TOKENS, max_batch_prefill_tokens=256)
STUBS: dict[str, tuple[ModuleType, Any]] = {
    "v2": (pb2, grpc2.TextGenerationServiceStub),
    "v3": (pb3, grpc3.TextGenerationServiceStub),
}


@pytest.fixture(scope="module")
def model(tiny_model_folder: Path) -> Path:
    return tiny_model_folder


@contextmanager
def running_server(folder: Path, model: Path) -> Iterator[ServerProcess]:
    options = ["--device", "cpu", "--max-total-tokens", str(MAX_TOTAL_TOKENS), "--max-batch-size", str(NUM_SLOTS)]
    with ready_server(start_model_server(folder, model, *options)) as server:
        yield server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[ServerProcess]:
    with running_server(tmp_path_factory.mktemp("routers"), model) as server:
        yield server


@pytest.fixture(params=["v2", "v3"])
def version(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@contextmanager
def router_on(server: ServerProcess, version: str, limits: RouterLimits = LIMITS) -> Iterator[Router]:
    pb, stub = STUBS[version]
    with grpc.insecure_channel(f"unix:{server.socket}") as channel:
        router = Router(stub(channel), pb, limits)
        router.start()
        yield router


def submit_random(router: Router, chance: random.Random, can_hang_up: bool = True) -> Entry:
    prompt = prompt_of_len(chance.randint(1, 60))
    new = chance.randint(1, NUM_REFERENCE_TOKENS)
    patience = random_patience(chance, new) if can_hang_up else None
    return router.submit(prompt, len(encode(prompt)), patience, new=new)


def check(entry: Entry, model: Path) -> None:
    """Fail unless the answer so far is what transformers gives to the prompt alone."""
    assert entry.error is None
    expected = greedy_reference(model, entry.request.inputs).ids
    assert tuple(entry.answer.ids) == expected[: len(entry.answer.ids)]
    if entry.patience is None:
        assert len(entry.answer.ids) == entry.max_new_tokens


@pytest.mark.parametrize(
    "limits",
    [
        LIMITS,
        RouterLimits(max_batch_prefill_tokens=1024, max_input_tokens=127, max_total_tokens=128),
        RouterLimits(max_batch_prefill_tokens=512, max_input_tokens=10, max_total_tokens=20, max_batch_size=2),
    ],
)
def test_start_sequence(server: ServerProcess, version: str, limits: RouterLimits) -> None:
    with router_on(server, version, limits) as router:
        router.check_health()
        router.check_health(with_prefill=True)


def test_log_has_nothing_of_prompts_or_answers(server: ServerProcess, version: str) -> None:
    """Neither of those that are served nor of those that are refused."""
    secret = "xyzzy plugh"
    with router_on(server, version) as router:
        served = router.submit(secret, 12, new=8, parameters={"do_sample": True, "seed": 1})
        router.run()
        refused = router.submit(secret, 12, new=8, parameters={"temperature": -1.0})
        router.run()
    assert served.answer.end is not None
    assert refused.error is not None
    log = server.log.read_text() + server.errors.read_text()
    assert "xyzzy" not in log + refused.error
    assert served.answer.end.text not in log


def test_v3_takes_the_shards_limits_where_the_router_has_none(server: ServerProcess) -> None:
    with router_on(server, "v3", RouterLimits(max_batch_prefill_tokens=64)):
        pass


@pytest.mark.parametrize("max_batch_size", [None, 4])
def test_every_request_of_a_burst_gets_its_own_answer(
    server: ServerProcess, model: Path, version: str, max_batch_size: int | None
) -> None:
    """Without a batch size the router sends more requests than there are slots."""
    limits = RouterLimits(100, MAX_TOTAL_TOKENS, 256, max_batch_size)
    chance = random.Random(1)
    with router_on(server, version, limits) as router:
        entries = [submit_random(router, chance, can_hang_up=False) for _ in range(40)]
        router.run()
    for entry in entries:
        check(entry, model)
    assert router.num_filter_calls == 0, "nobody has hung up, so there was nothing to filter"


def test_load_with_clients_that_hang_up(server: ServerProcess, model: Path, version: str) -> None:
    """300 requests, 32 in flight on 8 slots, a quarter of them abandoned; health is asked all the while."""
    chance = random.Random(2)
    entries: list[Entry] = []
    process = psutil.Process(server.process.pid)
    family = [process, *process.children(recursive=True)]
    with router_on(server, version, RouterLimits(100, MAX_TOTAL_TOKENS, 256, max_batch_size=12)) as router:

        def keep_32_in_flight() -> None:
            while len(entries) < 300 and router.num_in_flight < 32:
                entries.append(submit_random(router, chance))

        router.on_step = keep_32_in_flight
        num_files = [member.num_fds() for member in family]
        memory = sum(member.memory_info().rss for member in family)
        with asking_for_health(router) as failures:
            router.run()
        assert failures == []
        assert len(entries) == 300
        for entry in entries:
            check(entry, model)
        assert [member.num_fds() for member in family] <= [count + 2 for count in num_files]
        assert sum(member.memory_info().rss for member in family) - memory < 100e6
        router.on_step = lambda: None
        last = [submit_random(router, chance, can_hang_up=False) for _ in range(NUM_SLOTS)]
        router.run()
        for entry in last:
            check(entry, model)


@contextmanager
def asking_for_health(router: Router) -> Iterator[list[BaseException]]:
    """Ask both ways from another thread, as /health does while the batching loop runs."""
    done = threading.Event()
    failures: list[BaseException] = []

    def ask() -> None:
        with_prefill = False
        while not done.wait(0.05):
            with_prefill = not with_prefill
            try:
                router.check_health(with_prefill)
            except BaseException as error:
                failures.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield failures
    finally:
        done.set()
        thread.join()


def test_agent_that_dies_under_load_is_replaced(tmp_path: Path, model: Path, version: str) -> None:
    """Calls in flight fail with a reason, and the same process answers again."""
    chance = random.Random(3)
    with running_server(tmp_path, model) as server, router_on(server, version) as router:
        entries = [submit_random(router, chance, can_hang_up=False) for _ in range(24)]
        agent = server.agent()
        steps = 0

        def kill_at_the_fifth_step() -> None:
            nonlocal steps
            steps += 1
            if steps == 5:
                agent.kill()

        router.on_step = kill_at_the_fifth_step
        router.run()
        assert [entry for entry in entries if entry.error], "the death was not noticed"
        for entry in entries:
            if entry.error is None:
                check(entry, model)
        server.wait_for_log("the model is loaded again")
        again = [submit_random(router, chance, can_hang_up=False) for _ in range(12)]
        router.run()
        for entry in again:
            check(entry, model)
        assert server.process.poll() is None
        assert server.agent().pid != agent.pid


@pytest.mark.parametrize("max_total_tokens", [0, 1])
def test_v3_warm_up_without_room_is_refused_before_anything_compiles(
    server: ServerProcess, max_total_tokens: int
) -> None:
    with grpc.insecure_channel(f"unix:{server.socket}") as channel:
        stub = grpc3.TextGenerationServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refusal:
            stub.Warmup(pb3.WarmupRequest(max_prefill_tokens=64, max_total_tokens=max_total_tokens))
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_model_folder_may_have_any_name(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "modèle 模型"
    folder.symlink_to(model)
    with running_server(tmp_path, folder) as server, router_on(server, "v3") as router:
        router.check_health()


def test_skipped_warm_up_compiles_nothing_and_the_first_request_is_right(tmp_path: Path, model: Path) -> None:
    options = ["--device", "xla-cpu", "--skip-warmup", "--max-total-tokens", "128", "--max-input-tokens", "100"]
    with ready_server(start_model_server(tmp_path, model, *options)) as server:
        with router_on(server, "v2", RouterLimits(100, 128, 256)) as router:
            assert "warming up" not in server.log.read_text()
            entry = router.submit(prompt_of_len(5), 5, new=3)
            router.run()
        check(entry, model)


def test_v3_images_are_refused_by_name_and_the_text_of_chunks_is_the_prompt(server: ServerProcess, model: Path) -> None:
    with router_on(server, "v3") as router:
        refused = router.submit("look", 5, new=2)
        refused.request.input_chunks.chunks.add(image=pb3.Image(data=b"\x89PNG", mimetype="image/png"))
        prompt = prompt_of_len(9)
        served = router.submit(prompt, 9, new=5, adapter_id="some-model")
        router._limits = RouterLimits(100, MAX_TOTAL_TOKENS, 256, max_batch_size=1)
        router.run()
    assert refused.error is not None
    assert "input_chunks" in refused.error
    check(served, model)


def test_v3_says_whether_special_tokens_are_added(server: ServerProcess, model: Path) -> None:
    with router_on(server, "v3") as router:
        plain = router.submit("abc", 3, new=5)
        plain.request.add_special_tokens = False
        router.run()
        with_bos = router.submit("<|bos|>abc", 4, new=5)
        with_bos.request.add_special_tokens = False
        router.run()
    assert tuple(with_bos.answer.ids) == greedy_reference(model, "abc").ids[:5]
    assert plain.answer.ids != with_bos.answer.ids


def test_v3_router_whose_prefill_budget_is_beyond_all_slots_is_told_which_flag_to_change(
    server: ServerProcess,
) -> None:
    with (
        pytest.raises(grpc.RpcError) as refusal,
        router_on(server, "v3", RouterLimits(max_batch_prefill_tokens=NUM_SLOTS * MAX_TOTAL_TOKENS + 1)),
    ):
        pass
    assert "--max-batch-prefill-tokens 1024" in (refusal.value.details() or "")
