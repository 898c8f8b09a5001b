"""Template filters for whatever an agent wrote. Autoescaping stays on: these only add visible escapes."""

from __future__ import annotations

from django import template

from streams import safetext

register = template.Library()


@register.filter
def visible(value: object) -> str:
    return safetext.visible(str(value))


@register.filter
def visible_lines(value: object) -> str:
    return safetext.visible(str(value), lines=True)


@register.filter
def text_warnings(value: object) -> list[str]:
    return safetext.warnings(str(value))
