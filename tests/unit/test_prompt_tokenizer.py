"""The tokenizer at run time: its memory of texts, and the interpreter lock."""

from __future__ import annotations

import threading
import time

from tests.prompt_lab import smollm
from workers.prompt.memo import EncodingMemo


def test_memo_asks_once_for_a_text_it_has_seen() -> None:
    asked: list[str] = []
    memo = EncodingMemo(lambda text: asked.append(text) or [len(text)])
    assert [memo("ab"), memo("ab"), memo("abc")] == [(2,), (2,), (3,)]
    assert asked == ["ab", "abc"]


def test_memo_forgets_the_text_used_longest_ago() -> None:
    asked: list[str] = []
    memo = EncodingMemo(lambda text: asked.append(text) or [], max_chars=250)
    for text in ("a", "b", "a", "c", "a", "b"):
        memo(text)
    assert asked == ["a", "b", "c", "b"]


def test_memo_does_not_keep_a_text_larger_than_itself() -> None:
    memo = EncodingMemo(lambda text: [1], max_chars=300)
    memo("x" * 1000)
    assert not memo._known
    assert memo._num_chars == 0


def test_changing_returned_ids_does_not_change_what_is_remembered() -> None:
    ids = smollm().encode_text("hello")
    ids.append(7)
    assert smollm().encode_text("hello") == ids[:-1]


def test_long_text_is_tokenized_without_holding_the_interpreter_lock() -> None:
    text = "the quick brown fox jumps over lazy dogs " * 4000
    ended = threading.Event()
    pauses: list[float] = []

    def watch() -> None:
        last = time.perf_counter()
        while not ended.is_set():
            time.sleep(0.0005)
            now = time.perf_counter()
            pauses.append(now - last)
            last = now

    thread = threading.Thread(target=watch)
    thread.start()
    start = time.perf_counter()
    smollm().encode_text(text)
    took = time.perf_counter() - start
    ended.set()
    thread.join()
    assert max(pauses) < took / 2
