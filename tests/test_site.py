"""The docs are up to date with their records, and the search of the site runs from a disk without workers."""

import re
import subprocess
import sys

from places import ROOT

WORKER = 'addEventListener("message", (event) => postMessage({ answer: event.data.question * 2 }));'
PAGE = """<!doctype html><title>asks</title><script src="{shim}"></script><body><script>
const worker = new Worker("worker.js");
worker.addEventListener("message", (event) => {{ document.title = "answer " + event.data.answer; }});
worker.postMessage({{ question: 21 }});
</script>"""


def scripts() -> list[str]:
    """Return the scripts that every page of the site loads besides the theme's own."""
    polyfills = re.search(r"polyfills: \[(.*)\]", (ROOT / "mkdocs.yml").read_text())
    assert polyfills is not None
    return polyfills[1].split(", ")


def test_pages_are_up_to_date_with_the_records():
    words = [sys.executable, "docs/render.py", "--check"]
    check = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    assert check.returncode == 0, check.stderr


def test_the_site_loads_only_its_own_scripts():
    assert "offline" in (ROOT / "mkdocs.yml").read_text()
    assert any("iframe-worker" in name for name in scripts()), "otherwise `offline` adds one from the network"
    for name in scripts():
        assert (ROOT / "docs" / name).is_file(), name


def test_a_worker_answers_on_a_page_opened_from_a_disk(browser, tmp_path):
    (tmp_path / "worker.js").write_text(WORKER)
    page = tmp_path / "page.html"
    page.write_text(PAGE.format(shim=(ROOT / "docs" / scripts()[0]).as_uri()))
    tab = browser.new_page()
    tab.goto(page.as_uri())
    tab.wait_for_function("document.title === 'answer 42'", timeout=5000)
    tab.close()
