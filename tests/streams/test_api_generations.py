"""Generations over HTTP (contract §3): create, list, show, append, read, cancel."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from streams import clock
from streams.models import Entry, Generation
from tests.streams.conftest import Agent
from tests.support import factories

MakeAgent = Callable[..., Agent]


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "content": content}


def append(agent: Agent, log_id: str, seq: int, *chunks: Any, attempt: int = 1, **more: Any) -> Any:
    return agent.post(f"generations/{log_id}/chunks", {"attempt": attempt, "seq": seq, "chunks": list(chunks), **more})


def stored(log_id: str) -> list[tuple[int, str, str]]:
    return list(Entry.objects.filter(generation_id=log_id).order_by("offset").values_list("offset", "kind", "body"))


# --- create, list, show -------------------------------------------------------------------------------------------


def test_a_generation_is_made_once_for_one_id_and_body(agent: Agent) -> None:
    body = {"id": str(uuid.uuid4()), "title": "a story", "metadata": {"n": 1, "deep": [1.5]}}
    first, second = agent.post("generations", body), agent.post("generations", body)
    assert (first.status, second.status) == (201, 200)
    assert first.body == second.body
    assert first.body["state"] == "open"
    assert first.body["nextOffset"] == first.body["firstOffset"] == 0
    assert first.body["metadata"] == {"n": 1, "deep": [1.5]}
    other = agent.post("generations", {**body, "title": "another"})
    assert (other.status, other.body["code"]) == (409, "generation_exists")
    assert Generation.objects.get().title == "a story"


def test_an_id_that_another_token_took_is_refused(agent: Agent, make_agent: MakeAgent) -> None:
    body = {"id": str(uuid.uuid4())}
    assert agent.post("generations", body).status == 201
    answer = make_agent().post("generations", body)
    assert (answer.status, answer.body["code"]) == (409, "generation_exists")
    assert Generation.objects.get().token_id == agent.token.pk


def test_a_number_in_metadata_stays_digit_for_digit(agent: Agent) -> None:
    number = "9007199254740993.1000000000000000055"
    made = agent.post("generations", raw=f'{{"metadata":{{"n":{number}}}}}'.encode())
    assert made.status == 201
    shown = agent.get(f"generations/{made.body['id']}")
    assert f'"n":{number}'.encode() in shown.raw


def test_a_token_sees_what_it_made_and_read_all_everything(agent: Agent, log_id: str, make_agent: MakeAgent) -> None:
    stranger, reader = make_agent(), make_agent("read:all")
    for path in ("", "/entries", "/events"):
        answer = stranger.get(f"generations/{log_id}{path}")
        absent = stranger.get(f"generations/{uuid.uuid4()}{path}")
        assert (answer.status, answer.body["code"]) == (404, "not_found")
        assert answer.body == absent.body
    assert stranger.get("generations").body == {"results": [], "next": None}
    assert [one["id"] for one in reader.get("generations").body["results"]] == [log_id]
    assert reader.get(f"generations/{log_id}").status == 200


def test_reading_everything_is_not_writing_to_it(log_id: str, make_agent: MakeAgent) -> None:
    reader = make_agent("read:all", "generations:write")
    appended = append(reader, log_id, 0, text("forged"))
    assert (appended.status, appended.body["code"]) == (403, "not_allowed")
    assert reader.post(f"generations/{log_id}/cancel").status == 403
    assert stored(log_id) == []
    assert not Generation.objects.get().cancel_requested


def test_a_token_without_the_scope_opens_nothing(make_agent: MakeAgent) -> None:
    answer = make_agent("approvals:request").post("generations", {})
    assert (answer.status, answer.body["code"]) == (403, "not_allowed")
    assert not Generation.objects.exists()
    assert make_agent("claims").get("generations").status == 403


def test_the_list_goes_on_by_cursor_without_gap_or_double(agent: Agent) -> None:
    ids = [agent.post("generations", {"conversation": "c" if n % 2 else "d"}).body["id"] for n in range(5)]
    # Three of one moment: the cursor has to tell them apart by id.
    Generation.objects.filter(pk__in=ids[:3]).update(created_at=clock.now() - timedelta(hours=1))
    seen: list[str] = []
    cursor = ""
    while True:
        page = agent.get(f"generations?limit=2&cursor={cursor}").body
        seen += [one["id"] for one in page["results"]]
        if page["next"] is None:
            break
        cursor = page["next"]
    assert len(seen) == 5
    assert set(seen) == set(ids)
    assert seen[:2] == [ids[4], ids[3]]
    assert {one["id"] for one in agent.get("generations?conversation=c").body["results"]} == {ids[1], ids[3]}


def test_the_list_filters_by_the_state_it_shows(agent: Agent) -> None:
    logs = {
        name: agent.post("generations", {}).body["id"] for name in ("open", "retrying", "done", "error", "cancelling")
    }
    failing = {"type": "error", "error": {"code": "x", "message": "y"}, "recoverable": True}
    append(agent, logs["retrying"], 0, failing)
    append(agent, logs["done"], 0, {"type": "done", "reason": "length"})
    append(agent, logs["error"], 0, {"type": "done", "reason": "error"})
    agent.post(f"generations/{logs['cancelling']}/cancel")
    for name, log_id in logs.items():
        listed = agent.get(f"generations?state={name}").body["results"]
        assert [(one["id"], one["state"]) for one in listed] == [(log_id, name)]
    wrong = agent.get("generations?state=openn")
    assert (wrong.status, wrong.body["field"]) == (400, "state")


# --- append -------------------------------------------------------------------------------------------------------


def test_an_append_is_stored_and_told_what_comes_next(agent: Agent, log_id: str) -> None:
    answer = append(agent, log_id, 0, text("a"), text("b"))
    assert answer.status == 201
    assert answer.body == {"nextSeq": 2, "nextOffset": 2, "cancelRequested": False, "actions": []}
    assert [(offset, json.loads(body)["content"]) for offset, _, body in stored(log_id)] == [(0, "a"), (1, "b")]


def test_the_same_append_again_is_a_duplicate_also_after_the_end(agent: Agent, log_id: str) -> None:
    done = {"type": "done", "reason": "stop", "usage": {"promptTokens": 1, "completionTokens": 2, "totalTokens": 3}}
    assert append(agent, log_id, 0, text("a"), done).status == 201
    again = append(agent, log_id, 0, text("a"), done)
    assert again.status == 200
    assert again.body["duplicate"] is True
    assert (again.body["nextSeq"], again.body["nextOffset"]) == (2, 2)
    assert len(stored(log_id)) == 2
    late = append(agent, log_id, 2, text("b"))
    assert (late.status, late.body["code"], late.body["state"]) == (409, "generation_closed", "done")
    shown = agent.get(f"generations/{log_id}").body
    assert (shown["state"], shown["finishReason"], shown["usage"]["totalTokens"]) == ("done", "stop", 3)
    assert shown["metrics"]["chunkCount"] == 2
    assert shown["metrics"]["tokenUsage"] == shown["usage"]


def test_without_chunks_it_is_a_heartbeat_that_binds_no_writer(agent: Agent, log_id: str) -> None:
    Generation.objects.update(producer_seen_at=clock.now() - timedelta(seconds=50))
    answer = agent.post(f"generations/{log_id}/chunks", {"attempt": 1, "seq": 0, "chunks": [], "writer": "first"})
    assert answer.status == 201
    assert clock.now() - Generation.objects.get().producer_seen_at < timedelta(seconds=10)
    assert append(agent, log_id, 0, text("a"), writer="second").status == 201
    taken = append(agent, log_id, 0, text("a"), writer="first")
    assert (taken.status, taken.body["code"]) == (409, "attempt_taken")


@pytest.mark.parametrize(
    ("sent", "index"),
    [
        ('[{"type":"text","content":"a"},{"type":"txt"}]', 1),
        ('[{"type":"text","content":"a","more":1}]', 0),
        ('[{"type":"text","content":7}]', 0),
        ('[{"type":"text"}]', 0),
        ('[{"type":"text","content":"a\\u0000"}]', 0),
        ('[{"type":"text","content":"\\ud83d"}]', 0),
        ('[{"type":"text","content":"a"},{"type":"text","content":"\\ude00\\ud83d"}]', 1),
        ('[{"type":"text","content":"a","content":"b"}]', 0),
        ('[{"type":"text","content"\\n:"a","content"\\t:"b"}]'.replace("\\n", "\n").replace("\\t", "\t"), 0),
        ('[{"type":"tool_result","id":"1","toolCallId":"c","result":{"a":1,"a":2},"isError":false}]', 0),
        ('[{"type":"tool_result","id":"1","toolCallId":"c","result":{"a":"\\u0000"},"isError":false}]', 0),
        ('[{"type":"tool_result","id":"1","toolCallId":"c","result":1e999,"isError":false}]', 0),
        ('[{"type":"tool_result","id":"1","toolCallId":"c","result":' + "[" * 65 + "]" * 65 + ',"isError":false}]', 0),
        ('[{"type":"tool_call","id":"","name":"t","arguments":"{}","index":0}]', 0),
        ('[{"type":"tool_call","id":"1","name":"t","arguments":"{}","index":-1}]', 0),
        ('[{"type":"tool_call","id":"1","name":"t","arguments":"{}","index":99999999999999999999}]', 0),
        ('[{"type":"tool_call","id":"1","name":"t","arguments":{},"index":0}]', 0),
        ('[{"type":"done","reason":"bored"}]', 0),
        ('[{"type":"done","reason":"stop"},{"type":"text","content":"a"}]', 1),
        ('[{"type":"done","reason":"stop","usage":{"promptTokens":-1,"completionTokens":0,"totalTokens":0}}]', 0),
        ('[{"type":"error","error":{"code":"a","message":"b"},"recoverable":true,"retryAfter":-5}]', 0),
        ("[7]", 0),
        ("[null]", 0),
    ],
)
def test_a_bad_chunk_is_refused_with_its_index_and_nothing_is_written(
    agent: Agent, log_id: str, sent: str, index: int
) -> None:
    answer = agent.post(f"generations/{log_id}/chunks", raw=f'{{"attempt":1,"seq":0,"chunks":{sent}}}'.encode())
    assert answer.status == 400, answer.body
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert answer.body["index"] == index
    assert stored(log_id) == []
    assert Generation.objects.get().next_offset == 0


@pytest.mark.parametrize(
    ("sent", "field"),
    [
        ('{"attempt":0,"seq":0,"chunks":[]}', "attempt"),
        ('{"attempt":true,"seq":0,"chunks":[]}', "attempt"),
        ('{"attempt":1.0,"seq":0,"chunks":[]}', "attempt"),
        ('{"attempt":99999999999,"seq":0,"chunks":[]}', "attempt"),
        ('{"attempt":1,"seq":-1,"chunks":[]}', "seq"),
        ('{"attempt":1,"seq":99999999999999999999,"chunks":[]}', "seq"),
        ('{"attempt":1,"chunks":[]}', "seq"),
        ('{"attempt":1,"seq":0,"chunks":{}}', "chunks"),
        ('{"attempt":1,"seq":0,"chunks":[],"more":1}', "more"),
        ('{"attempt":1,"seq":0,"chunks":[],"writer":""}', "writer"),
        ('{"attempt":1,"seq":0,"chunks":[],"writer":"a\\u0000"}', "writer"),
        ('{"attempt":1,"seq":0,"chunks":[],"supersededFrom":-1}', "supersededFrom"),
        ('{"attempt":1,"seq":0,"seq":1,"chunks":[]}', "seq"),
        ('{"attempt":1,"seq":0,"chunks":[],"chunks":[]}', "chunks"),
        ('{"attempt":1,"seq"  :0,"seq"\t:1,"chunks":[{"type":"text","content":"\\":\\":"}]}', "seq"),
    ],
)
def test_a_bad_envelope_is_refused_with_its_field(agent: Agent, log_id: str, sent: str, field: str) -> None:
    answer = agent.post(f"generations/{log_id}/chunks", raw=sent.encode())
    assert (answer.status, answer.body["code"], answer.body.get("field")) == (400, "invalid", field)
    assert stored(log_id) == []


def test_a_writer_whose_name_looks_like_json_is_only_a_name(agent: Agent, log_id: str) -> None:
    answer = append(agent, log_id, 0, text('"a":"b" "c":'), writer='"x":"y","z":')
    assert answer.status == 201
    assert Generation.objects.get().writer == '"x":"y","z":'


def test_the_limits_of_an_append_are_named(agent: Agent, log_id: str) -> None:
    many = append(agent, log_id, 0, *[text("a")] * 1_001)
    assert (many.status, many.body["code"], many.body["limit"]) == (413, "too_large", 1_000)
    big = append(agent, log_id, 0, text("a"), text("b" * 262_144))
    assert (big.status, big.body["code"], big.body["limit"], big.body["index"]) == (413, "too_large", 262_144, 1)
    whole = append(agent, log_id, 0, *[text("c" * 200_000)] * 6)
    assert (whole.status, whole.body["code"], whole.body["limit"]) == (413, "too_large", 1_048_576)
    assert stored(log_id) == []
    assert append(agent, log_id, 0, *[text("a")] * 1_000).status == 201
    assert append(agent, log_id, 1_000, text("b" * 262_100)).status == 201
    assert Generation.objects.get().next_offset == 1_001


def test_only_json_is_taken_and_only_posts(agent: Agent, log_id: str) -> None:
    wrong = agent.post(f"generations/{log_id}/chunks", raw=b"{}", content_type="text/plain")
    assert (wrong.status, wrong.body["code"]) == (415, "unsupported_media_type")
    got = agent.get(f"generations/{log_id}/chunks")
    assert (got.status, got.headers["Allow"]) == (405, "POST")


# --- read ---------------------------------------------------------------------------------------------------------


def test_entries_are_read_in_pages_to_an_empty_tail(agent: Agent, log_id: str) -> None:
    append(agent, log_id, 0, *[text(str(n)) for n in range(5)])
    page = agent.get(f"generations/{log_id}/entries?from=1&limit=3").body
    assert [entry["offset"] for entry in page["entries"]] == [1, 2, 3]
    assert page["entries"][0]["chunk"] == text("1")
    assert page["entries"][0]["attempt"] == 1
    assert page["entries"][0]["at"].endswith("Z")
    assert page["nextOffset"] == 4
    assert agent.get(f"generations/{log_id}/entries?from=5").body == {"entries": [], "nextOffset": 5, "state": "open"}
    assert agent.get(f"generations/{log_id}/entries?from=99").body["nextOffset"] == 5


def test_what_was_pruned_is_gone_and_not_empty(agent: Agent, log_id: str) -> None:
    append(agent, log_id, 0, *[text(str(n)) for n in range(5)])
    Generation.objects.update(first_offset=3)
    for call in ("entries?from=2", "events?from=2"):
        answer = agent.get(f"generations/{log_id}/{call}")
        assert (answer.status, answer.body["code"], answer.body["firstOffset"]) == (410, "offset_gone", 3)
    assert [entry["offset"] for entry in agent.get(f"generations/{log_id}/entries").body["entries"]] == [3, 4]


@pytest.mark.parametrize(
    "query", ["from=-1", "from=x", "from=1.5", "from=9e9", "limit=0", "limit=1001", "from=" + "9" * 40, "from=٣"]
)
def test_a_bad_offset_or_limit_is_refused(agent: Agent, log_id: str, query: str) -> None:
    answer = agent.get(f"generations/{log_id}/entries?{query}")
    assert (answer.status, answer.body["field"]) == (400, query.split("=")[0])


# --- cancel -------------------------------------------------------------------------------------------------------


def test_stop_is_told_to_the_producer_and_a_second_stop_says_the_same(agent: Agent, log_id: str) -> None:
    append(agent, log_id, 0, text("a"))
    first = agent.post(f"generations/{log_id}/cancel")
    second = agent.post(f"generations/{log_id}/cancel", {})
    assert (first.status, second.status) == (202, 200)
    assert first.body["state"] == second.body["state"] == "cancelling"
    notices = [json.loads(body) for _, kind, body in stored(log_id) if kind == "notice"]
    assert [notice["type"] for notice in notices] == ["cancel_requested"]
    assert notices[0]["actor"] == {"kind": "token", "id": agent.token.prefix, "name": agent.token.name}
    told = append(agent, log_id, 1, text("still on its way"))
    assert (told.status, told.body["cancelRequested"]) == (201, True)
    assert append(agent, log_id, 2, {"type": "done", "reason": "stop"}).status == 201
    shown = agent.get(f"generations/{log_id}").body
    assert (shown["state"], shown["finishReason"]) == ("cancelled", "cancel")
    # Sent again as it was, it counts as equal.
    assert append(agent, log_id, 2, {"type": "done", "reason": "stop"}).body["duplicate"] is True
    assert agent.post(f"generations/{log_id}/cancel").status == 200


def test_a_person_who_decides_may_stop_a_run_and_one_who_only_sees_may_not(log_id: str) -> None:
    from django.test import Client

    seer, decider = Client(), Client()
    seer.force_login(factories.person("", factories.SEE))
    decider.force_login(factories.operator())
    refused = seer.post(f"/api/v1/generations/{log_id}/cancel", content_type="application/json")
    assert (refused.status_code, refused.json()["code"]) == (403, "not_allowed")
    assert not Generation.objects.get().cancel_requested
    stopped = decider.post(f"/api/v1/generations/{log_id}/cancel", content_type="application/json")
    assert stopped.status_code == 202
    assert Generation.objects.get().cancel_requested
