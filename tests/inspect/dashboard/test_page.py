"""The page in a real browser, over a real run with a killed group, another shape and a rewind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import orchestrator
from benchmarks.made_run import write_run
from orchestrator.errors import OrchestratorError
from orchestrator.inspect.dashboard.plans import Planner, WhatIf
from orchestrator.inspect.dashboard.runs import Runs
from orchestrator.inspect.status.snapshot import missing_text
from orchestrator.storage.files import Storage
from tests.data.making import some_texts, write_corpus
from tests.inspect.dashboard.browser import Watched, chromium, serving
from tests.inspect.dashboard.serving import SCRIPT, client, confirmed, make_hostile
from tests.inspect.trained_run import TrainedRun
from tests.launch.skipping_run import SkippingRun, survey_newest
from tests.system.harness import LIMIT_S, Job
from tests.torchrun.ranks import ranks

pytestmark = [
    *(pytest.mark.browser, pytest.mark.system, pytest.mark.timeout(900)),
    pytest.mark.xdist_group("forked"),
]
VIEWS = {
    "": ".tl canvas",
    "/points": ".vt-row",
    "/lineage": ".vt-row svg",
    "/charts": ".uplot canvas",
    "/data": ".sharecell",
    "/goodput": ".stack i",
    "/cards": "[data-card=groups] td",
    "/events": ".vt-row",
    "/plan": ".lay",
}
AXE = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"], "resultTypes": ["violations"]}
SETTLED = (
    "Promise.all(document.getAnimations()"
    ".filter(each => each.effect.getComputedTiming().endTime < Infinity).map(each => each.finished))"
)
COLOURS = {**AXE, "runOnly": {"type": "rule", "values": ["color-contrast", "link-in-text-block"]}}


def trained(job: Job, folder: Path, world_size: int, faults: Any = None, **changes: Any) -> None:
    """A group trains the job until it ends."""
    with ranks(folder, world_size, job.config(**changes), faults) as group:
        if faults is None:
            assert group.end(LIMIT_S) == [0] * world_size, group.said()
            return
        group.processes[0].join(LIMIT_S)
        assert group.processes[0].exitcode == -signal.SIGKILL, group.said()


@pytest.fixture(scope="module")
def job(tiny_config: Any, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """A run of one worker that was killed, continued on two at another shape, and rewound."""
    folder = tmp_path_factory.mktemp("job")
    made = Job(tiny_config({"resume.every_steps": 4, "resume.keep_latest": 9, "train.max_steps": 12}), folder)
    trained(made, folder, 1, made.faults().kill("save_part_written", step=7), train__max_steps=7)
    other = {"train__global_batch_size": 6, "pack__seq_len": 16, "train__max_steps": 24}
    trained(made, folder, 2, **other)
    trained(made, folder, 1, resume__from=made.run.list_points()[0]["name"])
    return made


@pytest.fixture(scope="module")
def storage(job: Job) -> Path:
    """The folder with that run, and one beside it that says markup wherever it can."""
    folder = Path(job.config().run.storage)
    make_hostile(write_run(folder / "hostile", steps=60, points=6, attempts=3), SCRIPT)
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module")
def link(browser: Any, storage: Path) -> Iterator[str]:
    del browser  # without one nothing is served
    with serving(storage) as printed:
        yield printed


Open = Callable[..., Watched]


@pytest.fixture(scope="module")
def window(browser: Any, link: str) -> Watched:
    """The page of all tests that need nothing of their own."""
    return Watched(browser, link)


@pytest.fixture
def opened(browser: Any, link: str, window: Watched) -> Iterator[Open]:
    """Opens a page; in the end none may have complained, but of what is `allowed`."""
    pages: list[Watched] = []

    def open_page(allowed: str = "", **context: Any) -> Watched:
        if context:
            pages.append(Watched(browser, link, **context))
        else:
            window.again()
            pages.append(window)
        pages[-1].allowed = allowed
        return pages[-1]

    yield open_page
    for watched in pages:
        complaints = watched.found()
        if watched is not window:
            watched.close()
        assert complaints == []


def accessible(watched: Watched, options: dict[str, Any] = AXE) -> None:
    """axe finds nothing."""
    from axe_playwright_python.base import AXE_SCRIPT

    page = watched.page
    if not page.evaluate("!!window.axe"):
        page.evaluate(AXE_SCRIPT)
    page.evaluate(SETTLED)  # what fades in has colours of its own until then
    found = page.evaluate("options => axe.run(options).then(result => result.violations)", options)
    said = [f"{each['id']}: {[node['html'][:200] for node in each['nodes'][:3]]}" for each in found]
    assert said == [], page.url


# ---------------------------------------------------------------------------------------------------- looking
def usable(watched: Watched) -> None:
    """What is shown can be used by everybody, and be read in both themes, which differ in colours alone."""
    accessible(watched)
    watched.page.emulate_media(color_scheme="dark")
    watched.page.wait_for_selector("html[data-theme='dark']")
    accessible(watched, COLOURS)
    watched.page.emulate_media(color_scheme="light")
    watched.page.wait_for_selector("html[data-theme='light']")


@pytest.mark.chaos
def test_every_view_opens_without_a_complaint_and_everybody_can_use_it(opened: Open) -> None:
    watched = opened(color_scheme="light")
    watched.page.wait_for_selector("table.runs tbody tr")
    usable(watched)
    for view, drawn in VIEWS.items():
        page = watched.open(f"/run/tiny{view}")
        page.wait_for_selector(drawn)
        usable(watched)
    page = watched.open("/run/tiny/points")
    page.locator(".vt-row").first.click()
    page.wait_for_selector(".drawer h3")
    usable(watched)


@pytest.mark.chaos
def test_every_view_opens_in_the_dark_where_the_system_is_dark(opened: Open) -> None:
    watched = opened(color_scheme="dark")
    assert watched.page.evaluate("document.documentElement.dataset.theme") == "dark"
    for view, drawn in VIEWS.items():
        watched.open(f"/run/tiny{view}").wait_for_selector(drawn)


@pytest.mark.chaos
def test_nothing_is_wider_than_a_phone_and_everybody_can_use_it_there(opened: Open) -> None:
    watched = opened(viewport={"width": 390, "height": 800}, has_touch=True)
    for address in ("/", *(f"/run/tiny{view}" for view in VIEWS), "/run/hostile", "/run/hostile/events"):
        page = watched.open(address)
        page.wait_for_selector(VIEWS.get(address.removeprefix("/run/tiny"), "h1"))
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, address
        accessible(watched)


def test_the_page_says_what_happened_to_the_run(opened: Open, job: Job) -> None:
    page = opened().open("/run/tiny")
    page.wait_for_selector(".incidents li")
    assert "Done" in page.inner_text(".runhead")
    said = page.inner_text(".incidents").lower()
    assert "rewound" in said or "rewind" in said
    assert "resumed" in said or "died" in said
    rows = job.run.list_points()
    page.goto(page.url.split("#")[0] + "#/run/tiny/points")
    page.wait_for_selector(".vt-row")
    assert f"All {len(rows)}" in " ".join(page.inner_text(".chips").split())
    orphans = sum(not row["on_lineage"] for row in rows)
    assert f"Orphans {orphans}" in " ".join(page.inner_text(".chips").split())


def runs_of(link: str) -> Any:
    """What a server answers whose link this is."""
    base, _, token = link.partition("#token=")
    asked = urllib.request.Request(f"{base}api/runs", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        return json.load(answer)["runs"]


def test_a_run_that_is_only_being_looked_at_counts_neither_as_alive_nor_as_not_running(opened: Open) -> None:
    watched = opened()

    def one(request: Any) -> None:
        document = request.fetch().json()
        (run,) = (each for each in document["runs"] if each["name"] == "tiny")
        request.fulfill(json={**document, "runs": [{**run, "state": "open"}]})

    watched.page.route("**/api/runs", one)
    watched.page.reload()
    watched.page.wait_for_selector("table.runs tr >> text=Looking for a sign of life")
    assert watched.page.inner_text("h1") == "1 run"
    assert watched.page.inner_text(".chips").split() == ["All", "1", "Alive", "0", "Not", "running", "0"]


def test_a_run_that_has_only_claimed_is_shown_in_every_view(opened: Open, storage: Path, link: str) -> None:
    begun = storage / "begun"
    write_run(begun, steps=20, points=2, attempts=1)
    for folder in ("journal", "points"):
        shutil.rmtree(begun / folder)
    (begun / "attempts" / "0001.parent.json").unlink()
    beat = begun / "attempts" / "0001.start-heartbeat"
    for at in range(1, 20_000):  # until the server has seen that it lives
        beat.write_text("." * at)
        if next(each for each in runs_of(link) if each["name"] == "begun")["state"] == "starting":
            break
    watched = opened()
    watched.page.wait_for_selector("table.runs tbody tr >> text=Starting")
    row = watched.page.inner_text("table.runs tbody tr:has-text('begun')")
    assert "being started" in row
    assert "null" not in row
    for view in ("", "/points", "/lineage", "/charts", "/data", "/goodput", "/events"):
        page = watched.open(f"/run/begun{view}")
        page.wait_for_selector("nav.tabs a[aria-current]")
        assert not re.search(r"null|undefined|NaN|2\d{4} d", page.inner_text("main")), view


def test_pieces_that_are_gone_and_forks_that_lie_elsewhere_are_named_on_the_page(
    opened: Open, storage: Path
) -> None:
    made = write_run(storage / "gaps", steps=60, points=6, attempts=3)
    (storage / "gaps" / "tokenizer" / "tokenizer.json").unlink()
    elsewhere = f"/elsewhere/{SCRIPT.replace('/', '')}/fork"
    made.store.pin(made.points[-1], "me", f"parent of fork {elsewhere}", made.run.id)
    told = missing_text(orchestrator.open(storage / "gaps").status(0).missing)
    assert told.startswith("missing or damaged in its folder: tokenizer/tokenizer.json")
    watched = opened()
    watched.page.wait_for_selector("table.runs tr:has-text('gaps') >> text=Missing or damaged")
    page = watched.open("/run/gaps")
    page.wait_for_selector(f".scroll >> text={told[1:]}")
    page = watched.open("/run/gaps/points")
    page.wait_for_selector(f".runhead [role=alert] >> text={told[1:]}")
    page = watched.open("/run/gaps/lineage")
    page.wait_for_selector(".vt-row")
    assert elsewhere in page.inner_text(".bar .paths")
    assert page.locator(".vt-row a, .vt-row img, .bar a, .bar img").count() == 0


def test_motion_stops_for_who_wants_none(opened: Open) -> None:
    page = opened(reduced_motion="reduce").open("/run/tiny/points")
    page.locator(".vt-row").first.click()
    page.wait_for_selector(".drawer h3")
    moving = (
        "[...document.querySelectorAll('*')].filter(e => { const s = getComputedStyle(e);"
        "return parseFloat(s.animationDuration) > 0.01 && s.animationName !== 'none' }).length"
    )
    assert page.evaluate(moving) == 0


def test_views_rows_and_drawer_are_reached_by_keys_alone(opened: Open) -> None:
    watched = opened()
    page = watched.open("/run/tiny")
    page.wait_for_selector(".tl canvas")
    page.keyboard.press("2")
    page.wait_for_selector(".vt-row[tabindex='0']")
    page.locator(".vt-row[tabindex='0']").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    page.wait_for_selector(".drawer h3")
    title = page.inner_text("#drh")
    page.keyboard.press("]")
    page.wait_for_selector(f"#drh:not(:has-text('{title}'))")
    page.keyboard.press("Escape")
    page.wait_for_selector(".drawer", state="detached")
    assert page.evaluate("document.activeElement.classList.contains('vt-row')")
    page.keyboard.press("?")
    page.wait_for_selector("dialog[open] .words dt")
    page.keyboard.press("Escape")
    page.keyboard.press("7")
    page.wait_for_selector("#eq")
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "eq"


def test_markup_in_names_errors_and_documents_stays_text(opened: Open) -> None:
    watched = opened()
    for view in VIEWS:
        page = watched.open(f"/run/hostile{view}")
        page.wait_for_selector("main h1, main h2, .vt-row, .bar")
        assert page.locator("img").count() == 0, view
        assert page.locator("body script").count() == 0, view
    page = watched.open("/run/hostile/events")
    page.wait_for_selector(".vt-row")
    assert "<img src=x onerror=alert(1)><script>" in page.inner_text(".vt-body").lower()
    page.locator(".vt-row").first.click()
    page.wait_for_selector("pre.json")
    assert "<script>" in page.inner_text("pre.json")


def test_a_hostile_address_is_shown_as_it_is_and_does_nothing(opened: Open, link: str) -> None:
    page = opened(allowed="404").page
    page.goto(f"{link.split('#', maxsplit=1)[0]}#/run/{SCRIPT.replace('/', '%2F')}")
    page.wait_for_selector("[role=alert]")
    assert "<img src=x" in page.inner_text("h1")
    assert page.locator("img").count() == 0


def test_a_range_without_width_is_drawn(opened: Open) -> None:
    page = opened().page
    drawn = """async ([from, to, time]) => {
        const { xRange } = await import('./charts.js'), scales = { x: { time, range: xRange(from, to) } };
        const plot = new uPlot({ width: 300, height: 150, scales, series: [{}, {}] }, [[from, to], [1, 2]],
            document.createElement('div'));
        await new Promise(done => setTimeout(done));
        return plot.axes[0]._splits.length;
    }"""
    for start, stop in ((0, 0), (5, 5), (1795412000, 1795412000), (0, 10), (3e12, 3e12)):
        for time in (False, True):
            assert page.evaluate(drawn, [start, stop, time]) < 100


def test_without_its_token_the_page_says_where_to_get_it(browser: Any, link: str) -> None:
    watched = Watched(browser, link.split("#", maxsplit=1)[0])
    watched.page.wait_for_selector("[role=alert]")
    said = watched.page.inner_text("[role=alert]")
    assert "lacks its token" in said
    assert "open the link that `orchestrator dashboard` has printed" in said
    assert watched.page.inner_text(".conn .txt") == "not let in: the token"
    watched.page.goto(f"{link.split('#', maxsplit=1)[0]}#token=a-wrong-one")
    watched.page.wait_for_selector("[role=alert] >> text=The token of this address is wrong")
    watched.page.goto(link)
    watched.page.wait_for_selector("table.runs tbody tr")
    assert "token" not in watched.page.url
    watched.allowed = "401"
    assert watched.found() == []
    watched.close()


# ---------------------------------------------------------------------------------------------------- what if
def planned(job: Job, *overrides: str) -> dict[str, Any]:
    """What the command line answers."""
    path = Path(job.config().run.storage) / "job.json"
    path.write_text(json.dumps(job.config().to_json()))
    found: dict[str, Any] = orchestrator.plan(path, overrides).to_json()
    return found


def test_the_planner_answers_what_the_command_line_answers(job: Job, storage: Path) -> None:
    planner = Planner(Runs(Storage(str(storage))).open("tiny"))
    older = next(row["name"] for row in job.run.list_points() if row["on_lineage"])
    for values, point in (
        ({}, None),
        ({"num_workers": "3"}, None),
        ({"num_workers": "[2, 4]", "global_batch_size": "12", "micro_batch_size": "5"}, None),
        ({"seq_len": "64", "global_batch_size": "8"}, None),
        ({"seq_len": "16"}, older),
    ):
        asked = WhatIf(point=point, values=values)
        document = planner.document(asked)
        answer = planned(job, *asked.overrides, *([f"resume.from={point}"] if point else []))
        # a page may be served anywhere: it judges by the machines that the run noted, a command by its own
        notes = [[n for n in found["notes"] if "judged by" not in n] for found in (document, answer)]
        assert notes[0] == notes[1], values
        same = json.loads(json.dumps({**answer, "notes": document["notes"]}))
        assert {key: document[key] for key in answer} == same, values
        assert set(document) - set(answer) == {"layout", "tokens_per_step", "estimate", "command"}
        for part in document["layout"]:
            assert sum(part["per_worker"]) == part["num_micro"]


@pytest.mark.chaos
def test_the_planner_refuses_in_the_words_of_the_command_line(opened: Open, job: Job) -> None:
    orphan = next(row["name"] for row in job.run.list_points() if not row["on_lineage"])
    with pytest.raises(OrchestratorError) as refused:
        planned(job, f"resume.from={orphan}")
    page = opened().open(f"/run/tiny/plan?from_point={orphan}")
    page.wait_for_selector(".plancol [role=alert]")
    assert str(refused.value) in page.inner_text(".plancol [role=alert]")
    page.select_option("#f-point", "")
    page.wait_for_selector(".becomes")
    page.fill("#f-global_batch_size", "16")
    page.wait_for_selector("copy-line code:has-text('train.global_batch_size=16')")
    assert "may change" in page.inner_text(".plancol")


def test_a_value_that_is_none_is_refused_while_it_is_typed(opened: Open) -> None:
    page = opened(allowed="422").open("/run/tiny/plan")
    page.wait_for_selector(".becomes")
    page.fill("#f-seq_len", "long")
    page.wait_for_selector(".plancol .banner.warn")
    assert "pack.seq_len is 'long'" in page.inner_text(".plancol .banner.warn")


@pytest.mark.chaos
def test_a_mixture_of_packs_shows_what_no_sample_holds_and_its_plan_what_was_seen(
    browser: Any, tiny_config: Any, tmp_path: Path
) -> None:
    folder, sources = tmp_path / "runs", []
    for name, weight in (("web", 0.7), ("books", 0.3)):
        texts = [f"{name} {text}" for text in some_texts(60, 40)]
        write_corpus(tmp_path / name, texts, "jsonl")
        sources.append({"name": name, "path": str(tmp_path / name), "format": "jsonl", "weight": weight})
    changes = {"data.sources": sources, "data.fragment_bytes": 900, "data.window_bytes": 2500}
    packs = {"pack.mode": "bestfit", "pack.seq_len": 64, "pack.long_document": "skip", "data.num_epochs": 4}
    packs |= {"pack.max_long_share": 1.0}
    job = tiny_config({**changes, **packs, "train.global_batch_size": 4, "run.storage": str(folder)})
    run = SkippingRun(job)
    run.launch(6)
    weights = ("data.sources.0.weight=0.5", "data.sources.1.weight=0.5")
    run.launch(3, *weights)
    at = run.store.read_point(survey_newest(run)).cursor
    assert all(source.long_documents for source in at.sources.values())
    seen = orchestrator.plan(run.job(*weights)).sources
    with serving(folder) as link:
        watched = Watched(browser, link)
        page = watched.open("/run/tiny/data")
        page.wait_for_selector(".sharecell")
        header = page.locator(".t").first.locator("thead th").all_inner_texts()
        rows = page.locator(".t").first.locator("tbody tr").all()
        for name, row in zip(("web", "books"), rows, strict=True):
            cells = dict(zip(header, row.locator("td").all_inner_texts(), strict=True))
            assert cells["Too long"] == str(at.sources[name].long_documents)
            assert cells["No target"] == str(at.sources[name].unpacked_documents)
            place = f"window {at.sources[name].window:,} · {at.sources[name].packs} packs taken"
            assert place in cells["Next unread token"]
            assert cells["Documents"] == str(at.sources[name].documents)
        accessible(watched)
        page = watched.open("/run/tiny/plan")
        page.wait_for_selector(".becomes")
        table = page.locator("section.panel:has(h2:text('What it has had of the data'))")
        rows = table.locator("tbody tr").all()
        assert len(seen) == 2
        for source, row in zip(seen, rows, strict=True):
            shown = row.locator("td").all_inner_texts()
            assert (shown[0], shown[2]) == (source.source, f"{source.samples:,}")
            least, most = f"{source.epochs:.2f}", f"{source.epochs_at_most:.2f}"
            assert (shown[3], shown[4]) == (
                least if least == most else f"{least} to {most}",
                f"{source.actual or 0:.1%}".replace("%", " %"),
            )
            assert shown[5] == f"{source.target or 0:.1%}".replace("%", " %")
        accessible(watched)
        complaints = watched.found()
        watched.close()
    assert complaints == []


# ----------------------------------------------------------------------------------------------------- acting
def test_a_point_is_pinned_by_plan_confirm_and_done(opened: Open, job: Job) -> None:
    page = opened().open("/run/tiny/points")
    page.locator(".vt-row").first.click()
    page.get_by_role("button", name="Pin", exact=True).click()
    page.wait_for_selector("dialog[open] .effects li")
    assert "orchestrator pin" in page.inner_text("dialog[open]")
    page.fill("#act-why", "before the change")
    page.wait_for_selector("dialog[open] copy-line >> text=--why 'before the change'")
    page.locator("dialog[open] .df .primary").click()
    page.wait_for_selector("dialog[open] .verdict")
    assert "is pinned" in page.inner_text("dialog[open] .verdict")
    (pin,) = [row["pin"] for row in job.run.list_points() if row["pin"]]
    assert pin["reason"] == "before the change"
    page.get_by_role("button", name="Close").last.click()
    page.get_by_role("button", name="Unpin").click()
    page.locator("dialog[open] .df .primary").click()
    page.wait_for_selector("dialog[open] .verdict")
    assert not any(row["pin"] for row in job.run.list_points())


def test_a_forks_plan_follows_the_name_while_it_is_typed(opened: Open, job: Job) -> None:
    point = job.run.list_points()[0]["name"]
    page = opened().open(f"/run/tiny/points?point={point}")
    page.click(".drawer button:has-text('Fork')")
    page.locator("#act-run").press_sequentially("hostile")
    page.wait_for_selector("dialog [role=alert] >> text=is there already")
    assert page.locator("dialog .btn.primary").count() == 0
    page.locator("#act-run").press_sequentially("-2")
    page.wait_for_selector("dialog copy-line >> text=hostile-2")
    assert page.evaluate("document.activeElement.id") == "act-run"


def test_a_point_whose_address_is_opened_has_its_actions_though_their_list_comes_late(
    opened: Open, job: Job
) -> None:
    point = job.run.list_points()[0]["name"]
    page, held = opened().open(f"/run/tiny/points?point={point}"), list[Any]()
    page.wait_for_selector(".drawer h3")  # what is asked for from here on is the reload's
    page.route("**/api/runs", lambda request: held.append(request))  # noqa: PLW0108  it is marked there
    with page.expect_response(lambda response: f"/points/{point}" in response.url):
        page.reload(wait_until="commit")
    assert page.locator(".drawer button:has-text('Fork')").count() == 0
    assert held, "the list was asked for"
    page.unroute("**/api/runs")  # which lets go what was held
    page.click(".drawer button:has-text('Fork')")


def test_a_plan_that_does_not_hold_any_more_is_shown_as_stale(opened: Open, storage: Path) -> None:
    made = write_run(storage / "moving", steps=60, points=6, attempts=3)
    page = opened(allowed="409").open("/run/moving/points")
    page.locator(".vt-row").first.click()
    page.click(".drawer button:has-text('Fork')")
    page.wait_for_selector("dialog[open] .effects li")
    made.store.claim(max(made.store.claim_numbers()) + 1, "another", "resume", "host", made.run.id)
    page.locator("dialog[open] .df .primary").click()
    page.wait_for_selector("dialog[open] .banner.warn")
    said = page.inner_text("dialog[open] .banner.warn")
    assert re.search(r"Nothing was done", said)
    assert re.search(r"Attempt was \d+, now it is \d+", said)
    assert made.store.pins() == {}
    page.get_by_role("button", name="Plan again").click()
    page.wait_for_selector("dialog[open] .effects li")


def test_a_live_run_saves_and_stops_from_the_page(opened: Open, job: Job, tmp_path: Path) -> None:
    mapping = job.config(train__max_steps=100_000, resume__every_steps=None).to_json()
    live = Job({**mapping, "run": {**mapping["run"], "name": "live"}}, tmp_path)
    with ranks(tmp_path, 1, live.config()) as group:
        watched = opened()
        page = watched.page
        page.wait_for_selector("a.name[href='#/run/live']")
        page.click("a.name[href='#/run/live']")
        page.wait_for_selector(".runhead .state.running")
        page.get_by_role("button", name="Save now").click()
        page.locator("dialog[open] .df .primary").click()
        page.wait_for_selector("dialog[open] .verdict, dialog[open] .banner")
        said = page.inner_text("dialog[open]")
        assert "It was not done" not in said
        assert "-a0001-g0001" in said
        page.get_by_role("button", name="Close").last.click()
        page.get_by_role("button", name="Stop…").click()
        page.locator("dialog[open] .df .danger").click()
        page.wait_for_selector(".runhead .state.stopped")
        page.wait_for_selector("dialog[open] .verdict")
        assert group.end(LIMIT_S) == [0], group.said()
    outcomes = [row["healthy"] for row in live.run.list_points(verify=True)]
    assert outcomes == [True] * len(outcomes)
    assert len(outcomes) >= 2
    assert os.path.exists(live.config().run.run_uri)


def test_an_action_that_waits_shows_why_until_it_is_done(opened: Open) -> None:
    page = opened().open("/run/tiny/points")
    why = "verify: not yet, <b>storage</b> is slow"
    told = json.dumps({"id": "0", "action": "verify", "state": "running", "text": why, "is_bad": False})
    held = [True]

    def answer(route: Any) -> None:
        route.fulfill(body=told, content_type="application/json") if held else route.continue_()

    page.route(
        "**/api/runs/tiny/actions/*", lambda r: answer(r) if r.request.method == "GET" else r.continue_()
    )
    page.locator(".vt-row").first.click()
    page.get_by_role("button", name="Verify", exact=True).click()
    page.locator("dialog[open] .df .primary").click()
    page.wait_for_selector(f"dialog[open] [role=status] >> text={why}")
    held.clear()
    page.wait_for_selector("dialog[open] .verdict >> text=every digest is right")


def test_a_run_is_rewound_forked_and_exported_as_the_commands_do_it(job: Job, tmp_path: Path) -> None:
    there = job.copied(tmp_path / "runs")
    asking, rows = client(tmp_path / "runs"), there.run.list_points()
    first, last = (row["name"] for row in rows if row["on_lineage"] and row["step"] in (4, 12))
    orphan = next(row["name"] for row in rows if not row["on_lineage"])

    exported = confirmed(asking, "tiny", "export", point=last)
    assert exported.state == "done", exported.text
    assert (tmp_path / "runs" / "exports" / f"tiny-{last}" / "model.safetensors").is_file()

    forked = confirmed(asking, "tiny", "fork", point=orphan, new_run="other")
    assert forked.state == "done", forked.text
    names = [each["name"] for each in asking.get("/api/runs").json()["runs"]]
    assert {"other", "tiny"} <= set(names)
    views = ("", "/timeline", "/points", "/attempts", "/goodput", "/sources", "/events", "/series", "/plan")
    for view in views:
        answer = asking.get(f"/api/runs/other{view}")
        assert answer.status_code == 200, (view, answer.text)
    rows = asking.get("/api/runs/tiny/attempts?routine=1").json()["rows"]
    assert [(fork["run"], fork["point"]) for row in rows for fork in row["forks"]] == [("other", orphan)]
    (row,) = asking.get("/api/runs/other/attempts").json()["rows"]
    assert (row["forked_from"]["run"], row["forked_from"]["is_here"]) == ("tiny", True)

    assert asking.post("/api/runs/tiny/actions/rewind/plan", json={"point": orphan}).json()["refusals"]
    rewound = confirmed(asking, "tiny", "rewind", point=first)
    assert rewound.state == "done", rewound.text
    assert there.run.status(0).attempt == 4
    assert asking.get("/api/runs/tiny").json()["point"]["name"] == first


def test_the_plan_of_a_run_without_a_resume_point_is_a_start(
    opened: Open, storage: Path, tiny_config: Callable[..., dict[str, Any]]
) -> None:
    TrainedRun(tiny_config({"run.storage": str(storage), "run.name": "fresh"})).attempt(2)
    planned = Planner(Runs(Storage(str(storage))).open("fresh")).document(WhatIf(point=None, values={}))
    assert (planned["action"], planned["point"], planned["step_before"]) == ("start", None, None)
    page = opened().open("/run/fresh/plan")
    page.wait_for_selector(".becomes")
    said = page.inner_text(".plancol")
    assert "start from the beginning" in said
    assert not re.search(r"null|undefined|NaN|step –|resume from", said)
    page = opened().open("/")
    page.wait_for_selector("table.runs tbody tr >> text=fresh")
    assert not re.search(r"null|undefined|NaN", page.inner_text("table.runs"))
