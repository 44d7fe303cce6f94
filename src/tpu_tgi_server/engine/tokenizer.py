"""Text to token ids and back, with the rules about special tokens."""

import json
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tpu_tgi_server.model.files import needs_code


class Tokenizer:
    """Owns a tokenizer of transformers, and the ids that mean something special to it."""

    def __init__(self, tokenizer: Any, generation_eos_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._decode = plain_decode(tokenizer)
        self._texts: dict[int, str] = {}
        self._bos_text: str | None = tokenizer.bos_token
        own_eos = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self.eos_ids = frozenset((*generation_eos_ids, *own_eos))
        # all_special_ids misses special tokens that were added by id alone (TGI model.py makes the same union)
        added = (id for id, token in tokenizer.added_tokens_decoder.items() if token.special)
        self.special_ids = frozenset((*tokenizer.all_special_ids, *added))

    def encode(self, text: str, truncate: int, add_special_tokens: bool | None) -> list[int]:
        """Token ids of a prompt; the BOS token for a prompt without any, if the tokenizer has one.

        Args:
            text: the prompt.
            truncate: keep at most this many ids, 0 for all. As in the tokenizers library (and so in TGI) special
                tokens that the tokenizer adds count and are kept; text is dropped from the left.
            add_special_tokens: None adds them unless the text already starts with the BOS token's text, so that a
                rendered chat template does not get a second one.
        """
        if add_special_tokens is None:
            add_special_tokens = not (self._bos_text and text.startswith(self._bos_text))
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        if not ids and self._tokenizer.bos_token_id is not None:
            return [self._tokenizer.bos_token_id]
        if not truncate or len(ids) <= truncate:
            return ids
        num_prefix = self._num_added_before(ids) if add_special_tokens else 0
        num_prefix = min(num_prefix, truncate)
        kept = truncate - num_prefix
        return ids[:num_prefix] + ids[len(ids) - kept :]

    def _num_added_before(self, ids: Sequence[int]) -> int:
        """How many ids the tokenizer itself puts before every text."""
        added = self._tokenizer.encode("", add_special_tokens=True)
        count = 0
        while count < len(added) and count < len(ids) and added[count] == ids[count]:
            count += 1
        return count

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, exactly as they stand, special tokens included.

        Ids that only the model has have no text; a tokenizer written in Python would fail on them.
        """
        if len(ids) != 1:
            return self._decode([id for id in ids if id < self.num_ids])
        (id,) = ids
        text = self._texts.get(id)
        if text is None:  # half of what a stream decodes is one token, and often the same
            text = self._texts[id] = self._decode([id] if id < self.num_ids else [])
        return text

    @cached_property
    def num_ids(self) -> int:
        """One more than the largest id; the model's vocabulary may be larger or smaller."""
        ids: list[int] = list(self._tokenizer.get_vocab().values())
        return 1 + max(ids)

    def to_json(self) -> str:
        """The tokenizer as the text of a tokenizer.json.

        Raises:
            ValueError: it is not one of the tokenizers library, so it has no such text.
        """
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise ValueError(f"{type(self._tokenizer).__name__} has no tokenizer.json")
        return str(backend.to_str())


def plain_decode(tokenizer: Any) -> Callable[[list[int]], str]:
    """Ids to text with nothing left out and nothing cleaned up.

    A tokenizer of the tokenizers library is asked directly: what transformers' `decode` does around it takes ten times
    as long (77 and 7 microseconds for three ids), which a step of 16 slots pays 32 times.
    """
    if type(tokenizer)._decode is PreTrainedTokenizerFast._decode:
        return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=False)
    return partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> Tokenizer:
    """The tokenizer of a model folder, with the end ids of its generation_config.json (an id, a list, or none).

    Raises:
        OSError: the folder has no tokenizer that can be loaded.
        ValueError: the tokenizer is code in the folder, which is not trusted.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except ValueError as error:
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise ValueError(needs_code(folder)) from error
        raise OSError(f"no tokenizer in {folder}: {' '.join(str(error).split())}") from error
    return Tokenizer(tokenizer, _generation_eos_ids(folder))


def _generation_eos_ids(folder: Path) -> tuple[int, ...]:
    """From generation_config.json, or where there is none from config.json, as transformers takes them."""
    file = folder / "generation_config.json"
    eos = json.loads((file if file.exists() else folder / "config.json").read_text()).get("eos_token_id")
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)
