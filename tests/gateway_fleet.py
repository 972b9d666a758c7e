"""A gateway on a real uvicorn server and fake workers that speak turn control, for tests of the HTTP edge.

A fake worker claims, appends and commits like a real one; its reply is a function of the request (`Script`).
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
from tokenizers import Tokenizer

from gateway.server import GatewayServer
from gateway.settings import GatewaySettings
from snapshot_store.transcript import TranscriptEntry
from tests.services import ValkeyServer
from workers import registry
from workers.prompt.bundle import PieceStyle, TokenizerBundle
from workers.registry import ModelRecord, WorkerRecord
from workers.turns import calls
from workers.turns.control import TurnControl, connect
from workers.turns.errors import TurnControlError
from workers.turns.events import EventKind, TurnEvent, TurnState
from workers.turns.leasing import Claimant
from workers.turns.records import ClaimedTurn, Lease, TurnRequest

MODEL = "tiny"
CONTEXT = 512
DEADLINE_S = 20.0


@dataclass(frozen=True, slots=True)
class Script:
    """What a fake worker does with a turn: the pieces of its reply, one delta each, and how it ends.

    pause_s: before each delta. error: the turn fails with this code instead of completing.
    """

    pieces: tuple[str, ...]
    pause_s: float = 0.0
    finish_reason: str = "stop"
    error: str | None = None
    logprobs: bool = False


def echo(request: TurnRequest) -> Script:
    """Say the last message back, word by word."""
    words = str(request.messages[-1]["content"]).split(" ")
    pieces = (*(word + " " for word in words[:-1]), words[-1])
    if request.max_tokens is not None and len(pieces) > request.max_tokens:
        return Script(pieces[: request.max_tokens], finish_reason="length")
    return Script(pieces, logprobs=request.sampling["logprobs"] is not None)


@dataclass(slots=True)
class FakeWorker:
    """One worker thread with `slots` turns at a time. `seen` records the requests that it ran."""

    server: ValkeyServer
    script: Callable[[TurnRequest], Script] = echo
    worker_id: str = "w1"
    slots: int = 4
    seen: list[TurnRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    num_deltas: int = 0
    _leases: dict[str, Lease] = field(default_factory=dict)
    _alive: threading.Event = field(default_factory=threading.Event)
    _beating: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> FakeWorker:
        """Publish the model, beat, and claim."""
        control = self._control()
        bundle = byte_bundle()
        record = ModelRecord(MODEL, bundle.digest.hex(), CONTEXT, 1_790_000_000.0)
        control.run(registry.publish_model(record, bundle.to_bytes()))
        self._alive.set()
        self._beating.set()
        self._beat(control)
        self._threads = [threading.Thread(target=self._keep_beating, daemon=True)]
        self._threads += [threading.Thread(target=self._work, daemon=True) for _ in range(self.slots)]
        for thread in self._threads:
            thread.start()
        return self

    def kill(self) -> None:
        """Stop at once, in the middle of whatever runs: leases stay, heartbeats end."""
        self._alive.clear()
        self._beating.clear()

    def stall(self) -> None:
        """Heartbeats end, nothing else changes."""
        self._beating.clear()

    def join(self) -> None:
        """Kill and wait."""
        self.kill()
        for thread in self._threads:
            thread.join(DEADLINE_S)

    def _control(self) -> TurnControl:
        return TurnControl(connect(self.server.url))

    def _beat(self, control: TurnControl) -> None:
        record = WorkerRecord(
            self.worker_id, f"{self.worker_id}-boot", MODEL, self.slots, self.slots, context_length=CONTEXT,
            info={"steps": 3},
        )  # fmt: skip
        control.run(registry.beat(record))

    def _keep_beating(self) -> None:
        control = self._control()
        while self._alive.is_set():
            if self._beating.wait(0.2):
                with suppress(TurnControlError):
                    self._beat(control)
                    control.run(calls.renew(list(self._leases.values())))
                    control.run(calls.sweep())
                time.sleep(0.3)

    def _work(self) -> None:
        control = self._control()
        claimant = Claimant(self.worker_id, f"{self.worker_id}-boot", (MODEL,), lease_s=2.0)
        while self._alive.is_set():
            claimed = None
            try:
                claimed = control.run(calls.claim("", claimant))
                if claimed is None:
                    time.sleep(0.02)
                    continue
                self._leases[claimed.lease.turn_id] = claimed.lease
                self._run(control, claimed)
            except TurnControlError:
                time.sleep(0.1)
            finally:
                if claimed is not None:
                    self._leases.pop(claimed.lease.turn_id, None)

    def _run(self, control: TurnControl, claimed: ClaimedTurn) -> None:
        request = claimed.request
        self.seen.append(request)
        script = self.script(request)
        if script.error is not None and not script.pieces:
            self._end(control, claimed, script, 0)
            return
        if not claimed.started:
            control.run(
                calls.append_events(claimed.lease, [TurnEvent(0, EventKind.STARTED, info={"prompt_tokens": 5})])
            )
        for number, piece in enumerate(script.pieces, 1):
            time.sleep(script.pause_s)
            if not self._alive.is_set():
                return
            if number < claimed.next_number:
                continue
            event = TurnEvent(number, EventKind.DELTA, (number,), piece, _logprobs(number, piece, script))
            answer = control.run(calls.append_events(claimed.lease, [event]))
            self.num_deltas += 1
            if answer.stop is not None:
                self.cancelled.append(request.turn_id)
                terminal = TurnEvent(number + 1, EventKind.TERMINAL, state=answer.stop, finish_reason="cancelled")
                control.run(calls.finish(claimed.lease, [terminal]))
                return
        self._end(control, claimed, script, len(script.pieces) + 1)

    def _end(self, control: TurnControl, claimed: ClaimedTurn, script: Script, number: int) -> None:
        usage = {
            "prompt_tokens": 5, "completion_tokens": len(script.pieces), "cached_tokens": 3,
            "worker_id": self.worker_id, "restored_pages": 0,
        }  # fmt: skip
        if script.error is not None:
            error = {"code": script.error, "message": "it went wrong", "param": None}
            failed = TurnEvent(number, EventKind.TERMINAL, state=TurnState.FAILED, usage=usage, error=error)
            control.run(calls.finish(claimed.lease, [failed]))
            return
        state = TurnState.COMPLETED if script.finish_reason == "stop" else TurnState.INCOMPLETE
        done = TurnEvent(number, EventKind.TERMINAL, state=state, finish_reason=script.finish_reason, usage=usage)
        control.run(calls.commit(claimed.lease, _entry(claimed, script, self.worker_id), [done]))


@contextmanager
def gateway(server: ValkeyServer, **settings: Any) -> Iterator[str]:
    """Serve a gateway on a free loopback port; yields its root URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    served = GatewayServer(
        gateway_settings(server, port=port, **{"shutdown_grace_s": 2, "log_level": "warning", **settings})
    )
    thread = threading.Thread(target=served.run, daemon=True)
    thread.start()
    wait_until(lambda: served.started)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        served.should_exit = True
        thread.join(DEADLINE_S)
        # One that goes on would poll and probe the servers of later tests.
        assert not thread.is_alive(), "the gateway did not stop"


