"""Every key of turn control and the registry. Control is one server (or Sentinel), so scripts may build names.

A turn is looked up by its id alone (a message names nothing else), so its keys belong to the fleet (`-`); the tenant
stands in the record and every operation that a client can reach compares it.

    kvalet:-:turn:<turn>                    hash, the record (lua/library.lua lists the fields)
    kvalet:-:stream:<turn>                  stream, entries {n: first number, e: msgpack events}; id <last number + 1>-0
    kvalet:-:waiting:<turn>                 list, turns that name this open turn as their parent
    kvalet:-:branch:<branch>                list, open turns of a branch in order
    kvalet:-:conversation:<conversation>    hash: tenant, created_ms, metadata, head, root, template_time, scope,
                                            worker, pending (msgpack messages), deleted
    kvalet:-:conversation-turns:<conv>      list, committed turns in order
    kvalet:-:queued:<model>:<tenant>        zset, runnable turns without a lease, scored by rank (ms)
    kvalet:-:forced:<worker>                zset, the same for turns that only this worker may run
    kvalet:-:tenants:<model>                zset, tenants with open turns, scored by tokens served
    kvalet:-:open                           hash, model -> number of open turns
    kvalet:-:open:<model>                   hash, tenant -> number of open turns
    kvalet:-:service-ms                     hash, model -> moving average of a turn's run time
    kvalet:-:leased                         zset, leased turns scored by the lease's end (ms)
    kvalet:-:worker-leases:<worker>         set, turns leased by a worker
    kvalet:-:due                            zset, runnable turns without a lease, scored by the next send (ms)
    kvalet:-:deadlines                      zset, open turns scored by deadline (ms)
    kvalet:-:claim:<nonce>                  string, the turn that a claim call took (so that it can be repeated)
    kvalet:-:control:<worker>               stream, notes to a worker {turn, stop}
    kvalet:-:hub:<hub>                      stream, wakes one event hub
    kvalet:-:worker:<worker>                hash with TTL: free, draining, boot, record (msgpack)
    kvalet:-:workers                        set, worker ids seen
    kvalet:-:models                         hash, model -> msgpack model record
    kvalet:-:bundle:<digest>                string, tokenizer bundle
    kvalet:-:quarantine                     hash, boot id -> time (ms) and reason
    kvalet:-:dead-letters                   list, messages that no worker could read
    kvalet.model.<model>                    list, Celery's queue of a model (the broker is control)
    kvalet.worker.<worker>                  list, Celery's queue of one worker
    kvalet:<tenant>:idempotency:<digest>    hash {body, turn}
    kvalet:<tenant>:history:<digest>        string, turn whose reply ends this history
    kvalet:<tenant>:transcript:<turn>       snapshot_store.keys
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

FLEET_PREFIX: Final = "kvalet:-:"

# Lua gets this table as `K`: a name is spelled once, here.
LUA_KEYS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "turn": "kvalet:-:turn:",
        "stream": "kvalet:-:stream:",
        "waiting": "kvalet:-:waiting:",
        "branch": "kvalet:-:branch:",
        "conversation": "kvalet:-:conversation:",
        "conversation_turns": "kvalet:-:conversation-turns:",
        "queued": "kvalet:-:queued:",
        "forced": "kvalet:-:forced:",
        "tenants": "kvalet:-:tenants:",
        "open": "kvalet:-:open",
        "open_by_tenant": "kvalet:-:open:",
        "service_ms": "kvalet:-:service-ms",
        "leased": "kvalet:-:leased",
        "worker_leases": "kvalet:-:worker-leases:",
        "due": "kvalet:-:due",
        "deadlines": "kvalet:-:deadlines",
        "claim": "kvalet:-:claim:",
        "control": "kvalet:-:control:",
        "worker": "kvalet:-:worker:",
        "workers": "kvalet:-:workers",
        "models": "kvalet:-:models",
        "bundle": "kvalet:-:bundle:",
        "quarantine": "kvalet:-:quarantine",
        "dead_letters": "kvalet:-:dead-letters",
        "model_queue": "kvalet.model.",
        "worker_queue": "kvalet.worker.",
        "tenant": "kvalet:",
        "transcript": ":transcript:",
    }
)
_TENANT_KINDS: Final = ("idempotency", "history", "transcript")


def stream_key(turn_id: str) -> str:
    """Stream of a turn's events."""
    return LUA_KEYS["stream"] + turn_id


def control_stream_key(worker_id: str) -> str:
    """Stream of notes to a worker."""
    return LUA_KEYS["control"] + worker_id


def hub_key(hub_id: str) -> str:
    """Stream that wakes one event hub."""
    return f"{FLEET_PREFIX}hub:{hub_id}"


def tenant_key(tenant: str, kind: str, name: str) -> str:
    """Key of one of a tenant's own kinds: idempotency, history."""
    if kind not in _TENANT_KINDS:
        raise ValueError(f"kind={kind!r}: one of {_TENANT_KINDS}")
    return f"kvalet:{tenant}:{kind}:{name}"


def model_queue(model: str) -> str:
    """Celery queue of a model."""
    return LUA_KEYS["model_queue"] + model


def worker_queue(worker_id: str) -> str:
    """Celery queue of one worker."""
    return LUA_KEYS["worker_queue"] + worker_id
