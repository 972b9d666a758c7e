"""Workers in this process on real servers: engine, store, turn control and prompts, without Celery or HTTP.

A fleet sends messages by hand: `run` names the worker, so a test decides who runs what.
"""

from __future__ import annotations

import itertools
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import redis

from snapshot_store.index import SnapshotIndex
from snapshot_store.redis_store import RedisPageStore
from snapshot_store.store import PageStore
from snapshot_store.transcript import CacheScope, TranscriptEntry
from snapshot_store.transcript_reader import TranscriptReader, fold_token_ids
from snapshot_store.wire_pool import WireSettings
from tests.model_files import byte_vocabulary, random_tensors, tiny_config, write_gguf
from workers.dispatch import Dispatcher
from workers.model_runtime import load_runtime
from workers.service import WorkerService
from workers.settings import WorkerSettings
from workers.turns.calls import accept, create_conversation, get_turn, get_turn_state
from workers.turns.codec import unpack_events
from workers.turns.control import TurnControl, connect
from workers.turns.events import TurnEvent
from workers.turns.keys import stream_key
from workers.turns.outcomes import AcceptKind, AcceptLimits, AcceptOutcome, TurnView
from workers.turns.records import TurnRequest

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GREEDY: Mapping[str, Any] = {"temperature": 0.0, "seed": 1}
_numbers = itertools.count(1)


def tiny_model(directory: Path, make_tensors: Callable[..., Any] = random_tensors, **changes: Any) -> Path:
    """A GGUF with random weights, a byte-level vocabulary and a ChatML template."""
    vocabulary = byte_vocabulary()
    vocabulary["tokenizer.chat_template"] = CHATML
    config = tiny_config("llama", context_length=8192, vocab_size=len(vocabulary["tokenizer.ggml.tokens"]), **changes)
    return write_gguf(directory / "tiny.gguf", config, make_tensors(config), vocabulary)


class TurnClient:
    """Accepts turns and reads what became of them, straight on turn control."""

    def __init__(self, control_url: str, model: str = "test", tenant: str = "local") -> None:
        self.control_url = control_url
        self.control = TurnControl(connect(control_url))
        self.model = model
        self.tenant = tenant

    def conversation(self) -> str:
        """A new conversation."""
        conversation_id = f"conv_{uuid.uuid4().hex[:12]}"
        self.control.run(create_conversation(self.tenant, conversation_id))
        return conversation_id

    def accept(self, text: str | Sequence[Mapping[str, Any]], **changes: Any) -> str:
        """Accept a turn; returns its id."""
        return self.accept_outcome(text, **changes).turn_id

    def accept_outcome(self, text: str | Sequence[Mapping[str, Any]], **changes: Any) -> AcceptOutcome:
        """Accept a turn of 40 greedy tokens unless told otherwise."""
        messages = [{"role": "user", "content": text}] if isinstance(text, str) else list(text)
        values: dict[str, Any] = {
            "turn_id": f"resp_{uuid.uuid4().hex[:12]}",
            "tenant": self.tenant,
            "key_id": "key",
            "model": self.model,
            "created_at": 1_790_000_000.0 + next(_numbers),
            "messages": tuple(dict(message) for message in messages),
            "sampling": dict(GREEDY),
            "max_tokens": 40,
            "ignore_eos": True,
            **changes,
        }
        values["scope"] = CacheScope(values.get("scope", "tenant"))
        outcome = self.control.run(accept(TurnRequest(**values), AcceptLimits()))
        assert outcome.kind is AcceptKind.ACCEPTED, outcome
        return outcome

    def view(self, turn_id: str) -> TurnView:
        """A turn as its tenant sees it."""
        view = self.control.run(get_turn(self.tenant, turn_id))
        assert view is not None
        return view

    def wait(self, turn_id: str, timeout_s: float = 60.0) -> TurnView:
        """Wait until a turn has ended."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            state = self.control.run(get_turn_state(self.tenant, turn_id))
            if state is not None and state.is_terminal:
                return self.view(turn_id)
            time.sleep(0.01)
        raise AssertionError(f"{turn_id} has not ended after {timeout_s} s: {self.view(turn_id)}")

    def wait_parked(self, turn_id: str, timeout_s: float = 20.0) -> None:
        """Wait until the index says that all full pages up to a committed turn are parked."""
        view = self.view(turn_id)
        branch = view.conversation_id or turn_id
        index = SnapshotIndex(self.control.client)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            entry = index.read(self.tenant, branch)
            if entry is not None and entry.head_turn_id == turn_id:
                return
            time.sleep(0.005)
        raise AssertionError(f"{turn_id} was not parked within {timeout_s} s")

    def path(self, turn_id: str) -> tuple[TranscriptEntry, ...]:
        """Committed entries of a branch, root first."""
        return TranscriptReader(self.control.client, self.tenant).path(turn_id)

    def streamed_ids(self, turn_id: str) -> tuple[int, ...]:
        """Ids of a turn's stream: deltas and terminal event, whose numbers have no gap and no repeat."""
        events = self.events(turn_id)
        assert [event.number for event in events] == list(range(len(events)))
        return tuple(token_id for event in events for token_id in event.token_ids)

    def events(self, turn_id: str) -> list[TurnEvent]:
        """Everything in a turn's stream."""
        entries = cast("Any", self.control.client.xrange(stream_key(turn_id)))
        return [event for _, fields in entries for event in unpack_events(int(fields[b"n"]), fields[b"e"])]

    def token_ids(self, turn_id: str) -> tuple[int, ...]:
        """Every token id of a committed branch: prompt and output of its last turn."""
        return fold_token_ids(self.path(turn_id))


