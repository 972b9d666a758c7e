"""Drafting changes how many steps a reply takes, and nothing else: ids, log probabilities, pages, ends."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from gpu.cache import HoldKind
from gpu.plan import SamplingParams
from tests.kv_lab import FORMATS
from tests.teacher import teacher
from workers.engine.drafting import DraftCosts, DraftSettings, SuffixIndex
from workers.engine.engine import Engine
from workers.engine.requests import (
    EngineOutput,
    EngineRequest,
    EngineTurn,
    Failed,
    Finished,
    Preempted,
    SealedEvent,
    Token,
)

GREEDY = SamplingParams(temperature=0.0)
WARM = SamplingParams(temperature=0.7, seed=11, top_p=0.95)
TEXT = (5, 9, 12, 7, 30, 31, 32, 8, 5, 9, 12, 7, 30)
BACKENDS = {"cpu": {}, "simulated": {"kv_resident": 32, "attest": "always"}}
COOL = replace(WARM, temperature=0.05)
SAMPLINGS = {
    "greedy": GREEDY,
    "warm": WARM,
    "penalties": replace(WARM, frequency_penalty=0.4, presence_penalty=0.2, repetition_penalty=1.05),
    "logprobs": replace(GREEDY, logprobs=3),
    "min_tokens": replace(WARM, min_tokens=12, end_ids=tuple(range(40))),
}


class ChainedDigests:
    """Digests of a turn's own tokens: equal pages of two runs have equal digests."""

    def __init__(self) -> None:
        self._parent = b""

    def seal(self, page_index: int, token_ids: tuple[int, ...], own_numerics: bool) -> bytes:
        self._parent = hashlib.blake2b(self._parent + repr(token_ids).encode(), digest_size=16).digest()
        return self._parent


@dataclass
class Reply:
    """What a turn's thread sees."""

    outputs: list[EngineOutput] = field(default_factory=list)
    pages: list[tuple[int, bytes, bytes]] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return [output.token_id for output in self.outputs if isinstance(output, Token)]


@pytest.fixture(scope="module", params=[(b, f) for b in BACKENDS for f in FORMATS], ids="-".join)
def engines(request: pytest.FixtureRequest, tiny_gguf: Path) -> Iterator[dict[int, Engine]]:
    """Engines on one model, by drafted rows; 0: none."""
    backend, kv_format = request.param
    made = {}
    for rows in (0, 1, 3, 8):
        runtime = teacher(tiny_gguf, backend=backend, kv_format=kv_format, page_size=16, **BACKENDS[backend])
        drafting = DraftSettings(rows, min_match=2) if rows else None
        made[rows] = Engine(runtime.backend, step_rows=64, drafting=drafting)
        made[rows].launch_thread()
    yield made
    for engine in made.values():
        engine.stop()


def run(engine: Engine, requests: Sequence[EngineRequest]) -> list[Reply]:
    """Run turns together to their ends."""
    replies = [Reply() for _ in requests]
    turns = []
    for request, reply in zip(requests, replies, strict=True):

        def on_sealed(event: SealedEvent, reply: Reply = reply) -> None:
            reply.pages.append((event.page_index, event.page.digest, bytes(event.page.buffer)))
            engine.cache.release(event.page, HoldKind.UPLOAD)

        pages: Any = ChainedDigests()
        turns.append(EngineTurn(request, pages, on_sealed))
    running = [engine.admit(turn) for turn in turns]
    for turn in turns:
        assert turn.admitted.wait(10)
    for admitted in running:
        engine.start(admitted)
    for turn, reply in zip(turns, replies, strict=True):
        while not reply.outputs or isinstance(reply.outputs[-1], Token):
            reply.outputs.append(turn.outputs.get(timeout=60))
        assert not isinstance(reply.outputs[-1], Failed | Preempted), reply.outputs[-1]
    return replies


