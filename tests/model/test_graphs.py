"""The fixed set of graphs, as XLA itself counts it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.servers import ROOT
from tests.tiny_model import NUM_LAYERS
from tests.xla_facts import Facts, StepFacts


@pytest.fixture(scope="module")
def facts(tiny_model_folder: Path) -> dict[int, Facts]:
    """Facts for servers of 1, 4 and 16 slots."""
    num_requests = {1: 0, 4: 200, 16: 0}
    return {slots: collect_in_process(tiny_model_folder, slots, requests) for slots, requests in num_requests.items()}


@pytest.fixture(scope="module")
def windowed_dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what XLA made of the graphs of `windowed_facts`."""
    return tmp_path_factory.mktemp("windowed-dump")


@pytest.fixture(scope="module")
def windowed_facts(windowed_model_folder: Path, windowed_dump: Path) -> Facts:
    """Facts for a server of 4 slots whose second layer has 48 cells: a window of 8 and a row of 32, in units of 16."""
    return collect_in_process(windowed_model_folder, 4, 50, dump=windowed_dump)


def collect_in_process(
    folder: Path, num_slots: int, num_requests: int, parallel: str = "auto", dump: Path | None = None
) -> Facts:
    """Facts from a process of its own, which may write down what XLA makes of its graphs."""
    command = [sys.executable, "-m", "tests.xla_facts", str(folder), str(num_slots), str(num_requests), parallel]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    if dump is not None:
        environment["XLA_FLAGS"] += f" --xla_dump_to={dump} --xla_dump_hlo_as_text"
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    steps: dict[str, Any] = {name: StepFacts(**found.pop(name)) for name in list(found) if name.endswith("_step")}
    return Facts(**found, **steps)


def test_loading_compiles_nothing(facts: dict[int, Facts]) -> None:
    assert [fact.num_compiled_while_loading for fact in facts.values()] == [0, 0, 0]


def test_warm_up_compiles_exactly_the_listed_graphs_for_any_number_of_slots(facts: dict[int, Facts]) -> None:
    assert facts[4].num_graphs == 6
    assert [fact.num_compiled_by_warm_up for fact in facts.values()] == [fact.num_graphs for fact in facts.values()]
    assert len({fact.num_graphs for fact in facts.values()}) == 1


def test_a_second_warm_up_compiles_nothing(facts: dict[int, Facts]) -> None:
    assert [fact.num_compiled_by_second_warm_up for fact in facts.values()] == [0, 0, 0]


def test_nothing_compiles_for_random_requests_after_warm_up(facts: dict[int, Facts]) -> None:
    """200 requests go to the server of 4 slots."""
    assert facts[4].num_compiled_by_requests == 0


def test_every_graph_updates_the_whole_cache_in_place(facts: dict[int, Facts]) -> None:
    """Keys and values of each layer are donated buffers, and in graphs with a sampler the token counts too."""
    for fact in facts.values():
        greedy = fact.num_graphs // 2 * 2 * NUM_LAYERS
        sampled = fact.num_graphs // 2 * (2 * NUM_LAYERS + 1)
        assert fact.num_aliased_buffers == greedy + sampled


def test_a_decode_step_is_one_execution_with_few_transfers(facts: dict[int, Facts]) -> None:
    """Tokens, sampler and, with a grammar, masks go up; one vector comes down; no operator runs on the host."""
    for fact in facts.values():
        assert fact.greedy_step == StepFacts(1, 1, 1, 0)
        assert fact.sampled_step == StepFacts(1, 1, 1, 0)
        assert fact.masked_step == StepFacts(1, 2, 1, 0)


def test_no_graph_copies_a_layers_keys_or_values(tmp_path: Path, tiny_model_folder: Path) -> None:
    """XLA may hand donated buffers of one shape to each other's results, and then copies them, whatever it counts."""
    collect_in_process(tiny_model_folder, num_slots=4, num_requests=0, dump=tmp_path)
    assert num_copies(tmp_path, 256) == [0] * 6


def num_copies(dump: Path, num_cells: int) -> list[int]:
    """How often each graph copies the keys or values of a layer with so many cells a slot."""
    shape = rf"f32\[4,1,{num_cells},128\]"  # the two heads of 16 in a row of whole lanes
    modules = [path.read_text() for path in dump.glob("*cpu_after_optimizations.txt")]
    return [len(re.findall(rf"= {shape}\S* copy\(", text)) for text in modules if re.search(shape, text)]


def test_all_this_holds_where_layers_differ_in_length(windowed_facts: Facts, windowed_dump: Path) -> None:
    """One of 50 requests goes through all 256 positions."""
    found = windowed_facts
    assert found.num_compiled_by_warm_up == found.num_graphs == 6
    assert found.num_compiled_while_loading == found.num_compiled_by_second_warm_up == 0
    assert found.num_compiled_by_requests == 0
    assert found.num_aliased_buffers == found.num_graphs // 2 * (2 * NUM_LAYERS + 2 * NUM_LAYERS + 1)
    assert found.greedy_step == found.sampled_step == StepFacts(1, 1, 1, 0)
    assert found.masked_step == StepFacts(1, 2, 1, 0)
    assert num_copies(windowed_dump, 256) == num_copies(windowed_dump, 48) == [0] * 6
