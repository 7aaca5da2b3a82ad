"""The live page's own endpoints, without a browser."""

import httpx
import pytest
from servers import RunningServer, fake_server, wait_until

pytestmark = pytest.mark.system


def test_the_state_counts_what_happened_since_somebody_watches() -> None:
    with fake_server(fleet={"prefill": 1, "decode": 1}, cluster={"disaggregate": "always"}) as server:
        state = httpx.get(f"{server.url}/ui/state").json()
        assert (state["shape"], state["window"]["ttft"]) == ("1 prefill + 1 decode", None)
        assert [(one["role"], one["state"]) for one in state["workers"]] == [("prefill", "ready"), ("decode", "ready")]
        body = {"prompt": [7] * 40, "max_tokens": 8, "ttft_slo_ms": 60_000, "tpot_slo_ms": 60_000}
        httpx.post(f"{server.url}/v1/completions", json=body, timeout=30).raise_for_status()

        def window() -> dict[str, object]:
            found = httpx.get(f"{server.url}/ui/state").json()["window"]
            return dict(found)

        def counts() -> tuple[object, ...]:
            found = window()
            ttft, itl = (found[name] if isinstance(found[name], dict) else {} for name in ("ttft", "itl"))
            return found["attainment"], ttft.get("count"), itl.get("count"), found["handoffs"]

        wait_until(lambda: counts() == (1.0, 1, 7, 1))


def test_the_page_is_open_and_what_it_shows_needs_the_key(fake_with_keys: RunningServer) -> None:
    server = fake_with_keys
    expected = {"/ui": 200, "/": 307, "/static/ui/live.js": 200, "/ui/state": 401, "/staticx": 401}
    for path, status in expected.items():
        assert httpx.get(f"{server.url}{path}").status_code == status, path
    assert httpx.get(server.url, follow_redirects=True).text == httpx.get(f"{server.url}/ui").text
    key = {"Authorization": "Bearer secret"}
    assert httpx.get(f"{server.url}/ui/state", headers=key).status_code == 200


def test_the_state_is_in_the_reference_and_the_page_is_not(fake: RunningServer) -> None:
    paths = httpx.get(f"{fake.url}/openapi.json", timeout=60).json()["paths"]
    assert "/ui/state" in paths
    assert not [path for path in paths if path == "/ui" or path.startswith("/static")]
