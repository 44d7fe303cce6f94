"""The choice of the next token, on the device, for all rows at once."""

import torch
from torch import Tensor


def choose_greedily(logits: Tensor) -> Tensor:
    """The best token of each row and its log-probability.

    Args:
        logits: [N, V], the model's raw logits.

    Returns:
        float32 [2, N]: ids (exact, as a vocabulary has less than 2**24 entries) and `log_softmax` at them, in one
        tensor so that one transfer brings both.
    """
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    best = torch.max(logprobs, dim=-1)
    return torch.stack([best.indices.float(), best.values])
