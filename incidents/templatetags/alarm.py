"""The alarm line of an incident's own page: the others, in one line."""

from django import template

from incidents.alarms import others_words
from incidents.page import AlarmLine

register = template.Library()


@register.filter
def others(lines: list[AlarmLine]) -> str:
    """Return what one line says of these incidents."""
    return others_words(lines)
