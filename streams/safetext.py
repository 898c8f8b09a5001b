"""Text from an agent, made safe to believe, for templates, admin and mail. Pure.

The same rule as static/streams/safetext.js; tests/js/safetext.json holds both to it.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final

_HIDDEN_CATEGORIES: Final = frozenset({"Cc", "Cf", "Zl", "Zp", "Co", "Cs"})
# Fillers, variation selectors and spaces that are none: invisible, but of a category that mostly is not.
_HIDDEN: Final = frozenset(
    {0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x2800, 0x3164, 0xFFA0, 0x00A0, 0x1680, 0x202F, 0x205F, 0x3000}
    | set(range(0x180B, 0x1810))
    | set(range(0xFE00, 0xFE10))
    | set(range(0xE0100, 0xE01F0))
    | set(range(0x2000, 0x200B))
)
_SCRIPTS: Final = ("LATIN", "CYRILLIC", "GREEK", "ARMENIAN", "CHEROKEE", "HEBREW", "ARABIC")
_WORD: Final = re.compile(r"[^\W_][\w.\-]*|_[\w.\-]*")


def _is_hidden(character: str) -> bool:
    return unicodedata.category(character) in _HIDDEN_CATEGORIES or ord(character) in _HIDDEN


def visible(text: str, *, lines: bool = False) -> str:
    """Write out whatever would not be seen as `‹U+202E›`. `lines` keeps newline and tab as they are."""
    if lines:
        text = text.replace("\r\n", "\n")
    return "".join(
        f"‹U+{ord(character):04X}›" if _is_hidden(character) and not (lines and character in "\n\t") else character
        for character in text
    )


def has_hidden(text: str) -> bool:
    return any(_is_hidden(character) and character not in "\n\t\r" for character in text)


def _scripts(word: str) -> set[str]:
    found = set()
    for character in word:
        name = unicodedata.name(character, "").partition(" ")[0]
        if name in _SCRIPTS:
            found.add(name)
        elif 0x1D400 <= ord(character) <= 0x1D7FF or 0xFF21 <= ord(character) <= 0xFF5A:
            found.add("lookalike")
    return found


def mixed_words(text: str) -> list[str]:
    """Return the words that mix alphabets whose letters look alike."""
    return [word for word in _WORD.findall(text) if len(scripts := _scripts(word)) > 1 or "lookalike" in scripts]


def _spelled(word: str) -> str:
    """Name by number the letters of a mixed word that only look Latin."""
    odd = [letter for letter in dict.fromkeys(word) if letter.isalpha() and ord(letter) > 0x24F][:5]
    return f"{visible(word)} ({', '.join(f'{letter} is U+{ord(letter):04X}' for letter in odd)})"


def warnings(text: str) -> list[str]:
    """Say in sentences what a person must be warned of before believing `text`."""
    said = []
    if has_hidden(text):
        said.append("Contains characters that can’t be seen; they are written out as ‹U+…›.")
    if mixed := mixed_words(text):
        said.append(f"Letters of different alphabets are mixed in: {', '.join(map(_spelled, mixed[:3]))}.")
    if unicodedata.normalize("NFC", text) != text:
        said.append("Spelled with separate accents: it looks like other text that is not the same.")
    return said
