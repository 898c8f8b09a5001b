"""The log as its writers and readers meet it: fences, restarts, cancel, a lost producer, and no gap under a race."""

from __future__ import annotations

import json
import threading
import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection, transaction

from approvals.models import ApprovalRequest
from streams import clock, log
from streams.models import Entry, Generation
from streams.problems import Invalid, NotFound
from streams.protocol import CLOCK, Actor, Chunk, Done, Text, ToolCall, decode_chunk, error_chunk
from tests.support import factories
from tests.support.threads import in_threads

ACTOR = Actor(kind="token", id="t", name="agent")
pytestmark = pytest.mark.django_db


@pytest.fixture
def generation() -> Generation:
    return factories.generation()


def append(
    generation: Generation,
    seq: int,
    *chunks: Chunk | str,
    attempt: int = 1,
    writer: str = "w",
    superseded_from: int | None = None,
) -> log.Appended:
    return log.append(
        generation_id=generation.pk,
        attempt=attempt,
        seq=seq,
        chunks=[Text(content=chunk) if isinstance(chunk, str) else chunk for chunk in chunks],
        writer=writer,
        actor=ACTOR,
        superseded_from=superseded_from,
    )


def rows(generation: Generation) -> list[tuple[int, int, Any]]:
    found = Entry.objects.filter(generation=generation).order_by("offset")
    return [(entry.offset, entry.attempt, json.loads(entry.body)) for entry in found]


def contents(generation: Generation) -> list[str]:
    return [body["content"] for _, _, body in rows(generation) if body["type"] == "text"]


# --- seq ----------------------------------------------------------------------------------------------------------


def test_an_overlapping_append_adds_only_what_is_new(generation: Generation) -> None:
    append(generation, 0, "a", "b")
    answer = append(generation, 1, "b", "c")
    assert (answer.next_seq, answer.duplicate) == (3, False)
    assert contents(generation) == ["a", "b", "c"]


def test_another_chunk_at_a_stored_seq_is_refused_with_its_place(generation: Generation) -> None:
    append(generation, 0, "a", "b")
    with pytest.raises(log.ChunkConflict) as refused:
        append(generation, 0, "a", "B", "c")
    assert refused.value.fields == {"index": 1, "nextSeq": 2}
    assert contents(generation) == ["a", "b"]


def test_a_gap_is_refused_and_says_what_is_missing(generation: Generation) -> None:
    append(generation, 0, "a")
    with pytest.raises(log.SeqGap) as refused:
        append(generation, 2, "c")
    assert refused.value.fields == {"nextSeq": 1}
    assert contents(generation) == ["a"]


def test_an_append_is_all_or_nothing(generation: Generation) -> None:
    call = ToolCall(id="1", name="pay", arguments="not json", index=0)
    with pytest.raises(Exception, match=r"."):
        append(generation, 0, "a", call, "b")
    assert rows(generation) == []
    assert ApprovalRequest.objects.count() == 0
    generation.refresh_from_db()
    assert (generation.next_offset, generation.next_seq, generation.chunk_count) == (0, 0, 0)


def test_a_log_that_does_not_exist_takes_nothing(generation: Generation) -> None:
    with pytest.raises(NotFound):
        log.append(generation_id=uuid.uuid4(), attempt=1, seq=0, chunks=[Text("a")], writer="w", actor=ACTOR)


# --- attempts and writers -----------------------------------------------------------------------------------------


def test_the_first_append_binds_its_writer_and_fences_every_other(generation: Generation) -> None:
    append(generation, 0, "a", writer="first")
    for seq, chunks in ((0, ["a"]), (1, ["b"]), (1, [])):
        with pytest.raises(log.AttemptTaken):
            append(generation, seq, *chunks, writer="second")
    append(generation, 1, "b", writer="first")
    assert contents(generation) == ["a", "b"]


