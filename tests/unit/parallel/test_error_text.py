"""Errors of other libraries are shown in one line."""

import pytest

from parallel.error_text import first_line


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("a\nb", "a"),
        ("\n field 'x':\n  expected int, got 1e+30\nmore", "field 'x': expected int, got 1e+30"),
        ("ends here:", "ends here:"),
        ("", "ValueError"),
        (" \n ", "ValueError"),
    ],
)
def test_the_first_line_is_whole(message, line):
    assert first_line(ValueError(message)) == line