@contextmanager
def stack(server: ValkeyServer, *workers: FakeWorker, **settings: Any) -> Iterator[str]:
    """A gateway with workers, ready."""
    for worker in workers:
        worker.start()
    try:
        with gateway(server, **settings) as url:
            wait_until(lambda: httpx.get(f"{url}/ready").status_code == 200)
            yield url
    finally:
        for worker in workers:
            worker.join()


@dataclass(frozen=True, slots=True)
class SharedStack:
    """A gateway and a worker that several tests use one after the other."""

    url: str
    server: ValkeyServer
    worker: FakeWorker

    def fresh_worker(self) -> FakeWorker:
        """The worker without a past, echoing."""
        self.worker.script = echo
        self.worker.seen.clear()
        self.worker.cancelled.clear()
        return self.worker


@contextmanager
def shared_stack(**settings: Any) -> Iterator[SharedStack]:
    """A gateway with one worker on a server of its own, for a whole module."""
    server = ValkeyServer("control").start()
    try:
        worker = FakeWorker(server)
        with stack(server, worker, **settings) as url:
            yield SharedStack(url, server, worker)
    finally:
        server.remove()


def gateway_settings(server: ValkeyServer, **settings: Any) -> GatewaySettings:
    """Settings for a gateway on `server`."""
    return GatewaySettings(KVALET_CONTROL_URL=server.url, **settings)


