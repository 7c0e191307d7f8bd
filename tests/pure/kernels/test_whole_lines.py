"""Expressions that stand alone on their line in a template."""

from __future__ import annotations

import traceback

import jinja2
import pytest

from tilegen.emit.render import environment


def rendered(template: str, **given: object) -> str:
    return environment().from_string(template).render(given)


def test_lines_are_stripped_and_indented_as_their_line() -> None:
    text = "\n\nfor i in x:\n    f(i)\n\n# done\n"
    assert rendered("if x:\n    {{ text }}\nend\n", text=text) == (
        "if x:\n    for i in x:\n        f(i)\n\n    # done\nend\n"
    )


@pytest.mark.parametrize("nothing", ["", "\n", "  \n\n"])
def test_nothing_leaves_no_line(nothing: str) -> None:
    assert rendered("a\n    {{ nothing }}\nb\n", nothing=nothing) == "a\nb\n"


def test_macros_are_indented_by_each_caller() -> None:
    template = """\
{% macro inner() %}
a

{% endmacro %}
{% macro outer(also) %}
if x:
    {{ inner() }}
{% if also %}
{{ also }}
{% endif %}
{% endmacro %}
    {{ outer("b") }}
{{ outer("") }}
"""
    assert rendered(template) == "    if x:\n        a\n    b\nif x:\n    a\n"


def test_expressions_within_a_line_stay_as_they_are() -> None:
    assert rendered("x = {{ a }}\n{{ a }}{{ b }}\n    {{ a -}}\n", a=" 1 ", b="2\n") == (
        "x =  1 \n 1 2\n\n     1 "
    )


def test_errors_name_the_line_of_the_template() -> None:
    with pytest.raises(jinja2.UndefinedError, match="no_such_name") as caught:
        rendered("a\n    {{ a }}\n    {{ no_such_name }}\nb\n", a="x\ny")
    lines = [one.lineno for one in traceback.extract_tb(caught.tb) if one.filename == "<template>"]
    assert lines[-1] == 3
