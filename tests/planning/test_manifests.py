"""Which list of files each epoch of a source reads, through any row of resumes, rewinds, sources that come
and go, restarts and refreshes.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from orchestrator.json_form import decode, encode
from orchestrator.planning.resume import source_lists
from orchestrator.planning.resume.source_lists import (
    ListSpan,
    SourceLists,
    SourceRequest,
    first_sources,
    moved,
    next_sources,
)
from orchestrator.records.cursor import Cursor, SourceCursor

Next = Callable[..., tuple[SourceLists, ...]]


def at(**epochs: int) -> Cursor:
    places = {name: SourceCursor(epoch=epoch, block=2, documents=9) for name, epoch in epochs.items()}
    return Cursor(consumed_samples=1, consumed_tokens=9, target_tokens=9, sources=places)


def versions(source: SourceLists, num: int = 6) -> list[str]:
    return [source.version(epoch) for epoch in range(num)]


def test_a_run_reads_its_first_lists_and_numbers_its_sources_in_order() -> None:
    web, code = first_sources(SourceRequest(names=("web", "code")))
    assert (web.number, code.number) == (0, 1)
    assert versions(web) == [""] * 6


def test_refresh_gives_every_later_epoch_a_list_of_its_own() -> None:
    (web,) = first_sources(SourceRequest(names=("web",), refresh=frozenset({"web"})))
    assert versions(web) == ["", "0e1", "0e2", "0e3", "0e4", "0e5"]


def test_refresh_begins_after_the_epoch_at_hand_and_its_end_keeps_the_newest_list() -> None:
    sources = first_sources(SourceRequest(names=("web",)))
    on, off = SourceRequest(names=("web",), refresh=frozenset({"web"})), SourceRequest(names=("web",))
    (web,) = sources = next_sources(sources, at(web=1), on, {})
    assert versions(web) == ["", "", "0e2", "0e3", "0e4", "0e5"]
    (web,) = next_sources(sources, at(web=3), off, {})
    assert versions(web) == ["", "", "0e2", "0e3", "0e3", "0e3"]
    (web,) = next_sources(sources, at(web=1), off, {})
    assert versions(web) == [""] * 6, "back before it began"


def test_a_restarted_source_goes_on_at_the_next_epochs_first_document() -> None:
    parent = first_sources(SourceRequest(names=("web", "code")))
    wanted = SourceRequest(names=("web", "code"), restart=frozenset({"web"}))
    web, code = sources = next_sources(parent, at(web=2, code=1), wanted, {"web": 4})
    assert versions(web) == ["", "", "", "4", "4", "4"]
    assert code == parent[1]
    cursor = moved(sources, at(web=2, code=1))
    assert cursor.sources["web"] == SourceCursor(epoch=3, documents=9)
    assert cursor.sources["code"] == at(code=1).sources["code"]
    assert moved(sources, cursor) == cursor
    assert [web.epochs_before(epoch) for epoch in range(6)] == [0, 1, 2, 0, 1, 2]


def test_a_source_that_comes_back_goes_on_and_keeps_its_number() -> None:
    parent = first_sources(SourceRequest(names=("web", "code")))
    without = next_sources(parent, at(web=2, code=1), SourceRequest(names=("code", "math")), {})
    assert [(s.name, s.number, s.active) for s in without] == [
        ("web", 0, False),
        ("code", 1, True),
        ("math", 2, True),
    ]
    back = next_sources(without, at(web=2, code=3), SourceRequest(names=("math", "web", "code")), {})
    assert [replace(s, active=True) for s in without] == list(back)


def test_a_source_whose_name_another_lineage_used_does_not_take_its_list() -> None:
    parent = first_sources(SourceRequest(names=("web",)))
    _, math = next_sources(parent, at(web=1), SourceRequest(names=("web", "math")), {"math": 1})
    assert versions(math, 2) == ["1", "1"]


def test_sources_survive_their_json() -> None:
    parent = first_sources(SourceRequest(names=("web",), refresh=frozenset({"web"})))
    sources = next_sources(
        parent, at(web=2), SourceRequest(names=("web", "b"), restart=frozenset({"web"})), {}
    )
    assert tuple(decode(SourceLists, encode(source)) for source in sources) == sources


# ------------------------------------------------------------------------------ any row of resumes
@dataclass(frozen=True, kw_only=True)
class Point:
    """A place of a lineage: what was planned there, and (version, epoch) of all that was read before."""

    sources: tuple[SourceLists, ...]
    cursor: Cursor
    wanted: SourceRequest
    read: dict[str, tuple[tuple[str, int], ...]]


def walk(seed: int, num: int, following: Next) -> None:
    """Trains, resumes at any point so far and changes the job, and asserts what must hold."""
    chance = random.Random(seed)
    wanted = SourceRequest(names=("a", "b"))
    sources = first_sources(wanted)
    points = [Point(sources=sources, cursor=Cursor(), wanted=wanted, read={})]
    in_storage = {name: {0} for name in wanted.names}  # the starts of which there is a list
    for _ in range(num):
        parent = chance.choice(points[-4:])
        names = tuple(n for n in "abcd" if chance.random() < 0.7) or ("a",)
        refresh = frozenset(n for n in names if chance.random() < 0.4)
        restart = frozenset(n for n in names if chance.random() < 0.2)
        same = chance.random() < 0.4
        wanted = replace(parent.wanted, restart=frozenset()) if same else SourceRequest(names=names)
        wanted = wanted if same else replace(wanted, refresh=refresh, restart=restart)
        free = {name: max(starts) + 1 for name, starts in in_storage.items()}
        sources = following(parent.sources, parent.cursor, wanted, free)
        check(parent, wanted, sources, in_storage, same)
        for source in sources:
            in_storage.setdefault(source.name, set()).update(span.start for span in source.spans)
        points.append(train(chance, sources, wanted, parent))


def check(
    parent: Point,
    wanted: SourceRequest,
    sources: tuple[SourceLists, ...],
    in_storage: dict[str, set[int]],
    same: bool,
) -> None:
    before, now = {s.name: s for s in parent.sources}, {s.name: s for s in sources}
    if same:
        assert [versions(s, 40) for s in sources] == [versions(s, 40) for s in parent.sources]
    assert {s.name for s in sources if s.active} == set(wanted.names)
    assert len({s.number for s in sources}) == len(sources)
    cursor = moved(sources, parent.cursor)
    for name, old in before.items():
        assert name in now, "a source and its number were forgotten"
        new, place = now[name], parent.cursor.sources.get(name)
        assert new.number == old.number, "a number changed on the lineage"
        if place is not None:
            begun = place.epoch + 1
            assert versions(new, begun) == versions(old, begun), "an epoch that has begun has another list"
        if name in wanted.restart:
            begin = cursor.sources[name].epoch if name in cursor.sources else 0
            assert new.span(begin).start not in in_storage.get(name, set()), "its list is not new"
            assert new.epochs_before(begin) == 0
            assert place is None or cursor.sources[name].epoch > place.epoch, "places come twice"
        else:
            assert cursor.sources.get(name) == place, "a source was moved that was not restarted"


def train(
    chance: random.Random, sources: tuple[SourceLists, ...], wanted: SourceRequest, parent: Point
) -> Point:
    cursor, read = moved(sources, parent.cursor), dict(parent.read)
    places = dict(cursor.sources)
    for source in sources:
        if not source.active or chance.random() < 0.3:
            continue
        start = places.get(source.name, SourceCursor())
        stop = start.epoch + chance.randrange(3)
        new = tuple((source.version(epoch), epoch) for epoch in range(start.epoch, stop + 1))
        if source.name in wanted.refresh:
            assert len({version for version, _ in new[1:]}) == len(new[1:]), "an epoch was not refreshed"
        known = dict((epoch, version) for version, epoch in read.get(source.name, ()))
        for version, epoch in new:
            assert known.setdefault(epoch, version) == version, "one epoch was read by two lists"
        read[source.name] = tuple((version, epoch) for epoch, version in known.items())
        places[source.name] = SourceCursor(epoch=stop, block=chance.randrange(3), documents=1)
    return Point(sources=sources, cursor=replace(cursor, sources=places), wanted=wanted, read=read)


def test_any_row_of_resumes_reads_each_epoch_by_one_list() -> None:
    for seed in range(400):
        walk(seed, 12, next_sources)


def numbered_by_the_configuration(parent, cursor, wanted, free):  # type: ignore[no-untyped-def]
    found = next_sources(parent, cursor, wanted, free)
    order = {name: i for i, name in enumerate(wanted.names)}
    return tuple(replace(s, number=order.get(s.name, 9 + s.number)) for s in found)


def restarted_in_the_epoch_at_hand(parent, cursor, wanted, free):  # type: ignore[no-untyped-def]
    def earlier(span: ListSpan) -> ListSpan:
        return replace(span, begin=max(0, span.begin - 1)) if span.start else span

    found = next_sources(parent, cursor, wanted, free)
    return tuple(replace(s, spans=tuple(map(earlier, s.spans))) for s in found)


def lists_taken_from_another_lineage(parent, cursor, wanted, free):  # type: ignore[no-untyped-def]
    del free
    return next_sources(parent, cursor, wanted, {})


def sources_forgotten_that_are_taken_away(parent, cursor, wanted, free):  # type: ignore[no-untyped-def]
    kept = tuple(s for s in parent if s.name in wanted.names)
    return next_sources(kept, cursor, wanted, free)


def refresh_that_takes_the_epoch_at_hand(parent, cursor, wanted, free):  # type: ignore[no-untyped-def]
    sooner = {n: replace(c, epoch=c.epoch - 1) for n, c in cursor.sources.items() if c.epoch}
    return next_sources(parent, replace(cursor, sources={**cursor.sources, **sooner}), wanted, free)


@pytest.mark.parametrize(
    "broken",
    [
        numbered_by_the_configuration,
        restarted_in_the_epoch_at_hand,
        lists_taken_from_another_lineage,
        sources_forgotten_that_are_taken_away,
        refresh_that_takes_the_epoch_at_hand,
    ],
)
def test_the_search_catches(broken: Next) -> None:
    def search() -> None:
        for seed in range(400):
            walk(seed, 12, broken)

    with pytest.raises(AssertionError):
        search()


def test_the_version_of_the_first_list_is_no_name() -> None:
    assert source_lists.FIRST == ListSpan(begin=0).version(0) == ""
