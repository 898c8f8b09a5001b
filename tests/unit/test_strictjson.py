"""What the door takes, what it refuses and how it says where."""

from __future__ import annotations

import contextlib
import enum
import json
import sys
import time
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streams import strictjson
from streams.strictjson import BadJSON, JSONValue, check_text, dumps, dumps_bytes, loads

LIMIT = 256 * 1024

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
decimals = st.builds(
    lambda digits, exponent: Decimal(digits).scaleb(exponent),
    st.integers(-(10**17), 10**17),
    st.integers(-300, 280),
)
integers = st.integers(-(10**64) + 1, 10**64 - 1)
values: st.SearchStrategy[JSONValue] = st.recursive(
    st.none() | st.booleans() | integers | decimals | texts,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts, inner, max_size=5),
    max_leaves=20,
)


def refusal(text: str | bytes, **options: int | str) -> BadJSON:
    with pytest.raises(BadJSON) as caught:
        loads(text, **options)  # type: ignore[arg-type]
    assert caught.value.detail
    assert str(caught.value) == caught.value.detail
    json.dumps(caught.value.field).encode()
    return caught.value


def shape(value: object) -> object:
    """Tell int from Decimal and True from 1, which `==` does not."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value]
    return type(value), value


# Numbers


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("-0", 0),
        ("9007199254740993", 9007199254740993),
        ("9" * 64, int("9" * 64)),
        ("1" + "0" * 308, 10**308),
        ("-1" + "0" * 308, -(10**308)),
        ("9" * 64 + "0" * 240, int("9" * 64) * 10**240),
    ],
)
def test_an_integer_stays_an_integer_of_that_value(text: str, value: int) -> None:
    assert shape(loads(text)) == (int, value)
    assert shape(loads(f'{{"a":[{text}]}}')) == {"a": [(int, value)]}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0.1", "0.1"),
        ("0.1000000000000000055", "0.1000000000000000055"),
        ("4900.0", "4900"),
        ("1e21", "1e21"),
        ("1E+2", "100"),
        ("2.5e-3", "0.0025"),
        ("1e308", "1e308"),
        ("1e-308", "1e-308"),
        ("-1e-308", "-1e-308"),
        ("0." + "1" * 64, "0." + "1" * 64),
        ("0." + "0" * 200 + "1" * 64, "0." + "0" * 200 + "1" * 64),
        ("1." + "0" * 100_000, "1"),
        ("0." + "0" * 100_000 + "1e100001", "1"),
        ("1" + "0" * 100_000 + "e-100000", "1"),
        ("1e" + "0" * 50_000 + "5", "1e5"),
        ("0e999999999999999999999999", "0"),
        ("0.000e-999999999999999999999999", "0"),
    ],
)
def test_any_other_number_is_the_decimal_that_was_written(text: str, value: str) -> None:
    assert shape(loads(text)) == (Decimal, Decimal(value))


@pytest.mark.parametrize("text", ["-0.0", "-0e0", "-0E5"])
def test_minus_zero_is_zero(text: str) -> None:
    assert loads(text) == 0


@pytest.mark.parametrize(
    "text",
    [
        "1e999999999",
        "-1E+999999999",
        "1e-999999999",
        "1e309",
        "1.0000000000000001e308",
        "9.9e-309",
        "1" + "0" * 309,
        "2" + "0" * 308,
        "1" * 65,
        "-" + "1" * 65,
        "0." + "1" * 65,
        "1." + "0" * 63 + "1",
        "1" * 33 + "." + "1" * 32,
        "1" * 33 + "." + "1" * 32 + "e0",
        "9" * 100_000,
        "1" + "0" * 100_000,
        "1e" + "9" * 100_000,
        "1e-" + "9" * 100_000,
        "0." + "0" * 400 + "1",
        str(10**70 + 1),
    ],
    ids=lambda text: f"{text[:24]}({len(text)})",
)
def test_a_number_out_of_range_is_refused_with_its_place(text: str) -> None:
    started = time.perf_counter()
    for document, field in [
        (text, None),
        (f'{{"arguments":{{"amount":{text}}}}}', "arguments.amount"),
        (f'{{"chunks":[1,2,{{"a":1}},{{"content":[{text}]}}]}}', "chunks.3.content.0"),
    ]:
        bad = refusal(document)
        assert (bad.code, bad.field) == ("number_out_of_range", field)
        assert bad.limit in {64, 308}
    assert time.perf_counter() - started < 2


def test_a_long_integer_is_refused_before_python_converts_it() -> None:
    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(640)
    try:
        assert refusal("7" * 5_000).code == "number_out_of_range"
        assert loads("1" + "0" * 308) == 10**308
    finally:
        sys.set_int_max_str_digits(before)


def test_the_first_number_out_of_range_is_the_one_named() -> None:
    assert refusal('{"a":1,"b":1e400,"c":1e400,"d":{"d":1e-400}}').field == "b"


def test_once_a_number_is_refused_the_rest_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[strictjson.Parts] = []

    def judge(parts: strictjson.Parts) -> strictjson.Parts:
        judged.append(parts)
        return in_range(parts)

    in_range = strictjson.in_range
    monkeypatch.setattr(strictjson, "in_range", judge)
    assert refusal("[1e1," + "1e400," * 1_000 + "1e1]").field == "1"
    assert len(judged) == 2


def test_a_text_that_is_not_json_is_invalid_even_with_a_number_out_of_range() -> None:
    assert refusal('{"a":1e400,}').code == "invalid"


@pytest.mark.parametrize("name", ["NaN", "Infinity", "-Infinity"])
def test_what_is_no_number_is_refused_with_its_place(name: str) -> None:
    bad = refusal(f'{{"a":[0,{name}]}}')
    assert (bad.code, bad.field) == ("invalid", "a.1")
    assert name in bad.detail


# Keys and text


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('{"a":1,"a":1}', "a"),
        ('{"a":1,"\\u0061":2}', "a"),
        ('{"x":[0,{"b":{},"c":1,"\\u0062":[]}]}', "x.1.b"),
        ('{"é":1,"\\u00e9":2}', "é"),
        ('{"😀":1,"\\ud83d\\ude00":2}', "😀"),
        ('{"":1,"":2}', None),
        ('{"a":{"b":1e400},"a":1}', "a"),
    ],
)
def test_the_same_key_twice_is_refused_also_behind_an_escape(text: str, field: str | None) -> None:
    bad = refusal(text)
    assert (bad.code, bad.field) == ("invalid", field)


def test_keys_that_only_look_alike_are_two_keys() -> None:
    assert loads('{"é":1,"e\u0301":2}') == {"é": 1, "e\u0301": 2}


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('"\\u0000"', None),
        ('{"a":["x","y\\u0000"]}', "a.1"),
        ('{"a":{"k\\u0000":1}}', "a.k\\u0000"),
        ('"\\ud800"', None),
        ('"\\uD800"', None),
        ('{"a":"\\udfff"}', "a"),
        ('{"a":"\\ude00\\ud83d"}', "a"),
        ('{"a":"\\ud83dx\\ude00"}', "a"),
        ('{"a":"\\ud83d\\\\ude00"}', "a"),
        ('{"\\udc00":1}', "\\udc00"),
    ],
)
def test_an_escaped_nul_or_lone_surrogate_is_refused_with_its_place(text: str, field: str | None) -> None:
    for document in (text, text.encode()):
        bad = refusal(document)
        assert (bad.code, bad.field) == ("invalid", field)


@pytest.mark.parametrize(
    "text",
    [
        '"a\0b"',
        '{"a\0":1}',
        "\0",
        "1\0",
        '"\ud800"',
        '"\ud83d\ude00"',
        b'"\xed\xa0\x80"',
        b'"\xed\xa0\xbd\xed\xb8\x80"',
        b'"\xff"',
        b'"\xc0\x80"',
        b'"\xf5\x80\x80\x80"',
        b'"\xc3',
        '"é"'.encode("latin-1"),
        '{"a":1}'.encode("utf-16"),
        '{"a":1}'.encode("utf-32-le"),
        b"\xef\xbb\xbf{}",
        "\ufeff{}",
        '"\n"',
        '"\x1f"',
    ],
)
def test_raw_bytes_that_are_no_text_are_refused(text: str | bytes) -> None:
    assert refusal(text).code == "invalid"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('"\\ud83d\\ude00"', "😀"),
        ('"\\\\u0000"', "\\u0000"),
        ('"\\\\ud800"', "\\ud800"),
        ('"\u2028\u2029\u202e\ufeff\uffff\x7f"', "\u2028\u2029\u202e\ufeff\uffff\x7f"),
        ('"\\u007f\\/\\u001b"', "\x7f/\x1b"),
    ],
)
def test_strange_but_lawful_text_comes_through_unchanged(text: str, value: str) -> None:
    assert loads(text) == loads(text.encode()) == value
    assert loads(dumps(value)) == value


# The shape of the text


@pytest.mark.parametrize("text", [b"\xef\xbb\xbf{}", "\ufeff{}", "\ufeff"])
def test_a_byte_order_mark_is_refused_in_words(text: str | bytes) -> None:
    assert "byte order mark" in refusal(text).detail


@pytest.mark.parametrize("text", ["", b"", " ", "\n\t\r ", b"  "])
def test_an_empty_text_is_refused_in_words(text: str | bytes) -> None:
    assert "empty" in refusal(text).detail


@pytest.mark.parametrize(
    "text",
    [
        "{} {}",
        "{}x",
        "1 2",
        "01",
        "+1",
        ".5",
        "1.",
        "-",
        "1e",
        "0x10",
        "1_000",
        "١",
        "'a'",
        "{a:1}",
        "[1,]",
        '{"a":1,}',
        "// c\n1",
        "nul",
        "True",
        '"\\x41"',
        '"\\u00g0"',
        '"\\u+123"',
        '"abc',
        '"\\',
        "[",
        "]",
        "{",
        '{"a"',
        "\u00a01",
        "\x0b1",
        "undefined",
    ],
)
def test_what_is_not_json_is_refused_with_line_and_column(text: str) -> None:
    bad = refusal(text)
    assert bad.code == "invalid"
    assert "line 1" in bad.detail or "line 2" in bad.detail


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}"), ('[{"a":[', "]}]")])
@pytest.mark.parametrize("closed", [True, False])
def test_hostile_nesting_is_refused_without_recursion(opening: str, closing: str, closed: bool) -> None:
    text = opening * 5_000 + "1" + closing * 5_000 * closed
    bad = refusal(text)
    assert (bad.code, bad.limit) == ("invalid", 64)
    assert "64" in bad.detail


def test_depth_is_counted_to_the_level() -> None:
    assert loads("[" * 64 + "]" * 64)
    assert refusal("[" * 65 + "]" * 65).limit == 64
    assert loads("[[]]", max_depth=2) == [[]]
    assert refusal('[{"a":[]}]', max_depth=2).limit == 2
    assert loads("7", max_depth=0) == 7
    assert refusal("{}", max_depth=0)


def test_brackets_inside_strings_are_not_nesting() -> None:
    for string in ("[" * 500, '\\"' + "{" * 500, "\\\\\\" + '"' + "[" * 500, "é" + "[" * 99):
        assert loads(f'["{string}"]', max_depth=1) == [json.loads(f'"{string}"')]
    # and an escaped backslash ends before the quote
    assert refusal('["\\\\",' + "[" * 70 + "]" * 70 + "]").limit == 64


def test_a_full_stack_is_a_refusal_and_not_a_crash() -> None:
    before = sys.getrecursionlimit()
    bad = refusal("[" * 400_000 + "]" * 400_000, max_depth=10**6)
    assert bad.code == "invalid"
    assert sys.getrecursionlimit() == before


def test_size_is_counted_in_bytes_and_names_the_limit() -> None:
    assert loads('"é"', max_bytes=4) == "é"
    for text in ('"é"', '"é"'.encode(), '"aé"', b"[[[[[["):
        bad = refusal(text, max_bytes=3)
        assert (bad.code, bad.limit) == ("too_large", 3)


def test_the_name_of_the_text_stands_before_every_path() -> None:
    assert refusal('{"a":NaN}', field="arguments").field == "arguments.a"
    assert refusal("{", field="arguments").field == "arguments"


def test_a_hostile_key_makes_a_short_and_showable_path() -> None:
    deep = '{"' + "k" * 10_000 + '":'
    field = refusal(deep * 60 + "NaN" + "}" * 60).field
    assert field is not None
    assert len(field) <= 400
    assert refusal('{"' + "k" * 10_000 + '":{"b":NaN}}').field == "k" * 80 + ".b"
    assert refusal('{"\u202e\u200b\ufeff\x7f":NaN}').field == "\\u202e\\u200b\\ufeff\\u007f"


@pytest.mark.parametrize(
    "text",
    [
        b"[" * LIMIT,
        b"[" + b"[]," * (LIMIT // 3) + b"1]",
        b'"' * LIMIT,
        b'"' + b'\\"' * (LIMIT // 2),
        b"\\" * LIMIT,
        b"[" + b"1e999," * (LIMIT // 6) + b"1]",
        b"[" + b"9" * LIMIT + b"]",
        b"{" + b'"a":1,' * (LIMIT // 6) + b'"b":1}',
        b'["' + b"\\ud83d\\ude00" * (LIMIT // 12) + b'"]',
        b'["' + b"\\ud83d" * (LIMIT // 6) + b'"]',
    ],
    ids=lambda text: repr(text[:14]),
)
def test_no_text_of_this_size_takes_long(text: bytes) -> None:
    started = time.process_time()
    with contextlib.suppress(BadJSON):
        loads(text)
    assert time.process_time() - started < 2  # linear is some 0.05 s here, quadratic is minutes


@given(st.binary(max_size=60) | st.text(max_size=60))
def test_no_input_raises_anything_else(text: bytes | str) -> None:
    with contextlib.suppress(BadJSON):
        loads(text)


@given(st.text(alphabet='{}[]",:\\u0dDe8E+-.19nulatrfs ', max_size=40))
def test_what_is_taken_is_what_the_standard_parser_takes(text: str) -> None:
    try:
        value = loads(text)
    except BadJSON:
        return
    assert json.loads(text, parse_float=Decimal) == value


# Writing


@given(values)
def test_what_is_written_is_read_back_exactly(value: JSONValue) -> None:
    text = dumps(value)
    assert shape(loads(text)) == shape(value) or loads(text) == value  # Decimal(10) is written as the integer
    assert loads(dumps_bytes(value)) == value
    assert json.loads(text, parse_float=Decimal) == value


@pytest.mark.parametrize(
    "text",
    [
        "1e308",
        "1E-308",
        "0e999999999",
        "-0.0",
        "-0",
        "1." + "0" * 1000,
        "0.000001",
        "1e-7",
        "1" * 64 + "e240",
    ],
)
def test_every_number_that_is_taken_is_written_as_lawful_json(text: str) -> None:
    written = dumps([loads(text)])
    assert len(written) < 400
    assert json.loads(written, parse_float=Decimal) == json.loads(f"[{text}]", parse_float=Decimal)
    assert loads(written) == [loads(text)]


def test_writing_is_compact_and_escapes_only_what_it_must() -> None:
    value: JSONValue = {"b": [None, True, False, {}, []], "a": '"\\/\b\f\n\r\t\x1b\x7fé😀\u2028'}
    text = '{"b":[null,true,false,{},[]],"a":"\\"\\\\/\\b\\f\\n\\r\\t\\u001b\x7fé😀\u2028"}'
    assert dumps(value) == text
    assert dumps_bytes(value) == text.encode()


def test_words_that_are_strings_or_numbers_underneath_are_written_as_those() -> None:
    class Word(enum.StrEnum):
        DONE = "done"

    assert dumps({Word.DONE: Word.DONE}) == '{"done":"done"}'


@pytest.mark.parametrize("value", [0.1, float("nan"), b"x", (1,), {1}, {1: 2}, {None: 1}, object()])
def test_what_is_not_json_cannot_be_written(value: object) -> None:
    with pytest.raises(TypeError):
        dumps([value])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("value", "code", "field"),
    [
        ({"a": ["x", "\0"]}, "invalid", "a.1"),
        ({"\ud800": 1}, "invalid", "\\ud800"),
        ([Decimal("NaN")], "invalid", "0"),
        ([Decimal("-Infinity")], "invalid", "0"),
        ([0, Decimal("1e999999999")], "number_out_of_range", "1"),
        ([10**10_000], "number_out_of_range", "0"),
        ([-(10**65) - 1], "number_out_of_range", "0"),
    ],
)
def test_a_value_that_could_not_have_been_read_is_not_written(value: JSONValue, code: str, field: str) -> None:
    with pytest.raises(BadJSON) as caught:
        dumps(value)
    assert (caught.value.code, caught.value.field) == (code, field)


def test_a_value_without_bottom_is_refused_and_not_a_crash() -> None:
    endless: list[JSONValue] = []
    endless.append(endless)
    with pytest.raises(BadJSON) as caught:
        dumps(endless)
    assert caught.value.limit == strictjson.MAX_WRITE_DEPTH


# One text


def test_a_text_is_checked_and_handed_back() -> None:
    assert check_text("e\u0301\u202e", field="tool", min_chars=1, max_chars=3) == "e\u0301\u202e"
    for value, limit in [("", 1), ("abcd", 3), ("\0", None), ("\ud800", None), (7, None), (None, None)]:
        with pytest.raises(BadJSON) as caught:
            check_text(value, field="tool", min_chars=1, max_chars=3)
        assert (caught.value.code, caught.value.field, caught.value.limit) == ("invalid", "tool", limit)