def test_a_higher_attempt_starts_over_and_says_from_where_the_text_is_void(generation: Generation) -> None:
    append(generation, 0, "a", "b", error_chunk("x", "y", recoverable=True), writer="first")
    generation.refresh_from_db()
    assert generation.state == "retrying"
    answer = append(generation, 0, "c", attempt=2, writer="second")
    assert (answer.next_seq, answer.next_offset) == (1, 5)
    assert rows(generation)[3] == (3, 2, {"type": "restart", "attempt": 2, "supersededFrom": 0})
    assert rows(generation)[4] == (4, 2, {"type": "text", "content": "c"})
    # The replaced worker can't write on, nor repeat itself.
    for seq, chunk in ((3, "late"), (0, "a")):
        with pytest.raises(log.StaleAttempt):
            append(generation, seq, chunk, attempt=1, writer="first")
    append(generation, 0, "d", attempt=3, superseded_from=4)
    assert rows(generation)[5][2] == {"type": "restart", "attempt": 3, "supersededFrom": 4}
    append(generation, 0, "e", attempt=4)
    assert rows(generation)[7][2] == {"type": "restart", "attempt": 4, "supersededFrom": 5}, "where attempt 3 began"
    generation.refresh_from_db()
    assert (generation.attempt, generation.writer, generation.state) == (4, "w", "open")


def test_the_first_append_of_an_attempt_may_be_repeated(generation: Generation) -> None:
    append(generation, 0, "a")
    append(generation, 0, "b", attempt=2, superseded_from=0)
    assert append(generation, 0, "b", attempt=2, superseded_from=0).duplicate
    assert [body["type"] for _, _, body in rows(generation)] == ["text", "restart", "text"]


@pytest.mark.parametrize("attempt", [3, 4, 1_000])
def test_an_attempt_that_skips_a_number_is_refused(generation: Generation, attempt: int) -> None:
    with pytest.raises(log.AttemptGap):
        append(generation, 0, "a", attempt=attempt)
    assert rows(generation) == []


def test_an_attempt_is_not_raised_by_a_heartbeat_or_in_its_middle(generation: Generation) -> None:
    append(generation, 0, "a")
    with pytest.raises(log.AttemptGap):
        append(generation, 0, attempt=2)
    with pytest.raises(log.SeqGap):
        append(generation, 1, "b", attempt=2)
    generation.refresh_from_db()
    assert generation.attempt == 1


def test_superseding_from_outside_the_log_is_refused(generation: Generation) -> None:
    append(generation, 0, "a")
    Generation.objects.update(first_offset=1)
    for place in (0, 2, 99):
        with pytest.raises(Invalid) as refused:
            append(generation, 0, "b", attempt=2, superseded_from=place)
        assert refused.value.fields == {"field": "supersededFrom"}
    generation.refresh_from_db()
    assert (generation.attempt, generation.next_offset) == (1, 1)


def test_what_was_asked_in_a_superseded_part_is_cancelled(generation: Generation) -> None:
    call = ToolCall(id="1", name="pay", arguments='{"amount":1}', index=0)
    append(generation, 0, "a", call)
    append(generation, 0, call, attempt=2)
    first, second = ApprovalRequest.objects.order_by("requested_at", "attempt")
    assert (first.state, first.superseded, second.state) == ("cancelled", True, "pending")
    assert second.previous_id == first.pk
    assert "tool_result" not in [body["type"] for _, _, body in rows(generation)]


# --- the end ------------------------------------------------------------------------------------------------------


def test_nothing_follows_done(generation: Generation) -> None:
    append(generation, 0, "a", Done(reason="stop"))
    for attempt, seq in ((1, 2), (2, 0)):
        with pytest.raises(log.GenerationClosed) as refused:
            append(generation, seq, "b", attempt=attempt)
        assert refused.value.fields == {"state": "done"}
    with pytest.raises(log.GenerationClosed), transaction.atomic(), log.hold(generation.pk) as held:
        held.chunk(Text("the server is no exception"))
    with transaction.atomic(), log.hold(generation.pk) as held:
        assert held.notice({"type": "action"}) == 2
    assert [body["type"] for _, _, body in rows(generation)] == ["text", "done", "action"]