def request_of(name: str, sampling: SamplingParams, order: int = 0, **changes: Any) -> EngineRequest:
    values = {"max_tokens": 45, "end_ids": frozenset(sampling.end_ids), **changes}
    prompt = (*TEXT, 3 + order, *TEXT)
    return EngineRequest(name, prompt, (), sampling, priority=0, order=order, **values)


def check_same(engines: dict[int, Engine], requests: Sequence[EngineRequest]) -> list[Reply]:
    """Run on every engine; all replies must be equal."""
    plain = run(engines[0], requests)
    for rows, engine in engines.items():
        if rows:
            assert run(engine, requests) == plain, f"{rows} drafted rows"
    return plain


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[EngineRequest], Sequence[Reply], int], None]:
    """Makes drafts of what the turns will say, with a wrong id at every `mistakes`-th position; 0: none."""

    def install(requests: Sequence[EngineRequest], replies: Sequence[Reply], mistakes: int) -> None:
        texts = {r.prompt_ids: (*r.prompt_ids, *reply.ids) for r, reply in zip(requests, replies, strict=True)}

        def draft(_: SuffixIndex, ids: Sequence[int], num_tokens: int) -> tuple[int, ...]:
            text = next(text for prompt, text in texts.items() if tuple(ids[: len(prompt)]) == prompt)
            said = range(len(ids), min(len(text), len(ids) + max(0, num_tokens)))
            return tuple(text[i] ^ 1 if mistakes and i % mistakes == 0 else text[i] for i in said)

        monkeypatch.setattr(SuffixIndex, "draft", draft)

    return install


@pytest.mark.parametrize("mistakes", [0, 2, 5])
def test_drafts_right_and_wrong_leave_replies_and_pages_as_they_are(
    engines: dict[int, Engine], oracle: Callable[..., None], mistakes: int
) -> None:
    requests = [request_of(name, sampling, order) for order, (name, sampling) in enumerate(SAMPLINGS.items())]
    replies = run(engines[0], requests)
    oracle(requests, replies, mistakes)
    for rows, engine in engines.items():
        before = engine.counters.drafted, engine.counters.accepted, engine.counters.steps
        assert run(engine, requests) == replies, f"{rows} drafted rows"
        after = engine.counters.drafted, engine.counters.accepted, engine.counters.steps
        drafted, accepted, steps = (now - then for now, then in zip(after, before, strict=True))
        assert (drafted > 0) is (rows > 0)
        assert (accepted == drafted) is (rows == 0 or not mistakes)
        if rows == 8 and not mistakes:
            assert steps < 20, "windows were not accepted"


def test_reply_ends_inside_a_window_where_it_ends_without_one(
    engines: dict[int, Engine], oracle: Callable[..., None]
) -> None:
    """Also at the end of a page: what a window holds behind the end must not fill one."""
    (whole,) = run(engines[0], [request_of("whole", WARM)])
    oracle([request_of("whole", WARM)], [whole], 0)
    for index in range(24):
        first = whole.ids.index(whole.ids[index])
        request = request_of(f"end-{index}", WARM, end_ids=frozenset({whole.ids[index]}))
        (reply,) = check_same(engines, [request])
        assert (len(reply.ids), reply.outputs[-1]) == (first, Finished("stop"))
    for limit in (1, 2, 3, 5, 6, 8, 9, 16, 17):
        (reply,) = check_same(engines, [request_of(f"limit-{limit}", WARM, max_tokens=limit)])
        assert (len(reply.ids), reply.outputs[-1]) == (limit, Finished("length"))


def test_drafts_of_a_turns_own_text_save_steps(engines: dict[int, Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftCosts, "ratio", 1.0)
    before = {rows: engine.counters.steps for rows, engine in engines.items()}
    check_same(engines, [request_of("own", GREEDY), request_of("own too", COOL, 1)])
    steps = {rows: engine.counters.steps - before[rows] for rows, engine in engines.items()}
    assert max(steps[8], steps[3]) < steps[0]
