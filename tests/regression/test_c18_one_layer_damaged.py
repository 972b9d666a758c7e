"""C18 (osaurus-ai/vmlx-swift PR#287): one layer's record missing or damaged, and the restore still reported success.

There the token count came from the sibling layers, so the text was fluent and wrong. Here a page of all layers is one
record. Each way to lose or change exactly one layer (first, middle, last), only its K, only its V, only its scales, or
to add one, must refuse the whole page; `verify` names layer and plane and exits 3.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from typer.testing import CliRunner
from xxhash import xxh3_128

from gpu.formats import cache_format
from gpu.layout import KVLayout
from snapshot_store.cli import app
from snapshot_store.errors import DamagedRecord, LayoutMismatch, OversizedRecord, SegmentMismatch, TruncatedRecord
from snapshot_store.record import header_bytes
from snapshot_store.redis_store import RedisPageStore
from snapshot_store.store import PageDamaged
from snapshot_store.wire_pool import WireSettings
from tests.services import ValkeyServer
from tests.store_fleet import ParkedFleet
from tests.store_pages import Page, make_body, make_pages

_FORMAT = cache_format("k8v4")
LAYOUT = KVLayout(3, 2, 64, 16, _FORMAT.k, _FORMAT.v)
SEGMENTS = tuple(LAYOUT.plane(layer, is_v).num_bytes for layer in range(3) for is_v in (0, 1))
LAYERS = (0, 1, 2)


@pytest.fixture
def page() -> Page:
    (made,) = make_pages(list(range(16)), segments=SEGMENTS)
    return made


def _restore(server: ValkeyServer, page: Page, record: bytes) -> DamagedRecord:
    server.client().set(page.key, record)
    store = RedisPageStore(WireSettings(server.url))
    (outcome,) = store.fetch([page.request(bytearray(LAYOUT.page_bytes))])
    store.close()
    assert isinstance(outcome, PageDamaged), outcome
    return outcome.error


def _with_body(page: Page, change: Callable[[bytearray], None]) -> bytes:
    body = bytearray(page.body)
    change(body)
    return page.header + bytes(body)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("is_v", [0, 1])
@pytest.mark.parametrize("part", ["plane", "codes", "scales"])
def test_c18_one_plane_zeroed_refuses_the_page_and_names_it(
    pages_server: ValkeyServer, page: Page, layer: int, is_v: int, part: str
) -> None:
    plane = LAYOUT.plane(layer, is_v)
    start = plane.scales_offset if part == "scales" else plane.offset
    end = plane.scales_offset if part == "codes" else plane.end

    def zero(body: bytearray) -> None:
        body[start:end] = bytes(end - start)

    error = _restore(pages_server, page, _with_body(page, zero))
    assert isinstance(error, SegmentMismatch)
    assert (error.layer, error.plane) == (layer, "KV"[is_v])


@pytest.mark.parametrize("layer", LAYERS)
def test_c18_one_layer_removed_refuses_the_page(pages_server: ValkeyServer, page: Page, layer: int) -> None:
    def remove(body: bytearray) -> None:
        del body[layer * LAYOUT.layer_bytes : (layer + 1) * LAYOUT.layer_bytes]

    assert isinstance(_restore(pages_server, page, _with_body(page, remove)), TruncatedRecord)


@pytest.mark.parametrize("layer", LAYERS)
def test_c18_one_layer_copied_over_its_neighbour_refuses_the_page(
    pages_server: ValkeyServer, page: Page, layer: int
) -> None:
    other = (layer + 1) % 3
    size = LAYOUT.layer_bytes

    def duplicate(body: bytearray) -> None:
        body[other * size : (other + 1) * size] = body[layer * size : (layer + 1) * size]

    error = _restore(pages_server, page, _with_body(page, duplicate))
    assert isinstance(error, SegmentMismatch)
    assert error.layer == other


def test_c18_one_layer_more_than_the_header_says_refuses_the_page(pages_server: ValkeyServer, page: Page) -> None:
    record = page.record + bytes(LAYOUT.layer_bytes)
    assert isinstance(_restore(pages_server, page, record), OversizedRecord)


@pytest.mark.parametrize("num_layers", [2, 4])
def test_c18_sound_record_of_another_number_of_layers_refuses_the_page(
    pages_server: ValkeyServer, page: Page, num_layers: int
) -> None:
    segments = SEGMENTS[:2] * num_layers
    other = Page(page.key, page.identity, make_body(page.identity.digest, segments), segments)
    assert isinstance(_restore(pages_server, page, other.record), LayoutMismatch)


@pytest.mark.parametrize("layer", LAYERS)
def test_c18_layer_duplicated_with_its_checksum_and_resealed_refuses_the_page(
    pages_server: ValkeyServer, page: Page, layer: int
) -> None:
    """A faulty writer that copies a layer with its checksum and seals anew is found: checksums know their place."""
    other = (layer + 1) % 3
    raw = bytearray(page.header)
    checksums_at = header_bytes(16, 6) - 8 * 6
    for plane in (0, 1):
        (checksum,) = struct.unpack_from("<Q", raw, checksums_at + 8 * (2 * layer + plane))
        struct.pack_into("<Q", raw, checksums_at + 8 * (2 * other + plane), checksum)
    raw[16:32] = xxh3_128(page.key.encode() + bytes(raw[:16]) + bytes(raw[32:])).digest()
    body = bytearray(page.body)
    size = LAYOUT.layer_bytes
    body[other * size : (other + 1) * size] = body[layer * size : (layer + 1) * size]
    assert isinstance(_restore(pages_server, page, bytes(raw) + bytes(body)), SegmentMismatch)


@pytest.mark.parametrize("segment", range(6))
def test_c18_verify_names_the_layer_and_exits_3(
    control_server: ValkeyServer, pages_server: ValkeyServer, segment: int
) -> None:
    fleet = ParkedFleet(control_server, pages_server)
    parked = fleet.park(fleet.commit("resp_1", input_ids=tuple(range(32))))[1]
    start = len(parked.header) + sum(parked.segments[:segment])
    fleet.pages.setrange(parked.key, start, bytes(parked.segments[segment]))
    urls = ["--control", control_server.url, "--pages", pages_server.url]
    result = CliRunner().invoke(app, ["verify", "resp_1", *urls])
    assert result.exit_code == 3
    assert f"layer {segment // 2} plane {'KV'[segment % 2]}" in result.output
