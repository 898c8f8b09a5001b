"""The one text that is shown, hashed and run."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import struct
import subprocess
import unicodedata
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from approvals.canonical import (
    MAX_TEXT_BYTES,
    canonical_arguments,
    canonical_result,
    canonical_text,
    digest,
    number_text,
    parse_arguments,
    parse_result,
)
from streams.strictjson import BadJSON, JSONValue, loads

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
decimals = st.builds(
    lambda digits, exponent: Decimal(digits).scaleb(exponent),
    st.integers(-(10**20), 10**20),
    st.integers(-300, 280),
)
integers = st.integers(-(10**64) + 1, 10**64 - 1)
# The text of a double is what an honest client sends most.
doubles = (
    st.floats(allow_nan=False, allow_infinity=False, min_value=-1e308, max_value=1e308)
    .filter(lambda number: number == 0 or abs(number) >= 1e-308)
    .map(lambda number: Decimal(repr(number)))
)
numbers = integers | decimals | doubles


def trees(leaves: st.SearchStrategy[JSONValue]) -> st.SearchStrategy[JSONValue]:
    return st.recursive(
        st.none() | st.booleans() | texts | leaves,
        lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts, inner, max_size=5),
        max_leaves=20,
    )


values = trees(numbers)
plain_values = trees(integers)


def refusal_of_arguments(text: str | bytes) -> BadJSON:
    with pytest.raises(BadJSON) as caught:
        parse_arguments(text)
    return caught.value


def shuffled(value: JSONValue, source: random.Random) -> JSONValue:
    if isinstance(value, dict):
        keys = list(value)
        source.shuffle(keys)
        return {key: shuffled(value[key], source) for key in keys}
    if isinstance(value, list):
        return [shuffled(item, source) for item in value]
    return value


# Numbers


@pytest.mark.parametrize(
    ("bits", "text"),
    [  # RFC 8785, appendix B
        ("0000000000000000", "0"),
        ("8000000000000000", "0"),
        ("4340000000000000", "9007199254740992"),
        ("c340000000000000", "-9007199254740992"),
        ("4430000000000000", "295147905179352830000"),
        ("44b52d02c7e14af5", "9.999999999999997e+22"),
        ("44b52d02c7e14af6", "1e+23"),
        ("44b52d02c7e14af7", "1.0000000000000001e+23"),
        ("444b1ae4d6e2ef4e", "999999999999999700000"),
        ("444b1ae4d6e2ef4f", "999999999999999900000"),
        ("444b1ae4d6e2ef50", "1e+21"),
        ("3eb0c6f7a0b5ed8c", "9.999999999999997e-7"),
        ("3eb0c6f7a0b5ed8d", "0.000001"),
        ("41b3de4355555553", "333333333.3333332"),
        ("41b3de4355555554", "333333333.33333325"),
        ("41b3de4355555555", "333333333.3333333"),
        ("41b3de4355555556", "333333333.3333334"),
        ("41b3de4355555557", "333333333.33333343"),
        ("becbf647612f3696", "-0.0000033333333333333333"),
        ("43143ff3c1cb0959", "1424953923781206.2"),
    ],
)
def test_the_table_of_rfc_8785_holds(bits: str, text: str) -> None:
    [number] = struct.unpack(">d", bytes.fromhex(bits))
    assert canonical_text(loads(repr(number))) == text
    assert canonical_text(loads(text)) == text


@pytest.mark.parametrize("text", ["5e-324", "-5e-324", "1.7976931348623157e+308", "-1.7976931348623157e308"])
def test_the_outermost_doubles_of_rfc_8785_are_out_of_our_range(text: str) -> None:
    with pytest.raises(BadJSON) as caught:
        loads(text)
    assert caught.value.code == "number_out_of_range"


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        ("4900.0", "4900"),
        ("4900.00", "4900"),
        ("49e2", "4900"),
        ("-0", "0"),
        ("-0.0", "0"),
        ("0e999999999", "0"),
        ("1e21", "1e+21"),
        ("1" + "0" * 21, "1e+21"),
        ("1e20", "1" + "0" * 20),
        ("1e-6", "0.000001"),
        ("1e-7", "1e-7"),
        ("0.0000001", "1e-7"),
        ("1e308", "1e+308"),
        ("1e-308", "1e-308"),
        ("1.5E+300", "1.5e+300"),
        ("9007199254740991", "9007199254740991"),
        ("9007199254740992", "9007199254740992"),
        ("9007199254740993", "9007199254740993"),
        ("9007199254740993.0", "9007199254740993"),
        ("-9007199254740993", "-9007199254740993"),
        ("9.007199254740993e15", "9007199254740993"),
        ("1152921504606846976", "1152921504606846976"),  # 2^60; ECMAScript's text ends in 7000
        ("1152921504606847000", "1152921504606847000"),
        ("0.1", "0.1"),
        ("0.1000000000000000055", "0.1000000000000000055"),
        ("0.1000000000000000055000", "0.1000000000000000055"),
        ("1.00000000000000000001e25", "10000000000000000000100000"),
        ("1.23456789012345678901e2", "123.456789012345678901"),
        ("1.23456789012345678901e-10", "0.000000000123456789012345678901"),
    ],
)
def test_a_number_is_written_as_the_decimal_it_is(sent: str, text: str) -> None:
    assert canonical_text(loads(sent)) == text
    assert Decimal(text) == Decimal(sent)


@given(numbers)
def test_a_number_keeps_its_exact_value_and_is_a_fixed_point(number: int | Decimal) -> None:
    text = number_text(number)
    assert Decimal(text) == number
    again = loads(text)
    assert isinstance(again, int | Decimal)
    assert number_text(again) == text
    assert number_text(Decimal(number)) == text


@pytest.mark.parametrize(
    "number",
    [10**309, 10**400_000, int("1" * 65), Decimal("1e999999999"), Decimal("1e-309"), Decimal("NaN")],
    ids=["10^309", "10^400000", "65 digits", "1e999999999", "1e-309", "NaN"],
)
def test_a_number_that_could_not_have_been_sent_is_not_written(number: int | Decimal) -> None:
    with pytest.raises(BadJSON):
        canonical_text([number])


def test_a_float_never_becomes_canonical() -> None:
    with pytest.raises(TypeError):
        canonical_text(0.1)  # type: ignore[arg-type]


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_numbers_are_laid_out_as_a_real_ecmascript_does() -> None:
    source = random.Random(8785)
    sample: list[float] = []
    while len(sample) < 10_000:
        [bits] = struct.unpack(">d", struct.pack(">Q", source.getrandbits(64)))
        digits = source.randint(-(10 ** source.randint(1, 17)), 10 ** source.randint(1, 17))
        for number in (bits, digits / 10 ** source.randint(0, 25), 2.0 ** source.randint(-1020, 1020)):
            if number == 0 or 1e-308 <= abs(number) <= 1e308:  # NaN is neither
                sample.append(number)
    sent = json.dumps(sample)
    script = "process.stdout.write(JSON.stringify(JSON.parse(require('fs').readFileSync(0, 'utf8'))))"
    node = subprocess.run(["node", "-e", script], input=sent, capture_output=True, text=True, check=True)
    assert canonical_text(loads(sent)).split(",") == node.stdout.split(",")


# Order and escapes


def test_keys_are_sorted_by_utf_16_units() -> None:
    # The example of RFC 8785 §3.2.3, and U+1F600 before U+FB33 although its code point is greater.
    keys = ["€", "\r", "\ufb33", "1", "😀", "\x80", "ö"]
    text = canonical_text(dict.fromkeys(keys))
    assert list(json.loads(text)) == ["\r", "1", "\x80", "ö", "€", "😀", "\ufb33"]
    assert canonical_text({"b": 1, "aa": 2, "a": 3, "": 4, "B": 5}) == '{"":4,"B":5,"a":3,"aa":2,"b":1}'


def test_strings_are_escaped_as_rfc_8785_says() -> None:
    value = '€$\x0f\nA\'B"\\\\"/\x7f\u2028'
    assert canonical_text(value) == '"€$\\u000f\\nA\'B\\"\\\\\\\\\\"/\x7f\u2028"'


@given(values, st.randoms(use_true_random=False))
def test_the_order_of_keys_makes_no_difference(value: JSONValue, source: random.Random) -> None:
    assert canonical_text(shuffled(value, source)) == canonical_text(value)


@given(values)
def test_what_the_server_shows_may_be_sent_back(value: JSONValue) -> None:
    text = canonical_text(value)
    again = loads(text)
    assert again == value
    assert canonical_text(again) == text


@given(plain_values)
def test_spaces_and_escapes_make_no_difference(value: JSONValue) -> None:
    assert canonical_text(loads(json.dumps(value, ensure_ascii=True, indent=1))) == canonical_text(value)


@given(numbers)
def test_the_spelling_of_a_number_makes_no_difference(number: int | Decimal) -> None:
    exact = Decimal(number)
    sign, digits, exponent = exact.as_tuple()
    assert isinstance(exponent, int)
    minus, run = "-" * sign, "".join(map(str, digits))
    plain = f"{exact:f}"
    spellings = [
        str(exact),
        plain,
        f"{plain}000" if "." in plain else f"{plain}.000",
        f"{minus}{run}e{exponent}",
        f"{minus}0.{run}E{exponent + len(run):+d}",
        f"{minus}{run}.0e{exponent:+04d}",
    ]
    if run[0] == "0":  # 0E-3 and the like have only digits that JSON does not let stand in front
        spellings = [plain, "0.0", "0e5", "-0"]
    assert {canonical_text(loads(spelling)) for spelling in spellings} == {number_text(number)}


# Arguments and results


def test_arguments_are_an_object_and_nothing_else() -> None:
    parsed = parse_arguments('{ "b": 4900.0, "a": "\\u00e9" }')
    assert parsed.text == '{"a":"é","b":4900}'
    assert parsed.value == {"a": "é", "b": Decimal("4900.0")}
    assert canonical_arguments(parsed.value) == parsed
    for text in ("[]", '"{}"', "1", "null", "true"):
        bad = refusal_of_arguments(text)
        assert (bad.code, bad.field) == ("invalid", "arguments")


@pytest.mark.parametrize("text", ["null", "true", "7", '"x"', "[]", "{}"])
def test_a_result_is_any_json_value(text: str) -> None:
    parsed = parse_result(text)
    assert parsed.text == text
    assert canonical_result(loads(text)) == parsed


def test_depth_counts_the_arguments_object_as_one() -> None:
    def nested(depth: int) -> str:
        return '{"a":' * (depth - 1) + "{}" + "}" * (depth - 1)

    assert parse_arguments(nested(64)).text == nested(64)
    value = loads(nested(65), max_depth=100)
    bad = refusal_of_arguments(nested(65))
    assert (bad.code, bad.limit) == ("invalid", 64)
    with pytest.raises(BadJSON) as caught:
        canonical_arguments(value)
    assert (caught.value.code, caught.value.limit) == ("invalid", 64)
    with pytest.raises(BadJSON) as caught:
        canonical_result(value)
    assert caught.value.field is not None
    assert caught.value.field.startswith("result.a.a.")
    assert refusal_of_arguments('{"a":' * 5_000).code == "invalid"


def test_the_size_of_the_canonical_text_is_what_is_limited() -> None:
    room = MAX_TEXT_BYTES - len('{"a":""}')
    assert len(parse_arguments('{"a":   "' + "x" * room + '"}').text) == MAX_TEXT_BYTES
    escaped = "\\u0078" * room
    assert parse_arguments(f'{{"a":"{escaped}"}}').text == '{"a":"' + "x" * room + '"}'
    for filling in ("x" * (room + 1), "é" * (room // 2 + 1)):
        for text, field, parse in (
            (f'{{"a":"{filling}"}}', "arguments", parse_arguments),
            (f'{{"a":"{filling}"}}', "result", parse_result),
        ):
            with pytest.raises(BadJSON) as caught:
                parse(text)
            bad = caught.value
            assert (bad.code, bad.field, bad.limit) == ("too_large", field, 262144)


def test_numbers_that_grow_when_written_out_count_as_written() -> None:
    text = '{"a":[' + ",".join(["1.0000000000000000001e300"] * 1_000) + "]}"
    assert len(text) < 30_000
    assert refusal_of_arguments(text).code == "too_large"


@pytest.mark.parametrize(
    ("text", "code", "field"),
    [
        ('{"amount":1e400}', "number_out_of_range", "arguments.amount"),
        ('{"a":1,"\\u0061":2}', "invalid", "arguments.a"),
        ('{"a":["\\ud800"]}', "invalid", "arguments.a.0"),
        ('{"a":NaN}', "invalid", "arguments.a"),
        ('{"a":', "invalid", "arguments"),
        (b'{"a":"\xff"}', "invalid", "arguments"),
    ],
)
def test_a_refusal_names_the_place_in_the_arguments(text: str | bytes, code: str, field: str) -> None:
    bad = refusal_of_arguments(text)
    assert (bad.code, bad.field) == (code, field)


# The digest


def test_the_digest_is_of_the_canonical_text_of_the_call() -> None:
    arguments = parse_arguments('{"order":1042,"amount":49.00}')
    call = '{"arguments":{"amount":49,"order":1042},"tool":"refund"}'
    assert digest(tool="refund", arguments_text=arguments.text) == (
        "sha256:" + hashlib.sha256(call.encode()).hexdigest()
    )


@given(st.dictionaries(texts, values, max_size=4), texts)
def test_the_digest_agrees_with_hashing_the_whole_call(arguments: dict[str, JSONValue], tool: str) -> None:
    whole = canonical_text({"tool": tool, "arguments": arguments})
    expected = "sha256:" + hashlib.sha256(whole.encode()).hexdigest()
    assert digest(tool=tool, arguments_text=canonical_text(arguments)) == expected


def test_composed_and_decomposed_text_have_two_digests() -> None:
    composed, decomposed = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
    assert len({digest(tool="t", arguments_text=canonical_text({"a": a})) for a in (composed, decomposed)}) == 2
    assert len({digest(tool="t", arguments_text=canonical_text({a: 1})) for a in (composed, decomposed)}) == 2
    assert len({digest(tool=tool, arguments_text="{}") for tool in (composed, decomposed)}) == 2


def test_twins_of_one_double_have_two_digests() -> None:
    sent = ['{"a":9007199254740993}', '{"a":9007199254740992}', '{"a":0.1}', '{"a":0.1000000000000000055}']
    assert len({digest(tool="t", arguments_text=parse_arguments(text).text) for text in sent}) == 4


def test_true_and_one_and_the_string_of_one_have_three_digests() -> None:
    sent = ['{"a":true}', '{"a":1}', '{"a":"1"}']
    assert len({digest(tool="t", arguments_text=parse_arguments(text).text) for text in sent}) == 3


@pytest.mark.parametrize("tool", ["a\0", "\ud800"])
def test_a_tool_name_that_is_no_text_has_no_digest(tool: str) -> None:
    with pytest.raises(BadJSON) as caught:
        digest(tool=tool, arguments_text="{}")
    assert caught.value.field == "tool"
