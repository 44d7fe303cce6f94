"""A model without weights whose tokens follow a script, for tests of everything above the model.

It keeps the contract of `model.interface.Model` strictly: it remembers what was written to each slot, and a step that
relies on a cell that was not written fails. Its results can be checked by hand.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from loguru import logger
from numpy.typing import NDArray

from tests.tiny_model import VOCAB_SIZE, byte_level_tokenizer
from tpu_tgi_server.config import Settings
from tpu_tgi_server.engine.generator import Generator
from tpu_tgi_server.engine.tokenizer import Tokenizer
from tpu_tgi_server.engine.types import Limits, ModelInfo
from tpu_tgi_server.model.interface import Graph, NextTokens, OnGraph, PromptChunk, ReadTokens, SamplerInputs
from tpu_tgi_server.runtime.interface import Runtime

FIRST_ID = 2
"""The smallest id of the arithmetic script: those below are BOS and EOS."""

Script = Mapping[tuple[int, ...], Sequence[int]]


def arithmetic_id(prompt_ids: Sequence[int], step: int) -> int:
    """What follows a prompt that has no script of its own; never an end token."""
    return FIRST_ID + (sum(prompt_ids) + 7 * len(prompt_ids) + 13 * step) % (VOCAB_SIZE - FIRST_ID)


def logprob_of(token_id: int) -> float:
    """The log-probability that the scripted model gives to a token."""
    return -token_id / 1000


class ScriptedModel:
    """Owns what has been written to each slot: the prompt, and the ids at positions 0, 1, 2, ..."""

    def __init__(
        self,
        limits: Limits,
        script: Script | None = None,
        max_prefill_tokens: int | None = None,
        on_step: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.vocab_size = VOCAB_SIZE
        self.num_slots = limits.num_slots
        self.max_prefill_tokens = max_prefill_tokens or limits.max_input_tokens
        self.num_prefills = 0
        self.num_decodes = 0
        self.num_used_slots: list[int] = []
        self._max_total_tokens = limits.max_total_tokens
        self._script = script or {}
        self._on_step = on_step
        self._prompts: list[tuple[int, ...]] = [()] * limits.num_slots
        self._cells: list[list[int]] = [[] for _ in range(limits.num_slots)]

    def prefill(self, chunks: Sequence[PromptChunk], sampler: SamplerInputs | None) -> NextTokens:
        assert sampler is None, "the script chooses greedily"
        self._on_step("prefill")
        self.num_prefills += 1
        slots = [chunk.slot for chunk in chunks]
        assert 0 < len(chunks) <= self.num_slots
        assert len(set(slots)) == len(slots), "two prompts in one slot"
        assert sum(len(chunk.token_ids) for chunk in chunks) <= self.max_prefill_tokens
        assert len(chunks) == 1 or all(chunk.start == 0 for chunk in chunks), "a continuation is run alone"
        for chunk in chunks:
            self._write_chunk(chunk)
        chosen: list[int | None] = [None] * self.num_slots
        for chunk in chunks:
            prompt = self._prompts[chunk.slot] if chunk.is_kept else tuple(chunk.token_ids)
            chosen[chunk.slot] = self._choose(prompt, [])
        return _next_tokens(chosen)

    def decode(
        self,
        token_ids: NDArray[np.int32],
        slot_lens: NDArray[np.int32],
        num_used_slots: int,
        max_slot_len: int,
        samplers: Sequence[SamplerInputs | None],
    ) -> ReadTokens:
        assert samplers
        assert all(sampler is None for sampler in samplers), "the script chooses greedily"
        self._on_step("decode")
        self.num_decodes += 1
        self.num_used_slots.append(num_used_slots)
        assert token_ids.shape == slot_lens.shape == (self.num_slots,)
        assert token_ids.dtype == slot_lens.dtype == np.int32
        assert max_slot_len in slot_lens[:num_used_slots]
        results = []
        lens = slot_lens.tolist()
        ids = token_ids.tolist()
        for step in range(len(samplers)):
            chosen = [self._step(slot, ids[slot], lens[slot], max_slot_len + step) for slot in range(self.num_slots)]
            results.append(_next_tokens(chosen[:num_used_slots]))
            ids = [FIRST_ID if id is None else id for id in chosen]
            lens = [min(slot_len + 1, self._max_total_tokens - 1) for slot_len in lens]
        return lambda: results

    def warm_up(self, on_graph: OnGraph) -> None:
        for number in range(1, 4):
            self._on_step("warm_up")
            on_graph(Graph("decode", number, has_sampler=False), number, 3)
        self._prompts = [()] * self.num_slots
        self._cells = [[] for _ in range(self.num_slots)]

    def _write_chunk(self, chunk: PromptChunk) -> None:
        assert 0 <= chunk.slot < self.num_slots
        assert chunk.token_ids
        cells = self._cells[chunk.slot]
        if chunk.is_kept:
            assert chunk.end < self._max_total_tokens
            assert chunk.start <= len(cells), f"slot {chunk.slot} has {len(cells)} written cells, not {chunk.start}"
            self._cells[chunk.slot] = [*cells[: chunk.start], *chunk.token_ids]
            self._prompts[chunk.slot] = tuple(self._cells[chunk.slot])
        else:
            assert 0 <= chunk.scratch_position < self._max_total_tokens
            del cells[chunk.scratch_position :]

    def _step(self, slot: int, token_id: int, slot_len: int, max_slot_len: int) -> int | None:
        """The next token of a slot; None where the result may not be used."""
        assert 0 <= slot_len < self._max_total_tokens
        cells = self._cells[slot]
        assert slot_len <= len(cells), f"slot {slot} has {len(cells)} written cells, not {slot_len}"
        self._cells[slot] = [*cells[:slot_len], token_id]
        prompt = self._prompts[slot]
        if slot_len < len(prompt) or slot_len > max_slot_len:
            return None
        return self._choose(prompt, self._cells[slot][len(prompt) :])

    def _choose(self, prompt: tuple[int, ...], output: Sequence[int]) -> int | None:
        """The script's next id, if the output so far is the script's."""
        script = self._script.get(prompt)
        known = len(output) + 1 if script is None else len(script)
        wanted = [arithmetic_id(prompt, step) for step in range(known)] if script is None else list(script)
        if list(output) != wanted[: len(output)] or len(output) >= len(wanted):
            return None
        return wanted[len(output)]


def _next_tokens(chosen: Sequence[int | None]) -> NextTokens:
    """Results that may not be used are out of any vocabulary, so that nobody can use them unnoticed."""
    ids = np.array([2**30 if id is None else id for id in chosen], np.int32)
    none = np.zeros((len(ids), 0), np.float32)
    return NextTokens(
        ids=ids,
        logprobs=np.array([logprob_of(int(id)) for id in ids], np.float32),
        top_ids=none.astype(np.int32),
        top_logprobs=none,
        prompt_logprobs={},
    )


@dataclass
class Faults:
    """What a scripted agent does besides generating; read from the model id, as JSON. Times are in seconds."""

    load_s: float = 0.0
    load_error: str = ""
    prefill_s: float = 0.0
    decode_s: float = 0.0
    decode_error: str = ""
    num_warnings_a_decode: int = 0
    warm_up_s: float = 0.0

    def on_load(self) -> None:
        if self.load_error:
            raise ValueError(self.load_error)
        time.sleep(self.load_s)

    def on_step(self, kind: str) -> None:
        """Say in the log that a step begins, then do it the hard way."""
        logger.info("{} begins", kind)
        seconds: float = getattr(self, f"{kind}_s")
        time.sleep(seconds)
        if kind == "decode":
            for number in range(self.num_warnings_a_decode):
                logger.warning("warning {} with a line break\n and ünïcödé", number)
            if self.decode_error:
                raise RuntimeError(self.decode_error)


def load_scripted(
    settings: Settings, runtime: Runtime, on_stage: Callable[[str, int, int], None]
) -> tuple[Generator, ModelInfo]:
    """A loader for agents: the arithmetic script, with the faults that the model id names."""
    faults = Faults(**json.loads(settings.model_id))
    on_stage("script", 1, 2)
    faults.on_load()
    on_stage("faults", 2, 2)
    limits = Limits(settings.max_batch_size, max_input_tokens=255, max_total_tokens=256)
    model = ScriptedModel(limits, on_step=faults.on_step)
    info = ModelInfo("", "torch.float32", runtime.device_type, limits, sliding_window=None)
    return Generator(model, Tokenizer(byte_level_tokenizer()), limits), info