@pytest.mark.parametrize(
    ("reason", "state"),
    [("stop", "done"), ("tool_use", "done"), ("length", "done"), ("error", "error"), ("cancel", "cancelled")],
)
def test_the_reason_of_done_names_the_state(generation: Generation, reason: Any, state: str) -> None:
    append(generation, 0, Done(reason=reason))
    generation.refresh_from_db()
    assert (generation.state, generation.finish_reason) == (state, reason)
    assert generation.finished_at is not None


def test_after_a_cancel_every_done_is_a_cancel_and_repeats_as_it_was_sent(generation: Generation) -> None:
    assert log.request_cancel(generation_id=generation.pk, actor=ACTOR)
    assert not log.request_cancel(generation_id=generation.pk, actor=ACTOR)
    assert append(generation, 0, "a").cancel_requested
    append(generation, 1, Done(reason="stop"))
    assert rows(generation)[-1][2] == {"type": "done", "reason": "cancel"}
    assert append(generation, 1, Done(reason="stop")).duplicate
    assert append(generation, 1, Done(reason="cancel")).duplicate
    with pytest.raises(log.ChunkConflict):
        append(generation, 1, "b")
    assert not log.request_cancel(generation_id=generation.pk, actor=ACTOR)


# --- a producer that fell silent ----------------------------------------------------------------------------------


def silent_for(generation: Generation, seconds: int) -> None:
    Generation.objects.filter(pk=generation.pk).update(producer_seen_at=clock.now() - timedelta(seconds=seconds))


def test_a_silent_producer_is_ended_by_the_server_once(generation: Generation) -> None:
    append(generation, 0, "a")
    silent_for(generation, 59)
    assert log.lost_producers() == []
    assert not log.end_lost(generation_id=generation.pk)
    silent_for(generation, 61)
    assert log.lost_producers() == [generation.pk]
    assert log.end_lost(generation_id=generation.pk)
    assert not log.end_lost(generation_id=generation.pk)
    error, done = (body for _, _, body in rows(generation)[1:])
    assert (error["error"]["code"], error["recoverable"]) == ("producer_lost", False)
    assert done == {"type": "done", "reason": "error"}
    generation.refresh_from_db()
    assert generation.state == "error"


def test_a_silent_producer_that_was_told_to_stop_ends_cancelled(generation: Generation) -> None:
    log.request_cancel(generation_id=generation.pk, actor=ACTOR)
    silent_for(generation, 61)
    assert log.end_lost(generation_id=generation.pk)
    assert [body["type"] for _, _, body in rows(generation)] == ["cancel_requested", "done"]
    generation.refresh_from_db()
    assert generation.state == "cancelled"


def test_a_waiting_generation_never_times_out_unless_a_cancel_was_asked(generation: Generation) -> None:
    append(generation, 0, ToolCall(id="1", name="pay", arguments="{}", index=0))
    generation.refresh_from_db()
    assert generation.state == "waiting"
    silent_for(generation, 100_000)
    assert log.lost_producers() == []
    assert not log.end_lost(generation_id=generation.pk)
    log.request_cancel(generation_id=generation.pk, actor=ACTOR)
    silent_for(generation, 61)
    assert log.lost_producers() == [generation.pk]
    assert log.end_lost(generation_id=generation.pk)


def test_a_producer_is_not_blamed_for_the_time_a_person_took(generation: Generation) -> None:
    append(generation, 0, ToolCall(id="1", name="pay", arguments="{}", index=0))
    silent_for(generation, 100_000)
    with transaction.atomic(), log.hold(generation.pk) as held:
        held.generation.open_gated = held.generation.open_actions = 0
    assert log.lost_producers() == []
    assert not log.end_lost(generation_id=generation.pk)
    generation.refresh_from_db()
    assert clock.now() - generation.producer_seen_at < timedelta(seconds=10)


