"""The site of scripts/docs: it builds without a warning, has a search index, and loads nothing from other hosts."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.documents import ROOT

pytestmark = pytest.mark.system


def test_the_site_builds_and_loads_nothing_from_other_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mkdocs")
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import document_site

    document_site.stage(tmp_path / "build" / "pages")
    (tmp_path / "mkdocs.yml").write_text((ROOT / "mkdocs.yml").read_text())
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict"]
    built = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "DISABLE_MKDOCS_2_WARNING": "true"}
    )
    assert built.returncode == 0, built.stderr
    site = tmp_path / "build" / "site"
    pages = sorted(site.glob("*.html"))
    assert {page.stem for page in pages} >= {Path(name).stem for name in document_site.sources()}
    loaded = re.compile(r"""<(?:script|img|iframe|source|link)[^>]+(?:src|href)=["']?(?:https?:)?//""")
    assert [page.name for page in pages if loaded.search(page.read_text())] == []
    styles = [path.name for path in site.rglob("*.css") if re.search(r"url\(['\"]?(?:https?:)?//", path.read_text())]
    assert styles == []
    places = {entry["location"] for entry in json.loads((site / "search" / "search_index.json").read_text())["docs"]}
    assert "choosing.html#how-many-of-each-pd" in places


def test_links_of_a_page_lead_to_the_names_of_the_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import document_site

    document_site.stage(tmp_path)
    front = (tmp_path / "index.md").read_text()
    assert "](tutorial.md)" in front and "](benchmarks.md)" in front and "](images/diptych.svg)" in front
    assert "](docs/" not in front
    planning = (tmp_path / "planning.md").read_text()
    assert "(`guards.py`)" in planning and "../src" not in planning
    assert "](choosing.md)" in (tmp_path / "llms.txt").read_text()