class Fleet(TurnClient):
    """Workers by name, all serving one model through one pair of servers. `settings` apply to each."""

    def __init__(
        self,
        control_url: str,
        pages_url: str,
        model: Path,
        make_store: Callable[[str], PageStore] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(control_url)
        self.workers: dict[str, WorkerService] = {}
        self.fatal: list[str] = []
        self._make_store = make_store or (lambda url: RedisPageStore(WireSettings(url)))
        self._settings = {
            "control_url": control_url,
            "pages_url": pages_url,
            "model": model,
            "model_name": "test",
            "restore": "always",
            "attest": "always",
            "threads": 1,
            "mirror_mib": 64,
            **settings,
        }

    def worker(self, name: str, **changes: Any) -> WorkerService:
        """The worker of that name, started at first use."""
        if name not in self.workers:
            settings = WorkerSettings(**{**self._settings, "worker_id": name, **changes})
            store = self._make_store(settings.pages_url)
            service = WorkerService(settings, load_runtime(settings), store, lambda: self.fatal.append(name))
            service.join()
            self.workers[name] = service
        return self.workers[name]

    def stop(self, name: str | None = None) -> None:
        """Stop one worker, or all."""
        for worker_id in [name] if name else list(self.workers):
            self.workers.pop(worker_id).stop()

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

    def settle(self) -> None:
        """Wait until every worker has parked what it committed."""
        for service in self.workers.values():
            service.bookkeeping.settle()


class StackClient(TurnClient):
    """A client of worker processes: messages go through Celery."""

    def __init__(self, control_url: str, model: str) -> None:
        super().__init__(control_url, model)
        self._dispatcher = Dispatcher(control_url)

    def send(self, text: str, **changes: Any) -> str:
        """Accept a turn and send its message."""
        outcome = self.accept_outcome(text, **changes)
        if outcome.dispatch is not None:
            self._dispatcher.send(outcome.dispatch)
        return outcome.turn_id


def flush(*urls: str) -> None:
    """Empty servers."""
    for url in urls:
        redis.Redis.from_url(url).flushall()