def test_a_timeout_of_a_day_is_honoured() -> None:
    generation = factories.generation(producer_timeout_seconds=86_400)
    silent_for(generation, 86_000)
    assert log.lost_producers() == []
    silent_for(generation, 86_500)
    assert log.lost_producers() == [generation.pk]


# --- reading ------------------------------------------------------------------------------------------------------


def test_a_page_ends_at_its_entries_or_at_its_bytes(generation: Generation) -> None:
    append(generation, 0, *["x" * 1_000 for _ in range(10)])
    assert [row.offset for row in log.read(generation_id=generation.pk, from_offset=2, limit=3)] == [2, 3, 4]
    paged = log.read(generation_id=generation.pk, from_offset=0, max_bytes=2_500)
    assert [row.offset for row in paged] == [0, 1, 2]
    assert [row.offset for row in log.read(generation_id=generation.pk, from_offset=4, max_bytes=1)] == [4]
    assert log.read(generation_id=generation.pk, from_offset=10) == []


def test_an_entry_reads_as_the_wire_has_it(generation: Generation) -> None:
    append(generation, 0, 'é\u2028"\n')
    row = log.read(generation_id=generation.pk, from_offset=0)[0]
    entry = json.loads(row.text)
    assert list(entry) == ["offset", "attempt", "at", "chunk"]
    assert entry["chunk"] == {"type": "text", "content": 'é\u2028"\n'}
    assert entry["at"] == clock.rfc3339(Entry.objects.get().at)


# --- text is what was sent ----------------------------------------------------------------------------------------

FAMILY = "👨‍👩‍👧"


@pytest.mark.parametrize("whole", ["é", "e\u0301", "你", FAMILY, "\u202egnp", "\ufeff"])
def test_a_text_cut_between_any_two_characters_is_the_same_text(whole: str) -> None:
    """C48: every cut between code points; a cut inside one is no text, and refused (below)."""
    for cut in range(len(whole) + 1):
        generation = factories.generation()
        append(generation, 0, whole[:cut])
        append(generation, 1, whole[cut:])
        assert "".join(contents(generation)) == whole


@pytest.mark.parametrize("whole", ["é", "你", FAMILY])
def test_a_chunk_cut_inside_a_character_is_refused(whole: str) -> None:
    """C48: at every byte on the wire, and at every UTF-16 unit in an escape."""
    from streams.protocol import BadChunk

    data = whole.encode()
    for cut in range(1, len(data)):
        try:
            data[:cut].decode()
        except UnicodeDecodeError:
            with pytest.raises(BadChunk):
                decode_chunk(b'{"type":"text","content":"' + data[:cut] + b'"}')
    units = whole.encode("utf-16-be")
    escapes = [f"\\u{units[place : place + 2].hex()}" for place in range(0, len(units), 2)]
    for cut in range(1, len(escapes)):
        for half in ("".join(escapes[:cut]), "".join(escapes[cut:])):
            sent = f'{{"type":"text","content":"{half}"}}'
            try:
                json.loads(sent)["content"].encode()
            except UnicodeEncodeError:
                with pytest.raises(BadChunk):
                    decode_chunk(sent)
            else:
                decoded = decode_chunk(sent)
                assert isinstance(decoded, Text)
                assert decoded.content == json.loads(sent)["content"]


def test_a_result_keeps_every_digit(generation: Generation) -> None:
    number = "0.1000000000000000055511151231257827021181583404541015625"
    result = f'"result":{{"n":[9007199254740993,{number}]}}'
    chunk = decode_chunk(f'{{"type":"tool_result","id":"r","toolCallId":"c",{result},"isError":false}}')
    with transaction.atomic(), log.hold(generation.pk) as held:
        held.chunk(chunk)
    assert (
        f'"result":{{"n":[9007199254740993,{number}]}}' in log.read(generation_id=generation.pk, from_offset=0)[0].text
    )


# --- races --------------------------------------------------------------------------------------------------------


