"""The experts with static shapes against transformers' own loop over the chosen ones."""

import pytest
import torch
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from tpu_tgi_server.model.experts import run_all_experts

NUM_EXPERTS, HIDDEN_SIZE, NUM_TOKENS = 4, 8, 5


@pytest.fixture
def experts() -> MixtralExperts:
    torch.manual_seed(0)
    config = MixtralConfig(
        hidden_size=HIDDEN_SIZE,
        intermediate_size=12,
        num_local_experts=NUM_EXPERTS,
        num_attention_heads=2,
        experts_implementation="eager",
    )
    module = MixtralExperts(config).eval().requires_grad_(False)
    for parameter in module.parameters():
        parameter.normal_()
    return module


@pytest.mark.parametrize("factor", [1.0, 60000.0], ids=["ordinary", "overflow of the one that nobody chose"])
def test_tokens_get_what_their_experts_say(experts: MixtralExperts, factor: float) -> None:
    experts.down_proj[3] *= factor
    experts.half()
    hidden = torch.randn(NUM_TOKENS, HIDDEN_SIZE).half()
    chosen = torch.stack([torch.randperm(NUM_EXPERTS - 1)[:2] for _ in range(NUM_TOKENS)])
    weights = torch.rand(NUM_TOKENS, 2)
    expected = experts(hidden, chosen, weights)
    assert expected.isfinite().all()
    torch.testing.assert_close(run_all_experts(experts, hidden, chosen, weights), expected, rtol=2e-3, atol=2e-2)