def wait_until(condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
    """Poll until `condition` holds; fails the test at the deadline."""
    give_up_at = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < give_up_at, "the condition did not come true in time"
        time.sleep(0.02)


def byte_bundle() -> TokenizerBundle:
    """A tokenizer with one id per byte and a ChatML template."""
    alphabet = [chr(b) for b in [*range(33, 127), *range(161, 173), *range(174, 256)]]
    alphabet += [chr(256 + n) for n in range(256 - len(alphabet))]
    vocabulary = {piece: index for index, piece in enumerate(alphabet)}
    specials = ["<|im_start|>", "<|im_end|>"]
    added = ",".join(
        f'{{"id":{256 + i},"content":"{text}","single_word":false,"lstrip":false,"rstrip":false,'
        f'"normalized":false,"special":true}}'
        for i, text in enumerate(specials)
    )
    vocabulary |= {text: 256 + i for i, text in enumerate(specials)}
    tokenizer = Tokenizer.from_str(_tokenizer_json(vocabulary, added))
    return TokenizerBundle(
        tokenizer_json=tokenizer.to_str(), style=PieceStyle.BYTE_LEVEL, space_prefix=False, control_ids=(256, 257),
        end_ids=(257,), bos_id=None, eos_id=257, add_bos=False, chat_template=CHATML,
    )  # fmt: skip


def _tokenizer_json(vocabulary: dict[str, int], added: str) -> str:
    return (
        '{"version":"1.0","truncation":null,"padding":null,"added_tokens":[' + added + '],"normalizer":null,'
        '"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true},'
        '"post_processor":null,"decoder":{"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true,'
        '"use_regex":true},"model":{"type":"BPE","dropout":null,"unk_token":null,"continuing_subword_prefix":null,'
        '"end_of_word_suffix":null,"fuse_unk":false,"byte_fallback":false,"vocab":'
        + json.dumps(vocabulary)
        + ',"merges":[]}}'
    )


def _logprobs(number: int, piece: str, script: Script) -> Sequence[dict[str, Any]]:
    if not script.logprobs:
        return ()
    return ({"id": number, "token": piece, "logprob": -0.25, "top": [[number, piece, -0.25], [0, "x", -3.0]]},)


def _entry(claimed: ClaimedTurn, script: Script, worker_id: str) -> TranscriptEntry:
    request = claimed.request
    return TranscriptEntry(
        turn_id=request.turn_id, tenant=request.tenant, model=request.model, parent_id=claimed.parent_id,
        root_id=claimed.root_id, conversation_id=request.conversation_id, scope=request.scope, scope_id="",
        created_at=request.created_at, committed_at=time.time(), template_time=claimed.template_time, shared_length=0,
        input_ids=(1, 2, 3, 4, 5), output_ids=tuple(range(1, len(script.pieces) + 1)), messages=request.messages,
        output_text="".join(script.pieces), finish_reason=script.finish_reason, format_digest=b"f" * 32,
        numerics_digest=b"n" * 32, worker_id=worker_id, epoch=claimed.lease.epoch, cached_tokens=3, prompt_tokens=5,
    )  # fmt: skip


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def chat_body(text: str = "a b c d e", **fields: Any) -> dict[str, Any]:
    """A chat completion's body."""
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


@dataclass(frozen=True, slots=True)
class SseFrame:
    """One event as a client reads it."""

    event: str | None
    frame_id: str | None
    data: str

    @property
    def json(self) -> Any:
        """The data, parsed."""
        return json.loads(self.data)


def frames_of(text: str, lines: Callable[[str], list[str]] = str.splitlines) -> list[SseFrame]:
    """Events of a whole event stream; comments are skipped."""
    frames: list[SseFrame] = []
    fields: dict[str, str] = {}
    for line in lines(text):
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "data" in fields:
            frames.append(SseFrame(fields.get("event"), fields.get("id"), fields["data"]))
            fields = {}
    return frames
