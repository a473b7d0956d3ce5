"""The page as one file: sections, style and script, with nothing to fetch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from slimstate.report.markup import GENERATOR, Html, element, escaped, joined
from slimstate.report.pieces import Section

FOLDER = Path(__file__).parent
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
{generator}
<meta http-equiv="Content-Security-Policy" content="{policy}">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
{body}
<div id="tooltip" role="tooltip" hidden></div>
<script>
{script}</script>
</body>
</html>
"""


def contents(sections: Sequence[Section]) -> Html:
    links = (element("li", element("a", section.title, href=f"#{section.anchor}")) for section in sections)
    last = element("li", element("a", "Records", href="#records"))
    return element("nav", element("ol", *links, last), class_="toc", aria_label="Contents")


def page(title: str, head: Html, sections: Sequence[Section], footer: Html) -> str:
    body = joined(
        [head, contents(sections), element("main", *(section.render() for section in sections)), footer], "\n"
    )
    text = PAGE.format(
        policy=POLICY,
        generator=GENERATOR,
        title=escaped(title),
        style=(FOLDER / "page.css").read_text(encoding="utf-8"),
        script=(FOLDER / "page.js").read_text(encoding="utf-8"),
        body=body,
    )
    return text.encode("utf-8", "replace").decode("utf-8")  # a file's name may hold what no encoding has
