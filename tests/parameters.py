"""Random mixes of everything that a request can ask for."""

import random
from typing import Any

from tests.driver import new_request
from tests.reference import prompt_of_len
from tpu_tgi_server.pb.v2 import generate_pb2 as pb

GRAMMARS: list[dict[str, Any]] = [
    {"grammar": "[0-9]{2,6}", "grammar_type": pb.GRAMMAR_TYPE_REGEX},
    {"grammar": "(the |fox |dog )+", "grammar_type": pb.GRAMMAR_TYPE_REGEX},
    {"grammar": '{"type": "array", "items": {"type": "boolean"}}', "grammar_type": pb.GRAMMAR_TYPE_JSON},
]


def random_parameters(chance: random.Random) -> dict[str, Any]:
    """Some of the sampling parameters, with random values."""
    choices: dict[str, Any] = {
        "do_sample": True,
        "temperature": chance.uniform(0.2, 2),
        "top_k": chance.randint(1, 50),
        "top_p": chance.uniform(0.1, 0.99),
        "typical_p": chance.uniform(0.1, 0.99),
        "repetition_penalty": chance.uniform(0.8, 1.6),
        "frequency_penalty": chance.uniform(-2, 2),
        "watermark": True,
    }
    asked = {name: value for name, value in choices.items() if chance.random() < 0.3}
    if chance.random() < 0.25:
        asked |= chance.choice(GRAMMARS)
    return {**asked, "seed": chance.getrandbits(64)}


def random_request(chance: random.Random, request_id: int, max_input_tokens: int, max_new_tokens: int) -> pb.Request:
    """A request with random fields; about a third of them ask for nothing special."""
    fields: dict[str, Any] = {}
    if chance.random() < 0.7:
        fields = {
            "parameters": random_parameters(chance),
            "stop": chance.choice([(), (), ("e", "the"), ("zzz",)]),
            "top_n_tokens": chance.choice([0, 0, 2, 7]),
            "prefill_logprobs": chance.random() < 0.2,
            "truncate": chance.choice([0, 0, 4, max_input_tokens]),
        }
    prompt = prompt_of_len(chance.randint(1, max_input_tokens))
    new = chance.randint(1, max_new_tokens)
    return new_request(request_id, prompt, new=new, ignore_eos=chance.random() < 0.5, **fields)
