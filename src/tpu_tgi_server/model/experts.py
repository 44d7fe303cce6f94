"""A mixture of experts with static shapes, plugged into transformers by name.

transformers' own ways either loop over the experts that some token has chosen, which is known only once the router has
run, or gather the weights of the chosen experts for every token, which is many times the layer for a prompt.
Here every expert sees every token and the router's weights, 0 where an expert was not chosen, pick from the results:
more arithmetic, but each weight is read once. In a decode step most experts have been chosen by some slot anyway.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.moe import ExpertsInterface

EXPERTS_NAME = "all_experts"


def run_all_experts(module: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """What transformers calls in every layer of experts.

    Args:
        module: holds `gate_up_proj` [E, 2 I, D] and `down_proj` [E, D, I].
        hidden: [T, D].
        chosen: int64 [T, k], the experts of each token.
        weights: [T, k], how much each of them counts.

    Returns:
        [T, D].

    Raises:
        NotImplementedError: the experts have biases, no gate, a norm, or weights in another layout.
    """
    if module.has_bias or module.is_transposed or not module.has_gate or module.has_post_expert_norm:
        raise NotImplementedError("experts of this form have no static graph here")
    routing = weights.new_zeros(hidden.shape[0], module.gate_up_proj.shape[0]).scatter(1, chosen, weights)
    inner = module._apply_gate(hidden @ module.gate_up_proj.transpose(1, 2))
    outer = inner @ module.down_proj.transpose(1, 2)
    shares = routing.T[:, :, None]
    # an expert that was not chosen may overflow, as it has not learnt from such tokens
    output: Tensor = torch.where(shares == 0, 0.0, outer * shares).sum(dim=0)
    return output.to(hidden.dtype)


def register() -> None:
    """Make `experts_implementation=EXPERTS_NAME` known to transformers."""
    ExpertsInterface.register(EXPERTS_NAME, run_all_experts)
