"""What one engine step does, as plain data, and what comes back.

A step is a list of entries, one per sequence. All rows of an entry are consecutive positions of that sequence. Row
kinds share one arithmetic; they differ in which rows are sampled and in what follows:

    PREFILL  rows of a prompt (or of forced tokens); at most the last row is sampled
    DECODE   one row; sampled
    VERIFY   1 + n drafted rows; every row is sampled; the engine then truncates to the accepted length
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpu.cache import Sequence
    from gpu.sampling import TokenHistory


class RowKind(StrEnum):
    """Why a row is computed."""

    PREFILL = "prefill"
    DECODE = "decode"
    VERIFY = "verify"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is drawn: bias, penalties, temperature, top_k, top_p, min_p, then a seeded Gumbel draw.

    temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 are off. logit_bias: (token id, bias) pairs.
    logprobs: how many alternatives to report, None for no report at all. choice: index of the choice (`n` > 1), part
    of the generator's key with `seed` and the output position. end_ids are never drawn before output position
    `min_tokens`.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    choice: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    min_tokens: int = 0
    end_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PlanEntry:
    """Rows of one sequence in one step.

    tokens: ids of the rows at positions sequence.length .. sequence.length + len(tokens) - 1. An empty tuple with
    kind DECODE means "the last sampled token of this sequence", which the host need not know yet.
    sampling: None when no row is sampled (a prefill chunk that is not the last).
    output_index: 0-based position in the reply of the first token that this entry samples; the generator's position.
    history: ids that penalties count; set when `sampling` is. DECODE and PREFILL add the sampled id to it; after a
    VERIFY the engine adds the accepted ones.
    """

    sequence: Sequence
    kind: RowKind
    tokens: tuple[int, ...]
    sampling: SamplingParams | None = None
    output_index: int = 0
    history: TokenHistory | None = None

    @property
    def num_rows(self) -> int:
        """Rows of this entry."""
        return len(self.tokens) or 1


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything one launch does. A sequence occurs at most once."""

    entries: tuple[PlanEntry, ...]

    @property
    def num_rows(self) -> int:
        """Rows of the step."""
        return sum(entry.num_rows for entry in self.entries)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probability of a sampled token and of the most likely ones, after bias and penalties, before temperature.

    Finite: what cannot be drawn has -9999.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class EntryResult:
    """What one entry produced.

    token_ids: one id per sampled row, in row order; empty without sampling. logprobs: same length, or empty.
    error: NonFiniteInput that fails this sequence's turn alone; its cells are not proven.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """Results in the plan's order. An unproven step raises UnprovenAppend instead of returning one."""

    entries: tuple[EntryResult, ...]
