"""A model that cannot be served right is refused, with the reason."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from tests.families import FAMILIES, SHAPE, WINDOWS
from tpu_tgi_server.config import Device, Settings
from tpu_tgi_server.engine.loading import load_generator
from tpu_tgi_server.model.architecture import find_model_class, load_config
from tpu_tgi_server.model.probe import layers_to_serve
from tpu_tgi_server.runtime.cpu import CpuRuntime

HEADS = {"num_key_value_heads": 4}
MLA = {
    **HEADS,
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
    **{"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "state space": ("mamba", {}, "recurrent state"),
    "hybrid": ("jamba", {"num_experts": 2}, "recurrent state"),
    "linear attention": ("qwen3_next", {"num_experts": 4}, "recurrent state|layers of linear_attention"),
    "encoder and decoder": ("bart", {"is_encoder_decoder": True}, "only decoders are served"),
    "both directions": ("bert", {}, "attends in both directions"),
    "alibi": ("bloom", {"n_head": 4, "n_layer": 2}, "attention interface"),
    "no attention interface": ("xglm", {"d_model": 32, "num_layers": 2, "attention_heads": 4}, "attention interface"),
    "attention sinks": ("gpt_oss", {"head_dim": 8, "num_local_experts": 4}, "attention sinks"),
    "latent attention": ("deepseek_v3", MLA, "keys and values of different sizes"),
    "chunked attention": ("llama4_text", {"head_dim": 8, "num_local_experts": 2}, "layers of chunked_attention"),
    "dynamic rope": ("llama", {"rope_parameters": DYNAMIC}, "dynamic rotary positions"),
    "quantized": ("llama", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized already"),
}


def windows(model_type: str, fields: dict[str, Any]) -> list[int | None]:
    """Of each layer of a model that is served."""
    config = AutoConfig.for_model(model_type, **{**SHAPE, **fields})
    layers = layers_to_serve(*find_model_class(config, Path("model"), trust_remote_code=False), Path("model"))
    return [layer.window for layer in layers]


@pytest.mark.parametrize("kind", REFUSED)
def test_model_that_the_slots_do_not_fit_is_refused(kind: str) -> None:
    model_type, fields, sentence = REFUSED[kind]
    with pytest.raises(ValueError, match=sentence):
        windows(model_type, fields)


@pytest.mark.parametrize("family", FAMILIES)
def test_family_that_is_served_tells_the_window_of_each_layer(family: str) -> None:
    assert windows(*FAMILIES[family]) == WINDOWS.get(family, [None, None])


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_attention_heads": 3}, "not a multiple of the number of attention heads"),
        ({"num_attention_heads": None}, "'num_attention_heads' expected int"),
        ({"rope_parameters": {"rope_type": "linear"}}, "Missing required keys"),
    ],
)
def test_config_that_transformers_refuses_is_one_sentence_with_its_path(
    tmp_path: Path, fields: dict[str, Any], reason: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **SHAPE, **fields}))
    with pytest.raises(ValueError, match=f"{path} is wrong: .*{reason}") as refusal:
        load_config(tmp_path)
    assert "\n" not in str(refusal.value)


def test_model_that_does_not_continue_text_is_refused() -> None:
    with pytest.raises(ValueError, match="is a t5 model, which does not continue text"):
        find_model_class(AutoConfig.for_model("t5"), Path("model"), trust_remote_code=False)


def test_refusal_names_folder_and_kind_before_any_weight_is_read(tmp_path: Path) -> None:
    from tests.tiny_model import byte_level_tokenizer

    AutoConfig.for_model("mamba", vocab_size=300, hidden_size=32, num_hidden_layers=2).save_pretrained(tmp_path)
    byte_level_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ValueError, match=f"{tmp_path} is a mamba model and keeps a recurrent state"):
        load_generator(Settings(str(tmp_path), device=Device.CPU), CpuRuntime(), lambda *_: None)
