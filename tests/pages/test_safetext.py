"""The server's safe text and the browser's are one rule: the same table holds both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from streams import safetext

TABLE = json.loads((Path(__file__).parent.parent / "js" / "safetext.json").read_text())


@pytest.mark.parametrize("case", TABLE, ids=[case["why"] for case in TABLE])
def test_the_server_shows_what_the_browser_shows(case: dict[str, Any]) -> None:
    assert safetext.visible(case["text"]) == case["visible"]
    assert safetext.has_hidden(case["text"]) is case["hidden"]
    assert safetext.mixed_words(case["text"]) == case["mixed"]


def test_lines_keep_newline_and_tab_and_nothing_else_unseen() -> None:
    assert safetext.visible("a\n\tb\0\r\nc", lines=True) == "a\n\tb‹U+0000›\nc"


def test_a_separate_accent_is_a_warning() -> None:
    assert safetext.warnings("caf\u00e9") == []
    assert len(safetext.warnings("cafe\u0301")) == 1


def test_a_mixed_word_names_the_letter_that_is_not_what_it_looks_like() -> None:
    assert "\u0430 is U+0430" in safetext.warnings("p\u0430ypal.com")[0]
