"""What a model folder's generation_config.json decides, and what it does not."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.driver import Answer, Driver, GeneratorStub, new_request
from tests.reference import greedy_reference, prompt_of_len
from tpu_tgi_server.config import Device, Settings
from tpu_tgi_server.engine.loading import load_generator
from tpu_tgi_server.pb.v2 import generate_pb2 as pb
from tpu_tgi_server.runtime.cpu import CpuRuntime

PROMPT = prompt_of_len(9)


def ask(folder: Path, new: int, ignore_eos: bool = False, **parameters: Any) -> Answer:
    settings = Settings(str(folder), device=Device.CPU, max_total_tokens=64)
    generator, _ = load_generator(settings, CpuRuntime(), lambda *_: None)
    request = new_request(1, PROMPT, new=new, ignore_eos=ignore_eos, parameters=parameters)
    (answer,) = Driver(GeneratorStub(generator)).run(1, request)
    return answer


def folder_with(tiny_model_folder: Path, tmp_path: Path, **generation_config: Any) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model_folder, folder)
    (folder / "generation_config.json").write_text(json.dumps(generation_config))
    return folder


@pytest.fixture
def end_id(tiny_model_folder: Path) -> int:
    """The fifth greedy token, which does not come earlier."""
    ids = greedy_reference(tiny_model_folder, PROMPT).ids
    assert ids[4] not in ids[:4]
    return ids[4]


def test_every_end_id_of_the_list_ends_a_request(tiny_model_folder: Path, tmp_path: Path, end_id: int) -> None:
    folder = folder_with(tiny_model_folder, tmp_path, eos_token_id=[1, end_id])
    end = ask(folder, new=20).end
    assert end is not None
    assert (end.generated_tokens, end.finish_reason) == (5, pb.FINISH_REASON_EOS_TOKEN)


def test_every_end_id_is_ignored_if_asked(tiny_model_folder: Path, tmp_path: Path, end_id: int) -> None:
    folder = folder_with(tiny_model_folder, tmp_path, eos_token_id=[1, end_id])
    end = ask(folder, new=20, ignore_eos=True).end
    assert end is not None
    assert (end.generated_tokens, end.finish_reason) == (20, pb.FINISH_REASON_LENGTH)


def test_end_token_that_is_also_the_last_allowed_is_an_end_token(
    tiny_model_folder: Path, tmp_path: Path, end_id: int
) -> None:
    folder = folder_with(tiny_model_folder, tmp_path, eos_token_id=end_id)
    end = ask(folder, new=5).end
    assert end is not None
    assert end.finish_reason == pb.FINISH_REASON_EOS_TOKEN


def test_no_end_id_at_all_is_no_error(tiny_model_folder: Path, tmp_path: Path) -> None:
    assert len(ask(folder_with(tiny_model_folder, tmp_path, eos_token_id=None), new=5).ids) == 5


def test_end_ids_of_the_models_config_count_where_there_is_no_generation_config(
    tiny_model_folder: Path, tmp_path: Path, end_id: int
) -> None:
    folder = folder_with(tiny_model_folder, tmp_path)
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": [1, end_id]}))
    end = ask(folder, new=20).end
    assert end is not None
    assert (end.generated_tokens, end.finish_reason) == (5, pb.FINISH_REASON_EOS_TOKEN)


def test_sampling_defaults_of_the_folder_are_not_used(tiny_model_folder: Path, tmp_path: Path) -> None:
    """As in TGI, what a client leaves out is neutral. With the folder's top_k every draw would be the best token."""
    folder = folder_with(tiny_model_folder, tmp_path, top_k=1, do_sample=True, temperature=0.01)
    drawn = {tuple(ask(folder, 4, ignore_eos=True, do_sample=True, temperature=3.0, seed=n).ids) for n in range(4)}
    assert len(drawn) > 1
    greedy = ask(folder, 4, ignore_eos=True)
    assert tuple(greedy.ids) == greedy_reference(tiny_model_folder, PROMPT).ids[:4]
