"""A card is declared once: the route, the panel of the page and the DataFrame follow from it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import orchestrator
from orchestrator.errors import RefusedError
from orchestrator.inspect.views import cards
from orchestrator.inspect.views.cards import CARDS, CardError, all_cards
from tests.inspect.dashboard.serving import Served, served
from tests.raising import raises

PACKAGE = '''
from orchestrator.inspect.views.cards import Card, Column


def rows(facts, now):
    return [{"what": "attempts", "times": len(facts.files.claims)}]


COUNTS = Card(
    name="counts",
    title="What was counted",
    columns=(
        Column(name="what", label="What", kind="text", meaning="was counted"),
        Column(name="times", label="Times", kind="number", meaning="that it occurs"),
    ),
    rows=rows,
)
TWICE = Card(name="groups", title="Again", columns=(), rows=rows)
SMELL = Column(name="a", label="A", kind="smell", meaning="")
ODD = Card(name="odd", title="Odd", columns=(SMELL,), rows=rows)
NONE = 7
A = Column(name="a", label="A", kind="text", meaning="")
PAIR = Card(name="pair", title="Pair", columns=(A, A), rows=rows)
SLASH = Card(name="a/b", title="Slash", columns=(), rows=rows)
'''


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An installed package; the file returned has its entry points."""
    folder = tmp_path / "installed"
    about = folder / "counting-1.0.dist-info"
    about.mkdir(parents=True)
    (folder / "counting.py").write_text(PACKAGE)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: counting\nVersion: 1.0\n")
    monkeypatch.syspath_prepend(str(folder))
    all_cards.cache_clear()
    yield about / "entry_points.txt"
    sys.modules.pop("counting", None)
    all_cards.cache_clear()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return served(tmp_path_factory.mktemp("cards"))


@pytest.fixture(autouse=True)
def no_others(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Cards that this machine has installed are left out, but for those of `package`."""
    real = cards.entry_points
    monkeypatch.setattr(
        cards, "entry_points", lambda group: [e for e in real(group=group) if e.value.startswith("counting:")]
    )
    all_cards.cache_clear()
    yield
    all_cards.cache_clear()


def test_every_card_is_a_route_and_a_data_frame_of_the_same_rows(run: Served) -> None:
    opened = orchestrator.open(run.storage / "made")
    for card in CARDS:
        document = run.get(f"/cards/{card.name}")
        assert [column["name"] for column in document["columns"]] == [column.name for column in card.columns]
        frame = opened.card(card.name)
        assert list(frame.columns) == [column.name for column in card.columns]
        assert len(frame) == len(document["rows"]) > 0
    listed = run.get("/cards")["cards"]
    assert [card["name"] for card in listed] == [card.name for card in CARDS]
    assert {*opened.card()["card"]} == {card.name for card in CARDS}


def test_the_groups_are_those_of_the_journal(run: Served) -> None:
    rows = run.get("/cards/groups")["rows"]
    starts = {(start.attempt, start.generation): start for start in survey_of(run)}
    assert [(row["attempt"], row["generation"]) for row in rows] == sorted(starts, reverse=True)
    for row in rows:
        start = starts[row["attempt"], row["generation"]]
        assert (row["workers"], row["seq_len"]) == (start.world_size, start.seq_len)
        assert row["lasted_s"] is None or row["lasted_s"] >= 0
    assert sum(row["steps"] for row in rows) >= 120


def survey_of(run: Served):  # type: ignore[no-untyped-def]
    from orchestrator.history.journal.journal_reader import read_journal

    return read_journal(run.made.store.storage).generations


def test_an_unknown_card_is_refused_with_the_names_of_all(run: Served) -> None:
    answer = run.client.get("/api/runs/made/cards/nothing")
    assert answer.status_code == 404
    assert "groups" in answer.json()["error"]["text"]
    with raises(RefusedError, "card.unknown", "nothing", "groups"):
        orchestrator.open(run.storage / "made").card("nothing")


def test_an_installed_package_adds_a_card(package: Path, run: Served) -> None:
    package.write_text("[orchestrator.cards]\ncounts = counting:COUNTS\n")
    assert run.get("/cards/counts")["rows"] == [{"what": "attempts", "times": 6}]
    assert orchestrator.open(run.storage / "made").card("counts")["times"].tolist() == [6]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NONE", "of type int"),
        ("TWICE", "another card of the name groups"),
        ("ODD", "its column a has the kind 'smell'"),
        ("PAIR", "two columns of one name: a, a"),
        ("SLASH", "its name is 'a/b'"),
        ("MISSING", "cannot be loaded"),
    ],
)
def test_what_is_no_card_is_named_with_its_entry_point_beside_the_others(
    package: Path, run: Served, name: str, value: str
) -> None:
    package.write_text(f"[orchestrator.cards]\nmine = counting:{name}\n")
    groups, mine = run.get("/cards")["cards"]
    assert (groups["name"], groups["error"], len(groups["rows"]) > 0) == ("groups", "", True)
    assert mine["title"] == f"mine (counting:{name})"
    assert value in mine["error"]


@pytest.mark.parametrize(
    ("row", "value"),
    [
        ('{"what": "a"}', "a row has the columns ['what'], declared are ['times', 'what']"),
        ('{"what": "a", "times": 1, "more": 2}', "['more', 'times', 'what']"),
        ('{"what": "a", "times": 1.5}', "times is 1.5, expected a whole number or None"),
        ('{"what": "a", "times": float("nan")}', "times is nan"),
        ('{"what": 7, "times": 1}', "what is 7, expected a text or None"),
        ("1 / 0", "ZeroDivisionError"),
        ("None", "AttributeError"),
    ],
)
def test_a_card_that_fails_says_so_in_its_own_panel(package: Path, run: Served, row: str, value: str) -> None:
    module = package.parent.parent / "counting.py"
    module.write_text(PACKAGE.replace("    return [", f"    yield {row}\n    return ["))
    package.write_text("[orchestrator.cards]\ncounts = counting:COUNTS\n")
    groups, counts = run.get("/cards")["cards"]
    assert len(groups["rows"]) > 0
    assert counts["rows"] == []
    assert "the card counts failed at row 1" in counts["error"]
    assert value in counts["error"]
    answer = run.client.get("/api/runs/made/cards/counts")
    assert answer.json()["error"]["code"] == "user_code.card_failed"
    with raises(CardError, "user_code.card_failed", value):
        orchestrator.open(run.storage / "made").card("counts")


def test_a_data_frame_has_the_types_of_the_columns_whatever_they_are_called(
    package: Path, run: Served
) -> None:
    module = package.parent.parent / "counting.py"
    text = PACKAGE.replace('name="what"', 'name="document"').replace('"what": "attempts"', '"document": None')
    module.write_text(text)
    package.write_text("[orchestrator.cards]\ncounts = counting:COUNTS\n")
    frame = orchestrator.open(run.storage / "made").card("counts")
    assert [str(kind) for kind in frame.dtypes] == ["object", "Int64"]
    groups = orchestrator.open(run.storage / "made").card("groups")
    assert str(groups["began"].dtype) == "datetime64[ns, UTC]"
    assert str(groups["lasted_s"].dtype) == "Float64"
