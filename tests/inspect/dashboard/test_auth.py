"""Who gets an answer: nobody without the token, nobody from another page or under another name."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.inspect.dashboard.auth import MOST_BODY_BYTES, AccessRules, refusal
from tests.inspect.dashboard.serving import Served, client, served

LOCAL = AccessRules(token="right", public=frozenset({"/"}))
OPEN = AccessRules(token="right", public=frozenset({"/"}), host="0.0.0.0")


def code(door: AccessRules, path: str = "/api/runs", **headers: str) -> str:
    given = {"host": "127.0.0.1:8000", **{name.lower(): value for name, value in headers.items()}}
    problem = refusal(door, path, given)
    return f"{problem.status} {problem.code}" if problem else "answered"


@pytest.mark.parametrize(
    ("authorization", "found"),
    [
        (None, "401 page.no_token"),
        ("right", "401 page.no_token"),
        ("Bearer", "401 page.no_token"),
        ("Bearer wrong", "401 page.wrong_token"),
        ("Basic right", "401 page.wrong_token"),
        ("Bearer right2", "401 page.wrong_token"),
        ("Bearer righ", "401 page.wrong_token"),
        ("Bearer \u00e9", "401 page.wrong_token"),
        ("Bearer right", "answered"),
        ("bearer right", "answered"),
    ],
)
def test_only_the_token_opens_the_api(authorization: str | None, found: str) -> None:
    headers = {} if authorization is None else {"authorization": authorization}
    assert code(LOCAL, **headers) == found
    assert code(LOCAL, "/", **headers) == "answered"
    assert code(LOCAL, "/nothing", **headers) == found


@pytest.mark.parametrize(
    ("host", "local", "beyond"),
    [
        ("127.0.0.1:8000", True, True),
        ("127.0.0.1", True, True),
        ("localhost:9000", True, True),
        ("LOCALHOST", True, True),
        ("[::1]:8000", True, True),
        ("192.168.1.7:8000", False, True),
        ("[fe80::1]:80", False, True),
        ("evil.example:8000", False, False),
        ("127.0.0.1.evil.example", False, False),
        ("localhost.evil.example", False, False),
        ("", False, False),
        ("[", False, False),
        ("2130706433", False, False),
    ],
)
def test_a_name_that_was_made_to_lead_here_is_not_answered(host: str, local: bool, beyond: bool) -> None:
    for door, admitted in ((LOCAL, local), (OPEN, beyond)):
        wanted = "answered" if admitted else "403 page.host"
        assert code(door, "/", host=host) == wanted
        assert code(door, host=host, authorization="Bearer right") == wanted


@pytest.mark.parametrize(
    ("origin", "found"),
    [
        ("http://127.0.0.1:8000", "answered"),
        ("http://127.0.0.1:8001", "403 page.origin"),
        ("http://localhost:8000", "403 page.origin"),
        ("https://evil.example", "403 page.origin"),
        ("null", "403 page.origin"),
        ("", "403 page.origin"),
    ],
)
def test_a_page_of_another_origin_is_not_answered(origin: str, found: str) -> None:
    assert code(LOCAL, origin=origin, authorization="Bearer right") == found
    assert code(LOCAL, "/", origin=origin) == found


def test_no_route_answers_without_the_token_or_under_another_name(run: Served) -> None:
    posts = [f"/api/runs/made/actions/{action}/plan" for action in ("save", "pin")]
    asked = [("GET", path) for path in [*run.routes(), "/api/runs", "/api/openapi.json"]]
    asked += [("GET", "/api/runs/made/stream"), ("GET", "/api/runs/made/actions/0"), ("GET", "/x")]
    asked += [("POST", path) for path in posts] + [("PUT", "/api/runs"), ("OPTIONS", "/api/runs")]
    for method, path in asked:
        for headers, status in (
            ({"Authorization": ""}, 401),
            ({"Authorization": "Bearer wrong"}, 401),
            ({"Host": "evil.example"}, 403),
            ({"Origin": "https://evil.example"}, 403),
        ):
            answer = run.client.request(method, path, headers=headers)
            assert answer.status_code == status, (method, path, headers)
            assert set(answer.json()["error"]) == {"code", "text", "do"}


def test_every_answer_has_the_headers_that_keep_a_browser_safe(run: Served) -> None:
    for path in ("/", "/app.js", "/api/runs", "/api/runs/none", "/api/runs/made/series?px=1", "/nothing"):
        headers = run.client.get(path).headers
        assert "script-src 'self'" in headers["content-security-policy"], path
        assert "unsafe" not in headers["content-security-policy"]
        assert "default-src 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert "server" not in headers
        assert headers["cache-control"] == ("no-cache" if path in ("/", "/app.js") else "no-store")
    refused = run.client.get("/api/runs", headers={"Authorization": ""}).headers
    assert "content-security-policy" in refused
    assert refused["www-authenticate"] == "Bearer"


def test_the_page_itself_loads_without_a_token_and_nothing_else_does(run: Served) -> None:
    for path in ("/", "/app.js", "/app.css", "/vendor/uPlot-1.6.32.iife.min.js"):
        assert run.client.get(path, headers={"Authorization": ""}).status_code == 200, path
    for path in ("/../auth.py", "/%2e%2e/auth.py", "/vendor/../../auth.py", "/index.html/", "//etc/passwd"):
        assert run.client.get(path, headers={"Authorization": ""}).status_code == 401, path
        assert run.client.get(path).status_code in {404, 422}, path


def test_a_browser_that_has_a_file_is_not_sent_it_again(run: Served) -> None:
    first = run.client.get("/app.js")
    again = run.client.get("/app.js", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    vendored = run.client.get("/vendor/uPlot-1.6.32.min.css").headers["cache-control"]
    assert "immutable" in vendored


def test_reading_changes_nothing_and_actions_are_not_begun_by_get(tmp_path: Path) -> None:
    run = served(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for path in run.routes():
        assert run.client.get(path).status_code == 200, path
    for path in ("save", "pin/plan", "stop/plan"):
        assert run.client.get(f"/api/runs/made/actions/{path}").status_code in {404, 405}, path
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_a_body_beyond_the_limit_is_refused(run: Served) -> None:
    for content in (b"x" * (MOST_BODY_BYTES + 1), iter([b"x" * 1000] * 100)):
        answer = run.client.post(
            "/api/runs/made/actions/pin/plan", content=content, headers={"Content-Type": "application/json"}
        )
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "page.body_too_large")


def test_a_tunnel_to_another_port_is_answered(run: Served) -> None:
    there = client(run.storage)
    answer = there.get("/api/runs", headers={"Host": "localhost:9999", "Origin": "http://localhost:9999"})
    assert answer.status_code == 200
