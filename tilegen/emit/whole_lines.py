"""A Jinja extension: an expression alone on its line expands to whole lines.

The text gets the indentation of the line, and loses empty lines at both ends. An empty text leaves
no line. Macros can thus print at column 0, and callers need no indent filter.
"""

from __future__ import annotations

import re
import textwrap

import jinja2
from jinja2.ext import Extension

_ALONE = re.compile(r"^([ \t]*)\{\{ ((?:(?!\}\}).)+) \}\}\n", re.MULTILINE)
_EMPTY = re.compile(r"\A(?:[ \t]*\n)+")
"""Leading empty lines."""


class WholeLines(Extension):
    """Expands each expression that is alone on its line to whole lines."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        environment.filters["whole_lines"] = whole_lines

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        """Wrap such expressions in `whole_lines`; line numbers in errors stay the same."""
        return _ALONE.sub(r"{{ (\2) | whole_lines('\1')\n}}", source)


def whole_lines(value: object, indent: str) -> str:
    """Indent the lines of a text and end each with a newline; empty if there are none."""
    text = _EMPTY.sub("", str(value).rstrip())
    return text and textwrap.indent(f"{text}\n", indent)
