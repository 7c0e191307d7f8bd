"""A Jinja extension: an expression that stands alone on its line stands for whole lines.

The text of the expression is indented as its line is, without empty lines at either end. An empty
text leaves no line. So macros print lines at column 0, and callers do not indent.
"""

from __future__ import annotations

import re
import textwrap

import jinja2
from jinja2.ext import Extension

_ALONE = re.compile(r"^([ \t]*)\{\{ ((?:(?!\}\}).)+) \}\}\n", re.MULTILINE)
_EMPTY = re.compile(r"\A(?:[ \t]*\n)+")
"""Empty lines that come first."""


class WholeLines(Extension):
    """Has each expression that stands alone on its line yield whole lines."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        environment.filters["whole_lines"] = whole_lines

    def preprocess(self, source: str, name: str | None, filename: str | None = None) -> str:
        """Pass the text of such expressions through `whole_lines`; errors name the same lines."""
        return _ALONE.sub(r"{{ (\2) | whole_lines('\1')\n}}", source)


def whole_lines(value: object, indent: str) -> str:
    """Indent the lines of a text, and end them; nothing if there are none."""
    text = _EMPTY.sub("", str(value).rstrip())
    return text and textwrap.indent(f"{text}\n", indent)
