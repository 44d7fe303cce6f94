"""The green list against the rule it is taken from."""

import numpy as np
import torch

from tpu_tgi_server.model.watermark import Watermark


def test_green_list_is_the_first_part_of_a_permutation_seeded_with_the_previous_token() -> None:
    words = Watermark(vocab_size=101, gamma=0.25).green_bits(17)
    bits = {id for id in range(101) if (int(words[id // 32]) >> (id % 32)) & 1}
    generator = torch.Generator()
    generator.manual_seed(15485863 * 17)
    assert bits == set(torch.randperm(101, generator=generator)[:25].tolist())


def test_no_bit_is_set_beyond_the_vocabulary() -> None:
    words = Watermark(vocab_size=33, gamma=0.9).green_bits(5)
    assert words.dtype == np.int32
    assert len(words) == 2
    assert int(words[1]) in (0, 1)


def test_another_previous_token_favours_other_tokens() -> None:
    watermark = Watermark(vocab_size=1000, gamma=0.5)
    assert not np.array_equal(watermark.green_bits(1), watermark.green_bits(2))
