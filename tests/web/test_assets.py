"""The static files: what is sent, and what never is."""

import re

from starlette.applications import Starlette
from starlette.testclient import TestClient

from diptych.report.pages import PALETTE
from diptych.web.assets import STATIC, asset, page_route, static_routes
from diptych.web.chapters import CHAPTERS, imported_modules, page


def client() -> TestClient:
    return TestClient(Starlette(routes=[page_route("/ui", "ui/index.html"), *static_routes()]))


def test_a_page_allows_nothing_from_other_hosts_and_no_script_of_its_own() -> None:
    reply = client().get("/ui")
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'self'" in reply.headers["content-security-policy"]
    assert "unsafe" not in reply.headers["content-security-policy"]


def test_a_file_is_compressed_and_not_sent_again() -> None:
    first = client().get("/static/common/style.css")
    assert first.headers["content-encoding"] == "gzip"
    assert first.content == (STATIC / "common/style.css").read_bytes()
    again = client().get("/static/common/style.css", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    plain = client().get("/static/common/style.css", headers={"accept-encoding": "identity"})
    assert "content-encoding" not in plain.headers and plain.content == first.content


def test_nothing_outside_of_the_static_files_is_ever_read() -> None:
    for name in ("", "/", "../assets.py", "common/../../assets.py", "/etc/hostname", "common", "common/absent.js"):
        assert asset(name) is None, name
    assert client().get("/static/%2e%2e/assets.py").status_code == 404


def preloaded(html: str) -> list[str]:
    return re.findall(r'<link rel="modulepreload" href="(?:../)?static/([^"]+)">', html)


def test_every_page_preloads_what_its_script_imports_and_nothing_else() -> None:
    live = (STATIC / "ui" / "index.html").read_text()
    reference = (STATIC / "reference" / "index.html").read_text()
    pages = {"ui/live.js": live, "compare/compare.js": page("compare"), "reference/reference.js": reference}
    pages |= {f"guide/{chapter.name}.js": page(chapter.name) for chapter in CHAPTERS}
    for script, html in pages.items():
        assert preloaded(html) == imported_modules(script), script
        assert re.search(rf'<script type="module" src="(../)?static/{script}"></script>', html)


def test_modules_of_a_page_are_found_at_any_depth() -> None:
    found = imported_modules("guide/chunked.js")
    assert found.index("common/timeline.js") < found.index("common/timeline-request.js")
    assert len(set(found)) == len(found) and all((STATIC / name).is_file() for name in found)


def test_the_palette_is_sent_from_where_reports_have_it() -> None:
    assert client().get("/static/common/palette.css").content == PALETTE.read_bytes()
