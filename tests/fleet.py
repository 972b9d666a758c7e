"""Workers in this process on real servers: engine, store, turn control and prompts, without Celery or HTTP.

A fleet sends messages by hand: `run` names the worker, so a test decides who runs what.
"""

from __future__ import annotations

import itertools
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from snapshot_store.redis_store import RedisPageStore
from snapshot_store.store import PageStore
from snapshot_store.transcript import CacheScope, TranscriptEntry
from snapshot_store.transcript_reader import TranscriptReader, fold_token_ids
from snapshot_store.wire_pool import WireSettings
from tests.model_files import byte_vocabulary, random_tensors, tiny_config, write_gguf
from workers.model_runtime import load_runtime
from workers.service import WorkerService
from workers.settings import WorkerSettings
from workers.turns.calls import accept, create_conversation, get_turn
from workers.turns.control import TurnControl, connect
from workers.turns.outcomes import AcceptKind, AcceptLimits, TurnView
from workers.turns.records import TurnRequest

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GREEDY: Mapping[str, Any] = {"temperature": 0.0, "seed": 1}
_numbers = itertools.count(1)


def tiny_model(directory: Path, **changes: Any) -> Path:
    """A GGUF with random weights, a byte-level vocabulary and a ChatML template."""
    vocabulary = byte_vocabulary()
    vocabulary["tokenizer.chat_template"] = CHATML
    config = tiny_config("llama", context_length=4096, vocab_size=len(vocabulary["tokenizer.ggml.tokens"]), **changes)
    return write_gguf(directory / "tiny.gguf", config, random_tensors(config), vocabulary)


@dataclass(slots=True)
class Fleet:
    """Workers by name, all serving one model through one pair of servers."""

    control_url: str
    pages_url: str
    model: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    make_store: Callable[[str], PageStore] = lambda url: RedisPageStore(WireSettings(url))
    tenant: str = "local"
    workers: dict[str, WorkerService] = field(default_factory=dict)
    fatal: list[str] = field(default_factory=list)

    def worker(self, name: str, **changes: Any) -> WorkerService:
        """The worker of that name, started at first use."""
        if name not in self.workers:
            values = {
                "control_url": self.control_url,
                "pages_url": self.pages_url,
                "worker_id": name,
                "model": self.model,
                "model_name": "test",
                "restore": "always",
                "attest": "always",
                "threads": 1,
                "mirror_mib": 64,
                **self.settings,
                **changes,
            }
            settings = WorkerSettings(**values)
            service = WorkerService(
                settings, load_runtime(settings), self.make_store(self.pages_url), lambda: self.fatal.append(name)
            )
            service.join()
            self.workers[name] = service
        return self.workers[name]

    def stop(self, name: str | None = None) -> None:
        """Stop one worker, or all."""
        for worker_id in [name] if name else list(self.workers):
            self.workers.pop(worker_id).stop()

    @property
    def control(self) -> TurnControl:
        """Turn control on a client of its own."""
        return TurnControl(connect(self.control_url))

    def conversation(self) -> str:
        """A new conversation."""
        conversation_id = f"conv_{uuid.uuid4().hex[:12]}"
        self.control.run(create_conversation(self.tenant, conversation_id))
        return conversation_id

    def accept(self, text: str | Sequence[Mapping[str, Any]], **changes: Any) -> str:
        """Accept a turn; returns its id."""
        messages = [{"role": "user", "content": text}] if isinstance(text, str) else list(text)
        values: dict[str, Any] = {
            "turn_id": f"resp_{uuid.uuid4().hex[:12]}",
            "tenant": self.tenant,
            "key_id": "key",
            "model": "test",
            "created_at": 1_790_000_000.0 + next(_numbers),
            "messages": tuple(dict(message) for message in messages),
            "sampling": dict(GREEDY),
            "max_tokens": 40,
            "ignore_eos": True,
            **changes,
        }
        outcome = self.control.run(accept(TurnRequest(**values), AcceptLimits()))
        assert outcome.kind is AcceptKind.ACCEPTED, outcome
        return outcome.turn_id

    def run(self, worker: str, turn_id: str) -> TurnView:
        """Run a turn on a worker to its end."""
        self.worker(worker).run_turn(turn_id)
        return self.view(turn_id)

    def start(self, worker: str, turn_id: str) -> threading.Thread:
        """Run a turn on a worker in the background."""
        thread = threading.Thread(target=self.worker(worker).run_turn, args=(turn_id,), daemon=True)
        thread.start()
        return thread

    def say(self, worker: str, text: str, **changes: Any) -> TurnView:
        """Accept and run one turn."""
        return self.run(worker, self.accept(text, **changes))

    def view(self, turn_id: str) -> TurnView:
        """A turn as its tenant sees it."""
        view = self.control.run(get_turn(self.tenant, turn_id))
        assert view is not None
        return view

    def entry(self, turn_id: str) -> TranscriptEntry:
        """The committed transcript entry of a turn."""
        return TranscriptReader(self.control.client, self.tenant).entry(turn_id)

    def token_ids(self, turn_id: str) -> tuple[int, ...]:
        """Every token id of a committed branch: prompt and output of its last turn."""
        return fold_token_ids(TranscriptReader(self.control.client, self.tenant).path(turn_id))

    def settle(self) -> None:
        """Wait until every worker has parked what it committed."""
        for service in self.workers.values():
            service.bookkeeping.settle()


def flush(*urls: str) -> None:
    """Empty servers."""
    for url in urls:
        redis.Redis.from_url(url).flushall()


__all__ = ["CHATML", "GREEDY", "CacheScope", "Fleet", "flush", "tiny_model"]
