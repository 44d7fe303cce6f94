"""The eight RPCs over a real socket, with a scripted agent behind them."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.driver import Driver, new_request
from tests.reference import encode
from tests.scripted import Faults, arithmetic_id
from tests.servers import ServerProcess, ready_server, start_scripted_server
from tpu_tgi_server.engine.types import LIVENESS_ID
from tpu_tgi_server.pb.v2 import generate_pb2 as pb


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ready_server(start_scripted_server(tmp_path_factory.mktemp("rpcs"), Faults())) as server:
        yield server


@pytest.fixture
def stub(server: ServerProcess) -> Iterator[Any]:
    with server.connect() as stub:
        stub.ClearCache(pb.ClearCacheRequest())
        yield stub


def refusal_of(call: Any, request: Any) -> Any:
    with pytest.raises(grpc.RpcError) as refusal:
        call(request)
    return refusal.value


def test_health(stub: Any) -> None:
    assert stub.Health(pb.HealthRequest()) == pb.HealthResponse()


def test_info(stub: Any) -> None:
    info = stub.Info(pb.InfoRequest())
    assert info == pb.InfoResponse(requires_padding=True, dtype="torch.float32", device_type="cpu", speculate=0)
    assert not info.HasField("window_size")


def test_service_discovery_names_the_socket(stub: Any, server: ServerProcess) -> None:
    assert list(stub.ServiceDiscovery(pb.ServiceDiscoveryRequest()).urls) == [f"unix://{server.socket}"]


def test_reflection_lists_the_service(server: ServerProcess) -> None:
    with grpc.insecure_channel(f"unix:{server.socket}") as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        (answer,) = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    names = [service.name for service in answer.list_services_response.service]
    assert "generate.v2.TextGenerationService" in names


def test_warm_up_reports_the_tokens_of_all_slots(stub: Any) -> None:
    response = stub.Warmup(pb.WarmupRequest(max_input_length=255, max_prefill_tokens=255, max_total_tokens=256))
    assert response.max_supported_total_tokens == 4 * 256


@pytest.mark.parametrize(
    ("warm_up", "flag"),
    [
        (pb.WarmupRequest(max_input_length=10, max_total_tokens=257), "--max-total-tokens 257"),
        (pb.WarmupRequest(max_input_length=256, max_total_tokens=256), "--max-input-tokens 256"),
    ],
)
def test_warm_up_beyond_the_limits_names_the_flag(stub: Any, warm_up: pb.WarmupRequest, flag: str) -> None:
    error = refusal_of(stub.Warmup, warm_up)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert flag in error.details()


def test_warm_up_of_a_busy_server_is_refused(stub: Any) -> None:
    driver = Driver(stub)
    batch = driver.prefill(1, new_request(1, "a"))
    assert refusal_of(stub.Warmup, pb.WarmupRequest()).code() is grpc.StatusCode.FAILED_PRECONDITION
    driver.drain(batch)


def test_answers_of_interleaved_batches_follow_the_script(stub: Any) -> None:
    driver = Driver(stub)
    first = driver.prefill(1, new_request(1, "one", new=6), new_request(2, "two", new=3))
    assert first is not None
    second = driver.prefill(2, new_request(3, "three", new=4))
    assert second is not None
    driver.drain(driver.decode(first, second))
    for request_id, prompt, new in ((1, "one", 6), (2, "two", 3), (3, "three", 4)):
        assert driver.answers[request_id].ids == [arithmetic_id(encode(prompt), step) for step in range(new)]


def test_steps_report_their_times(stub: Any) -> None:
    batch = pb.Batch(id=1, requests=[new_request(1, "a", new=2)], size=1)
    prefilled = stub.Prefill(pb.PrefillRequest(batch=batch))
    decoded = stub.Decode(pb.DecodeRequest(batches=[prefilled.batch]))
    for response in (prefilled, decoded):
        assert response.forward_ns > 0
        assert response.decode_ns > 0
    assert decoded.concat_ns > 0
    assert prefilled.total_ns == prefilled.forward_ns + prefilled.decode_ns
    assert decoded.total_ns == decoded.concat_ns + decoded.forward_ns + decoded.decode_ns


def test_decode_of_an_unknown_batch_is_not_found(stub: Any) -> None:
    request = pb.DecodeRequest(batches=[pb.CachedBatch(id=77, request_ids=[1], size=1)])
    error = refusal_of(stub.Decode, request)
    assert (error.code(), "77" in error.details()) == (grpc.StatusCode.NOT_FOUND, True)


def test_filter_and_clear_of_unknown_batches_do_nothing(stub: Any) -> None:
    assert not stub.FilterBatch(pb.FilterBatchRequest(batch_id=77, request_ids=[1])).HasField("batch")
    stub.ClearCache(pb.ClearCacheRequest(id=77))


def test_batch_id_zero_is_an_id(stub: Any) -> None:
    """ClearCache of batch 0 is not ClearCache of everything."""
    driver = Driver(stub)
    zero = driver.prefill(0, new_request(0, "zero"))
    other = driver.prefill(5, new_request(5, "other", new=3))
    driver.clear(zero)
    driver.drain(other)
    assert len(driver.answers[5].ids) == 3
    assert zero is not None
    assert refusal_of(stub.Decode, pb.DecodeRequest(batches=[zero])).code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("top_n_tokens", {"top_n_tokens": 1000}),
        ("temperature", {"parameters": pb.NextTokenChooserParameters(temperature=-0.5)}),
        ("grammar", {"parameters": pb.NextTokenChooserParameters(grammar="(", grammar_type="GRAMMAR_TYPE_REGEX")}),
        ("grammar_type", {"parameters": pb.NextTokenChooserParameters.FromString(b"\x58\x09")}),
    ],
)
def test_refusal_is_an_invalid_argument_that_names_the_field(stub: Any, field: str, change: dict[str, Any]) -> None:
    request = new_request(1, "a")
    request.MergeFrom(pb.Request(**change))
    batch = pb.Batch(id=1, requests=[request], size=1)
    error = refusal_of(stub.Prefill, pb.PrefillRequest(batch=batch))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"request 1: {field} " in error.details()


def test_liveness_probe(stub: Any) -> None:
    driver = Driver(stub)
    (answer,) = driver.run(LIVENESS_ID, new_request(LIVENESS_ID, "liveness", new=1, truncate=10))
    assert len(answer.ids) == 1


def test_prompt_beyond_the_default_message_size_of_grpc_is_taken_if_it_is_truncated(server: ServerProcess) -> None:
    with server.connect() as stub:
        (answer,) = Driver(stub).run(1, new_request(1, "word " * 850_000, new=2, truncate=10))
    kept = encode("word word word word word ")[-9:]
    assert answer.ids[0] == arithmetic_id([0, *kept], 0)
