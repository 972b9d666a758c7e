"""Any event and any id list comes back as it went in; any bytes are read or refused by a typed error."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from workers.turns import codec
from workers.turns.errors import BadTurnData
from workers.turns.events import EventKind, TurnEvent, TurnState

U32 = st.integers(0, 2**32 - 1)
TEXT = st.text(st.characters(exclude_categories=("Cs",)))
PLAIN: st.SearchStrategy[Any] = st.dictionaries(TEXT, st.one_of(st.integers(0, 2**63), TEXT, st.booleans(), st.none()))


@st.composite
def events(draw: st.DrawFn) -> tuple[TurnEvent, ...]:
    first = draw(st.integers(0, 2**40))
    return tuple(
        TurnEvent(
            number=first + index,
            kind=draw(st.sampled_from(EventKind)),
            token_ids=tuple(draw(st.lists(U32, max_size=4))),
            text=draw(TEXT),
            state=draw(st.sampled_from([None, *TurnState])),
            finish_reason=draw(st.none() | st.sampled_from(["stop", "length"])),
            usage=draw(PLAIN),
            info=draw(PLAIN),
        )
        for index in range(draw(st.integers(1, 5)))
    )


@settings(max_examples=100, deadline=None)
@given(events())
def test_events_of_any_content_come_back_equal(sent: tuple[TurnEvent, ...]) -> None:
    assert codec.unpack_events(sent[0].number, codec.pack_events(sent)) == sent


@settings(max_examples=100, deadline=None)
@given(st.lists(U32))
def test_token_ids_of_any_list_come_back_equal(ids: list[int]) -> None:
    assert codec.unpack_ids(codec.pack_ids(ids)) == tuple(ids)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=64))
def test_bytes_of_any_content_raise_nothing_but_the_typed_error(data: bytes) -> None:
    for read in (codec.unpack_request, codec.unpack_messages, codec.unpack_ids, lambda d: codec.unpack_events(0, d)):
        try:
            read(data)
        except BadTurnData:
            continue
