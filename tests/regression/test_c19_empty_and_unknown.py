"""C19: saving and restoring an empty slot crashes; restoring what does not exist wipes the slot in use.

Reported for llama.cpp (#14434, #9173). Here nobody restores by name, so the cases become: a conversation without a
turn, a conversation whose pages are all gone, and a second turn while the first still runs. The worker lives on and
other conversations keep their ids.
"""

from __future__ import annotations

import redis

from tests.fleet import Fleet
from workers.turns.calls import get_turn
from workers.turns.events import TurnState

STORY = "The salt ships of the north came in at dawn, one after another, and their crews sang. " * 4


def test_conversation_without_a_turn_starts_from_nothing(local_fleet: Fleet) -> None:
    conversation = local_fleet.conversation()
    view = local_fleet.say("a", STORY, conversation_id=conversation)
    assert (view.state, view.usage["cached_tokens"]) == (TurnState.INCOMPLETE, 0)


def test_conversation_whose_pages_are_gone_goes_on_with_the_same_ids(local_fleet: Fleet) -> None:
    ids = []
    for pages_survive in (True, False):
        conversation = local_fleet.conversation()
        local_fleet.say("a", STORY, conversation_id=conversation, scope="conversation")
        local_fleet.settle()
        if not pages_survive:
            redis.Redis.from_url(local_fleet.worker("a").settings.pages_url).flushall()
        view = local_fleet.say("b", "And then?", conversation_id=conversation, scope="conversation")
        assert (view.usage["cached_tokens"] > 0) is pages_survive
        ids.append(local_fleet.token_ids(view.turn_id))
    assert ids[0] == ids[1]


def test_unknown_turn_changes_nothing_for_a_live_conversation(local_fleet: Fleet) -> None:
    conversation = local_fleet.conversation()
    local_fleet.say("a", STORY, conversation_id=conversation)
    local_fleet.worker("a").run_turn("resp_nobody")
    assert local_fleet.control.run(get_turn(local_fleet.tenant, "resp_nobody")) is None
    view = local_fleet.say("a", "And then?", conversation_id=conversation)
    other = local_fleet.conversation()
    local_fleet.say("b", STORY, conversation_id=other, scope="conversation")
    again = local_fleet.say("b", "And then?", conversation_id=other, scope="conversation")
    assert local_fleet.token_ids(view.turn_id) == local_fleet.token_ids(again.turn_id)


def test_parking_and_restoring_twice_is_harmless(local_fleet: Fleet) -> None:
    conversation = local_fleet.conversation()
    first = local_fleet.accept(STORY, conversation_id=conversation)
    local_fleet.run("a", first)
    local_fleet.settle()
    local_fleet.worker("a").run_turn(first)
    local_fleet.settle()
    second = local_fleet.say("b", "And then?", conversation_id=conversation)
    third = local_fleet.say("b", "And then?", conversation_id=conversation)
    assert second.usage["restored_pages"] > 0
    assert third.usage["cached_tokens"] > second.usage["cached_tokens"]
