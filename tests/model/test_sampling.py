"""The greedy choice and its log-probability."""

import torch

from tpu_tgi_server.model.sampling import choose_greedily


def test_choice_is_the_best_token_with_its_log_softmax() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, -1.0, 4.0]])
    ids, logprobs = choose_greedily(logits)
    assert ids.tolist() == [1, 0]
    expected = [3.0 - torch.tensor([0.0, 3.0, 1.0]).exp().sum().log(), 5.0 - logits[1].exp().sum().log()]
    torch.testing.assert_close(logprobs, torch.stack(expected))


def test_logprobs_are_float32_also_for_bfloat16_logits() -> None:
    logits = torch.randn(4, 1000).bfloat16()
    ids, logprobs = choose_greedily(logits)
    expected = torch.log_softmax(logits.float(), dim=-1).gather(1, ids.long()[:, None])[:, 0]
    assert logprobs.dtype is torch.float32
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=0)


def test_large_ids_are_exact() -> None:
    logits = torch.zeros(1, 262_145)
    logits[0, 262_143] = 1.0
    assert int(choose_greedily(logits)[0, 0]) == 262_143
