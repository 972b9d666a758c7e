"""What a draw needs besides logits, shared by all backends.

Order: bias, penalties, temperature, top_k, top_p, min_p; then arg max of logit / T + Gumbel noise, where the noise of
token `id` is a function of (seed, choice, output position, id) alone. Ties go to the lower id.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from gpu.plan import PlanEntry, SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class TokenHistory:
    """Ids of a sequence as penalties see them: a prompt and the output so far."""

    __slots__ = ("output_counts", "output_ids", "prompt_ids")

    def __init__(self, prompt_ids: Iterable[int], output_ids: Iterable[int] = ()) -> None:
        self.prompt_ids = frozenset(prompt_ids)
        self.output_ids: list[int] = []
        self.output_counts: dict[int, int] = {}
        self.extend(output_ids)

    def extend(self, token_ids: Iterable[int]) -> None:
        """Add output ids in order."""
        for token_id in token_ids:
            self.output_ids.append(token_id)
            self.output_counts[token_id] = self.output_counts.get(token_id, 0) + 1

    def with_drafted(self, token_ids: Iterable[int]) -> TokenHistory:
        """A copy with drafted ids added: what a verify row behind them sees."""
        copy = TokenHistory(())
        copy.prompt_ids = self.prompt_ids
        copy.output_ids = list(self.output_ids)
        copy.output_counts = dict(self.output_counts)
        copy.extend(token_ids)
        return copy


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One row to sample. output_index: position of the drawn token in the reply.

    history: of the sequence. drafted: ids that follow it, unaccepted, before this row; penalties see both.
    """

    params: SamplingParams
    history: TokenHistory
    output_index: int
    drafted: tuple[int, ...] = ()

    @property
    def counts_ids(self) -> bool:
        """Whether the draw depends on the ids before it."""
        params = self.params
        return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)

    @property
    def suppressed_ids(self) -> tuple[int, ...]:
        """Ids that end a reply and must not be drawn yet."""
        return self.params.end_ids if self.output_index < self.params.min_tokens else ()


@dataclass(frozen=True, slots=True)
class Sampled:
    """A drawn token."""

    token_id: int
    logprobs: TokenLogprobs | None


class Sampler(Protocol):
    """Draws one token per row."""

    def sample(self, logits: NDArray[np.float32], requests: list[SampleRequest]) -> list[Sampled]:
        """Draw from logits: (num_rows, vocab_size) f32, which is not changed. Rows are independent."""
        ...


def requests_of(entry: PlanEntry) -> list[SampleRequest]:
    """The rows of a plan entry that are sampled, in row order; empty without sampling.

    Raises ValueError when an entry with sampling has no history.
    """
    if entry.sampling is None:
        return []
    if entry.history is None:
        raise ValueError("history=None: a sampled entry needs one")
    if entry.kind != "verify":
        return [SampleRequest(entry.sampling, entry.history, entry.output_index)]
    drafted = entry.tokens[1:]
    return [
        SampleRequest(entry.sampling, entry.history, entry.output_index + row, drafted[:row])
        for row in range(entry.num_rows)
    ]
