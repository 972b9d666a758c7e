"""From a claimed turn to the ids of its prompt: transcript, request and template, nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from snapshot_store.transcript import TranscriptEntry
from snapshot_store.transcript_reader import TranscriptReader, fold_token_ids
from workers.prompt.builder import PromptBuilder
from workers.prompt.history import committed_messages, marked, split_instructions
from workers.turns.calls import find_history, freeze_prompt
from workers.turns.control import TurnControl
from workers.turns.history import history_digests
from workers.turns.records import ClaimedTurn


@dataclass(frozen=True, slots=True)
class FrozenTurn:
    """A turn whose prompt is fixed.

    ids: the prompt. path: the committed turns it continues, root first. shared_length: leading ids that the last of
    them already had in prompt + output. new_messages: what this turn adds to the transcript. history: every message,
    for the history hash. whole_reason: why the prompt was tokenized whole, if it was.
    """

    ids: tuple[int, ...]
    path: tuple[TranscriptEntry, ...]
    root_id: str
    template_time: int
    shared_length: int
    new_messages: tuple[dict[str, Any], ...]
    history: tuple[dict[str, Any], ...]
    whole_reason: str | None

    @property
    def parent_id(self) -> str | None:
        """The committed turn that this one continues."""
        return self.path[-1].turn_id if self.path else None


class Conversations:
    """Builds and freezes prompts. Thread-safe."""

    def __init__(self, control: TurnControl, prompts: PromptBuilder) -> None:
        self._control = control
        self._prompts = prompts

    def freeze(self, claimed: ClaimedTurn) -> FrozenTurn:
        """Fix the turn's prompt ids, or take those that an earlier run has fixed.

        Raises PromptError for messages that the template or tokenizer refuses, StaleLease, TurnEnded.
        """
        path = self._path(claimed)
        history, new = _messages(claimed, path)
        if claimed.prompt_ids is not None:
            return self._frozen(claimed, claimed.prompt_ids, path, history, new, None)
        template_time = path[-1].template_time if path else claimed.template_time
        built = self._prompts.build(
            history,
            template_time=template_time,
            tools=claimed.request.tools,
            template_kwargs=claimed.request.template_kwargs,
        )
        root_id = path[0].root_id if path else claimed.root_id
        parent_id = path[-1].turn_id if path else None
        call = freeze_prompt(
            claimed.lease, built.ids, parent_id=parent_id, root_id=root_id, template_time=template_time
        )
        fixed = self._control.run(call)
        return self._frozen(claimed, fixed.prompt_ids, path, history, new, built.reason)

    def _frozen(
        self,
        claimed: ClaimedTurn,
        ids: tuple[int, ...],
        path: tuple[TranscriptEntry, ...],
        history: list[dict[str, Any]],
        new: list[dict[str, Any]],
        whole_reason: str | None,
    ) -> FrozenTurn:
        last = path[-1] if path else None
        return FrozenTurn(
            ids=ids,
            path=path,
            root_id=last.root_id if last else claimed.root_id,
            template_time=last.template_time if last else claimed.template_time,
            shared_length=shared_length(fold_token_ids(path), ids),
            new_messages=tuple(new),
            history=tuple(history),
            whole_reason=whole_reason,
        )

    def _path(self, claimed: ClaimedTurn) -> tuple[TranscriptEntry, ...]:
        reader = TranscriptReader(self._control.client, claimed.request.tenant)
        if claimed.parent_id is not None:
            return reader.path(claimed.parent_id)
        if claimed.request.stateless and claimed.prompt_ids is None:
            digests = _reply_digests(claimed)
            found = self._control.run(find_history(claimed.request.tenant, digests)) if digests else None
            if found is not None:
                return reader.path(found[1])
        return ()


def digests_of(claimed: ClaimedTurn, messages: Sequence[dict[str, Any]]) -> list[bytes]:
    """History digests of `messages` for this turn's tenant, model and scope."""
    request = claimed.request
    return history_digests(
        messages, tenant=request.tenant, model=request.model, scope=request.scope, key_id=request.key_id
    )


def _reply_digests(claimed: ClaimedTurn) -> list[bytes]:
    """Digests of those prefixes of a stateless request's messages that a turn can have ended: with a reply."""
    messages = claimed.request.messages
    digests = digests_of(claimed, messages)
    return [digests[n] for n, message in enumerate(messages, 1) if message["role"] == "assistant"]


def with_reply(history: Sequence[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """A history as a client resends it: with the reply as an assistant message."""
    return [*history, {"role": "assistant", "content": text}]


def shared_length(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    if tuple(right[: len(left)]) == tuple(left):
        return len(left)
    differing = (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
    return next(differing, min(len(left), len(right)))


def _messages(
    claimed: ClaimedTurn, path: Sequence[TranscriptEntry]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """All messages of the prompt, committed replies with their ids, and those that this turn adds."""
    instructions, own = split_instructions(claimed.request.messages)
    committed = committed_messages(path)
    if claimed.request.stateless:
        own = own[len(committed) :]
    return [*instructions, *committed, *own], [*marked(instructions), *own]
