"""`python -m benchmarks.dashboard --json`: how long the page of a large run takes to open; what it weighs.

A made-up run (`benchmarks.made_run`) of `--steps` (100,000), `--points` (500) and `--attempts` (200) lies in
a temporary folder and is served by the command `dashboard`. `first_read_s`: the first answer about the run,
of which nothing was read before; `later_look_s`: the answer when 1,000 steps are new, `new_attempt_look_s`:
when an attempt is, so that the history is followed anew (medians of 5). `api_p99_ms`: the 99th percentile of
`--requests` answers of the routes that the page's views ask, one after the other. `server_mb`: the server's
resident memory then, `server_most_mb` the most of it, in 10^6 bytes. `tabs_1_cpu` and `tabs_20_cpu`: the
share of a CPU that the server takes while so many listen to the run, and nothing happens.

`open_s`: in chromium, from the navigation to the run's page until its timeline is drawn, the median of
`--repeats` fresh browser contexts (nothing cached). `page_bytes`: what the page's own files weigh as they are
sent, `data_bytes` the answers of the opening view. `scroll_frame_p99_ms`: the 99th percentile of the time
between two frames while the lists of points and of events are scrolled by script, first slowly and then so
that each frame shows other rows, at the worst of the two lists; `scroll_long_frames` how many took more than
50 ms, `scroll_frames` of how many; `scroll_long_tasks` how often the page's script and layout took that long
at once (a frame is also late where painting, which has no GPU here, or another process is in the way). The
last line of the output is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT
from benchmarks.made_run import go_on, write_run

ROUTES = (
    "",
    "/timeline?px=1200",
    "/series?metrics=loss&px=1200",
    "/series?metrics=tokens_per_s,grad_norm,data_wait_share,save_blocked_s,step_s,lr&px=600",
    "/points?limit=100",
    "/points?limit=100&offset=200",
    "/attempts",
    "/sources",
    "/goodput",
    "/events?level=fault,change,point,data&limit=100",
    "/plan?num_workers=3",
)
BROWSERS = ("chromium", "google-chrome", "chromium-browser")
ARGUMENTS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--no-first-run",
]


NEW_STEPS, LOOKS = 1000, 5
ANEW_S = 0.6  # after so long a request looks at the run anew
LISTENED_S = 8.0
LONG_MS = 50.0  # of a frame, or of a task
# Scrolls the list by `px` a frame, for at most `frames`; the milliseconds between frames, and of long tasks.
SCROLL = """async ([px, frames]) => {
	const list = document.querySelector('.vt-body'), between = [], tasks = [];
	const watch = new PerformanceObserver(l => tasks.push(...l.getEntries().map(e => e.duration)));
	watch.observe({ type: 'longtask' });
	await new Promise(done => {
		let last = performance.now(), left = frames, down = 1;
		const frame = now => {
			between.push(now - last); last = now; list.scrollTop += px * down;
			if (list.scrollTop + list.clientHeight >= list.scrollHeight - 1) down = -1;
			if (list.scrollTop === 0) down = 1;
			if (--left) requestAnimationFrame(frame); else done();
		};
		requestAnimationFrame(frame);
	});
	await new Promise(done => setTimeout(done, 100));
	watch.disconnect();
	return { between: between.slice(1), tasks };
}"""
SPEEDS = ((40, 240), (900, 120))  # pixels a frame, frames


@contextmanager
def serving(storage: Path) -> Iterator[tuple[str, int]]:
    """The link to a server of the folder, and its process."""
    program = [sys.executable, "-m", "orchestrator.cli.commands", "dashboard", str(storage)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, env=environment) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip(), server.pid
        finally:
            server.terminate()


class Asked:
    """A server's API, and how long its answers took."""

    def __init__(self, link: str) -> None:
        self._base, _, token = link.partition("#token=")
        self._headers = {"Authorization": f"Bearer {token}", "Accept-Encoding": "gzip"}
        self.seconds: list[float] = []

    def get(self, route: str) -> float:
        """Seconds until the whole answer is here."""
        request = urllib.request.Request(f"{self._base}api/runs/made{route}", headers=self._headers)
        began = time.perf_counter()
        with urllib.request.urlopen(request) as answer:
            answer.read()
        self.seconds.append(time.perf_counter() - began)
        return self.seconds[-1]

    def anew(self, change: Callable[[], None]) -> float:
        """Seconds until the answer about a run that has changed, the median of some changes."""
        found = []
        for _ in range(LOOKS):
            change()
            time.sleep(ANEW_S)
            found.append(self.get(""))
        return statistics.median(found)

    def listening(self, tabs: int, pid: int) -> float:
        """The share of a CPU that the server takes while so many listen."""
        request = urllib.request.Request(f"{self._base}api/runs/made/stream", headers=self._headers)
        with ExitStack() as streams:
            for _ in range(tabs):
                stream = streams.enter_context(urllib.request.urlopen(request))
                while not stream.readline().startswith(b"data"):
                    pass
            before, began = _cpu_s(pid), time.perf_counter()
            time.sleep(LISTENED_S)
            return (_cpu_s(pid) - before) / (time.perf_counter() - began)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _memory(pid: int, name: str) -> float:
    """In 10^6 bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return round(int(line.split()[1]) * 1024 / 1e6, 1)


class Wire:
    """What a page gets over the network, in bytes as they are sent: its own files, and data."""

    def __init__(self, context: Any, page: Any, base: str) -> None:
        self.bytes, self._base, self._data = {"page": 0.0, "data": 0.0}, base, set[str]()
        session = context.new_cdp_session(page)
        session.send("Network.enable")
        session.on("Network.requestWillBeSent", self._sent)
        session.on("Network.loadingFinished", self._finished)

    def _sent(self, event: dict[str, Any]) -> None:
        if event["request"]["url"].startswith(f"{self._base}api/"):
            self._data.add(event["requestId"])

    def _finished(self, event: dict[str, Any]) -> None:
        kind = "data" if event["requestId"] in self._data else "page"
        self.bytes[kind] += event["encodedDataLength"]


def _open_once(browser: Any, link: str) -> tuple[float, dict[str, float]]:
    """Seconds until the timeline is drawn, and what was sent for it."""
    base, _, token = link.partition("#token=")
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    context.add_init_script(f"sessionStorage.setItem('token', '{token}')")
    page = context.new_page()
    wire = Wire(context, page, base)
    page.goto(f"{base}#/run/made", wait_until="commit")
    deadline = time.monotonic() + 60
    while (at := page.evaluate("performance.getEntriesByName('shown')[0]?.startTime")) is None:
        if time.monotonic() > deadline:
            raise RuntimeError("the timeline is not drawn within a minute")
        page.wait_for_timeout(10)
    page.wait_for_timeout(500)  # what is drawn after it counts, too
    context.close()
    return at / 1000, wire.bytes


def _scrolled(browser: Any, link: str) -> dict[str, float]:
    """How smoothly the two long lists scroll, one after the other."""
    base, _, token = link.partition("#token=")
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    context.add_init_script(f"sessionStorage.setItem('token', '{token}')")
    page = context.new_page()
    found: list[dict[str, float]] = []
    for view in ("points", "events?level=fault,change,point,data,routine"):
        page.goto(f"{base}#/run/made/{view}")
        page.wait_for_selector(".vt-row:not(.load)")
        page.wait_for_timeout(1000)
        parts = [page.evaluate(SCROLL, list(speed)) for speed in SPEEDS]
        between = sorted(ms for part in parts for ms in part["between"])
        found.append(
            {
                "scroll_frame_p99_ms": round(between[int(len(between) * 0.99)], 1),
                "scroll_long_frames": sum(ms > LONG_MS for ms in between),
                "scroll_frames": len(between),
                "scroll_long_tasks": sum(len(part["tasks"]) for part in parts),
                "scroll_longest_task_ms": round(max([0.0, *(ms for p in parts for ms in p["tasks"])]), 1),
            }
        )
    context.close()
    return {name: max(one[name] for one in found) for name in found[0]}


def opened(link: str, repeats: int) -> dict[str, float]:
    """What a browser sees; empty where there is none."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        return {}
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=ARGUMENTS)
        found = [_open_once(browser, link) for _ in range(repeats)]
        scrolled = [_scrolled(browser, link) for _ in range(min(repeats, 3))]
        browser.close()
    return {
        **{name: statistics.median(each[name] for each in scrolled) for name in scrolled[0]},
        "open_s": round(statistics.median(seconds for seconds, _ in found), 3),
        "open_most_s": round(max(seconds for seconds, _ in found), 3),
        "page_bytes": round(statistics.median(sent["page"] for _, sent in found)),
        "data_bytes": round(statistics.median(sent["data"] for _, sent in found)),
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All figures."""
    with tempfile.TemporaryDirectory(prefix="dashboard-") as folder:
        made = write_run(Path(folder, "made"), options.steps, options.points, options.attempts)
        attempts = len(made.store.claim_numbers())
        load = round(os.getloadavg()[0], 1)
        with serving(Path(folder)) as (link, pid):
            asked = Asked(link)
            first = asked.get("")
            asked.seconds.clear()
            for number in range(options.requests):
                asked.get(ROUTES[number % len(ROUTES)])
            ordered = sorted(asked.seconds)
            memory = {"server_mb": _memory(pid, "VmRSS"), "server_most_mb": _memory(pid, "VmHWM")}
            later = asked.anew(lambda: go_on(Path(folder, "made"), NEW_STEPS))
            return {
                **opened(link, options.repeats),
                **memory,
                "later_look_s": round(later, 3),
                "new_attempt_look_s": round(asked.anew(lambda: made.resume(NEW_STEPS)), 3),
                "tabs_1_cpu": round(asked.listening(1, pid), 3),
                "tabs_20_cpu": round(asked.listening(20, pid), 3),
                "api_p99_ms": round(1000 * ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))], 1),
                "api_median_ms": round(1000 * statistics.median(ordered), 1),
                "first_read_s": round(first, 3),
                "steps": options.steps,
                "points": made.committed,
                "attempts": attempts,
                "cpus": os.cpu_count(),
                "load_before": load,
                "load_after": round(os.getloadavg()[0], 1),
            }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print only the JSON object, in one line")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--points", type=int, default=500)
    parser.add_argument("--attempts", type=int, default=200)
    parser.add_argument("--requests", type=int, default=330, help="answers of the API that are timed")
    parser.add_argument("--repeats", type=int, default=5, help="times that the page is opened")
    options = parser.parse_args()
    figures = measure(options)
    if not options.json:
        print(*(f"{name}: {value}" for name, value in figures.items()), sep="\n")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
