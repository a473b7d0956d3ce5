"""The site: what it takes from elsewhere, and that its search runs from a disk, where browsers start no workers."""

from __future__ import annotations

import re

from places import ROOT

WORKER = 'addEventListener("message", (event) => postMessage({ answer: event.data.question * 2 }));'
PAGE = """<!doctype html><title>asks</title><script src="{shim}"></script><body><script>
const worker = new Worker("worker.js");
worker.addEventListener("message", (event) => {{ document.title = "answer " + event.data.answer; }});
worker.postMessage({{ question: 21 }});
</script>"""


def scripts() -> list[str]:
    """Those that every page of the site loads besides the theme's own."""
    found = re.search(r"polyfills: \[(.*)\]", (ROOT / "mkdocs.yml").read_text())
    assert found is not None
    return found[1].split(", ")


def test_scripts_of_the_site_are_its_own():
    assert "offline" in (ROOT / "mkdocs.yml").read_text()
    assert any("iframe-worker" in name for name in scripts()), "else `offline` adds one from the network"
    for name in scripts():
        assert (ROOT / "docs" / name).is_file(), name


def test_a_worker_answers_on_a_page_that_was_opened_from_a_disk(browser, tmp_path):
    (tmp_path / "worker.js").write_text(WORKER)
    page = tmp_path / "page.html"
    page.write_text(PAGE.format(shim=(ROOT / "docs" / scripts()[0]).as_uri()))
    opened = browser.new_page()
    opened.goto(page.as_uri())
    opened.wait_for_function("document.title === 'answer 42'", timeout=5000)
    opened.close()
