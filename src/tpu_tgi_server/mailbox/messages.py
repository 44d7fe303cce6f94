"""Everything that root and agent say to each other.

    root                                     agent
     │  (spawns it with an address)            │
     │ ◀──────────────────────────── Progress  │   while it loads, any number
     │ ◀─────────────────────────────── Ready  │   once
     │  Prefill, Decode, Filter ... ─────────▶ │   one command at a time, in order
     │ ◀──────────────────────────── Progress  │   while it warms up, any number
     │ ◀─────────── the command's own result,  │   one a command
     │              or Refused, or Broken      │

With `--parallel auto` on several chips, another process comes before: it sends Progress and Measured, and ends.

Refused: nothing has changed, the agent goes on. Broken: the agent's state is lost, and it exits after saying so.
A closed connection means that the other side is dead, whatever the reason; the survivor ends itself.
"""

from dataclasses import dataclass

from tpu_tgi_server.engine.types import Batch, CachedBatch, EngineError, GrammarSource, ModelInfo, StepResult
from tpu_tgi_server.runtime.parallel import ModelNeeds


@dataclass(frozen=True)
class Progress:
    """A stage of loading or warm-up has been reached: `done` of `total` steps."""

    stage: str
    step: str
    done: int
    total: int


@dataclass(frozen=True)
class Ready:
    """The model is loaded and commands are taken."""

    info: ModelInfo


@dataclass(frozen=True)
class Measured:
    """What the model takes of memory; said instead of Ready by a process that loads nothing."""

    needs: ModelNeeds


@dataclass(frozen=True)
class Prepare:
    """Answered at once by Prepared: the grammars of a Prefill to come compile while the agent goes on."""

    grammars: tuple[GrammarSource, ...]


@dataclass(frozen=True)
class Prefill:
    """Answered by StepResult."""

    batch: Batch


@dataclass(frozen=True)
class Decode:
    """Answered by StepResult."""

    batches: tuple[CachedBatch, ...]


@dataclass(frozen=True)
class Filter:
    """Answered by Filtered."""

    batch_id: int
    request_ids: tuple[int, ...]


@dataclass(frozen=True)
class Clear:
    """Answered by Done. No id: everything."""

    batch_id: int | None


@dataclass(frozen=True)
class WarmUp:
    """Answered by Done."""


@dataclass(frozen=True)
class Prepared:
    """Whether the Prefill need not wait any more."""

    is_done: bool


@dataclass(frozen=True)
class Filtered:
    """What is left of a batch; None if nothing is."""

    batch: CachedBatch | None


@dataclass(frozen=True)
class Done:
    """The command was carried out."""


@dataclass(frozen=True)
class Refused:
    """The command was not carried out, and nothing has changed."""

    error: EngineError


@dataclass(frozen=True)
class Broken:
    """The agent failed in a way that leaves its state unknown."""

    reason: str


Command = Prepare | Prefill | Decode | Filter | Clear | WarmUp
Reply = Ready | Measured | Prepared | StepResult | Filtered | Done | Refused | Broken