@pytest.mark.django_db(transaction=True)
def test_writers_at_once_leave_no_gap_and_one_of_each() -> None:
    generation = factories.generation()
    notices = 8

    def note() -> None:
        for _ in range(5):
            with transaction.atomic(), log.hold(generation.pk) as held:
                held.notice({"type": "action", "state": "x"})

    def write() -> None:
        for seq in range(20):
            append(generation, seq, f"{seq} ")

    assert in_threads(write, *[note] * notices, write) == [None] * (notices + 2)
    offsets = [offset for offset, _, _ in rows(generation)]
    assert offsets == list(range(20 + 5 * notices))
    assert contents(generation) == [f"{seq} " for seq in range(20)]
    generation.refresh_from_db()
    assert (generation.next_offset, generation.next_seq, generation.chunk_count) == (len(offsets), 20, 20)


@pytest.mark.django_db(transaction=True)
def test_the_first_of_two_workers_at_once_gets_the_attempt() -> None:
    generation = factories.generation()

    def write(writer: str) -> log.Appended:
        return append(generation, 0, writer, writer=writer)

    results = in_threads(*[lambda name=f"w{n}": write(name) for n in range(6)])  # type: ignore[misc]
    assert [type(result) for result in results].count(log.Appended) == 1
    assert [type(result) for result in results].count(log.AttemptTaken) == 5
    assert len(contents(generation)) == 1


@pytest.mark.postgres
@pytest.mark.django_db(transaction=True)
def test_a_reader_sees_a_slow_writers_entry_before_the_one_behind_it() -> None:
    """C42: A takes its place and sleeps; B can't get past it, so a reader that polls misses nothing."""
    generation = factories.generation()
    placed, let_go, b_done = threading.Event(), threading.Event(), threading.Event()

    def slow() -> None:
        with transaction.atomic():
            append(generation, 0, "A")
            placed.set()
            assert let_go.wait(20)

    def quick() -> None:
        assert placed.wait(20)
        with transaction.atomic(), log.hold(generation.pk) as held:
            held.notice({"type": "action", "state": "B"})
        b_done.set()

    def poll() -> list[int]:
        assert placed.wait(20)
        seen: list[int] = []
        # While A sleeps, B waits for it and nothing can be read: neither A's entry nor one behind it.
        assert not b_done.wait(0.5)
        seen += [row.offset for row in log.read(generation_id=generation.pk, from_offset=0)]
        assert seen == []
        let_go.set()
        assert b_done.wait(20)
        return [row.offset for row in log.read(generation_id=generation.pk, from_offset=len(seen))]

    results = in_threads(slow, quick, poll)
    assert results == [None, None, [0, 1]]
    assert contents(generation) == ["A"]


@pytest.mark.django_db(transaction=True)
def test_a_cancel_at_the_moment_of_an_append_is_seen_by_the_next(generation: Generation) -> None:
    for round_ in range(5):
        one = factories.generation()
        results = in_threads(
            lambda one=one: append(one, 0, "a", Done(reason="stop")),  # type: ignore[misc]
            lambda one=one: log.request_cancel(generation_id=one.pk, actor=CLOCK),  # type: ignore[misc]
        )
        assert not any(isinstance(result, Exception) for result in results), (round_, results)
        one.refresh_from_db()
        kinds = [body["type"] for _, _, body in rows(one)]
        if results[1]:
            assert (kinds, one.state) == (["cancel_requested", "text", "done"], "cancelled")
        else:
            assert (kinds, one.state) == (["text", "done"], "done")


def test_the_quick_way_costs_two_statements(generation: Generation, django_assert_num_queries: Any) -> None:
    append(generation, 0, "a")
    # Two statements between the marks of a savepoint (the test's own transaction is around it).
    with django_assert_num_queries(4) as captured:
        append(generation, 1, *["b"] * 100)
    assert connection.queries_log is not None
    assert sum("INSERT" in query["sql"] for query in captured) == 1
    assert len(contents(generation)) == 101
