"""A recording tells who was waited for, what differs and what hangs; as text, page and trace."""

import json
import os
import re
import struct
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from allgrad._wire.groups import Backend
from allgrad._wire.link_model import LOOPBACK, Links, predict, with_given
from allgrad._wire.recorder import CLOSED_AT, EVENT_BYTES, HEADER_BYTES, MAGIC
from allgrad._wire.situation import Situation
from allgrad.cli.main import app
from allgrad.errors import InputError
from allgrad.report.findings import find
from allgrad.report.load import load
from allgrad.report.model import Mismatch
from allgrad.report.text import text
from allgrad.report.trace import write_trace
from allgrad.testing import RankFailed, run_ranks
from report.programs import SLOW, STEPS, disagree, hang, leave, train

PROGRAMS = (Path(__file__).parent / "programs.py").read_text().splitlines()


@pytest.fixture(scope="module")
def slow_rank(tmp_path_factory):
    path = tmp_path_factory.mktemp("slow")
    run_ranks(train, 3, str(path))
    return path


@pytest.fixture(scope="module")
def hung(tmp_path_factory):
    path = tmp_path_factory.mktemp("hung")
    with pytest.raises(RankFailed):
        run_ranks(hang, 3, str(path))
    return path


def shown(found, width=120):
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
    console.print(text(found))
    return console.export_text()


@pytest.mark.parametrize("width", [50, 80])
def test_a_narrow_terminal_shows_names_of_calls_whole(slow_rank, width):
    told = shown(find(slow_rank), width)
    assert "…" not in told
    lines, _, slowest = told.partition("Lines of the program")[2].partition("The slowest calls")
    first = [line.split(" ")[0] for line in lines.split("\n")]
    assert first.count("all_reduce") == first.count("all_gather") == 2
    assert first.count("backward") == 2
    first = [line.split(" ")[0] for line in slowest.split("\n")]
    assert first.count("all_reduce") + first.count("all_gather") == 10


def test_the_text_is_not_cut_where_there_is_no_terminal(slow_rank):
    command = [sys.executable, "-m", "allgrad", "report", str(slow_rank)]
    env = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100, env=env)
    assert "…" not in done.stdout
    rows = [line.split() for line in done.stdout.split("\n")]
    where = next(row[2] for row in rows if row[:2] == ["all_reduce", "backward"])
    assert re.fullmatch(r"programs\.py:\d+", where)


def test_the_rank_that_all_waited_for_is_named(slow_rank):
    found = find(slow_rank)
    by_caused = sorted(found.ranks, key=lambda rank: -rank.caused)
    assert by_caused[0].rank == SLOW
    # Two ranks wait for 15 ms in every step, less where they are late themselves.
    assert by_caused[0].caused > STEPS * 12e6
    backward = [one for one in found.slowest if one.kind.backward]
    assert backward
    # On busy cores another rank is late now and then.
    waited_for = Counter(one.waited_for for one in backward if one.waited > 10e6)
    assert waited_for.most_common(1)[0][0] == SLOW
    assert found.ranks[SLOW].late >= STEPS - 2
    assert found.ranks[SLOW].lateness > 3e6
    assert not found.hangs
    assert not found.mismatches
    assert f"Rank {SLOW} is late in" in shown(found)


def test_bytes_sizes_and_algorithms_by_line(slow_rank):
    lines = {(line.name, line.backward): line for line in find(slow_rank).lines}
    gathered, scattered = lines["all_gather", False], lines["all_gather", True]
    for line in (gathered, scattered):
        assert line.calls == STEPS
        assert line.sizes == {0: 4000, 1: 4000, 2: 16000}
        assert line.skew == pytest.approx(2.0)
        assert Path(line.site).name.startswith("programs.py:")
        assert line.algorithms == {"star": 3 * STEPS}
    assert gathered.nbytes == STEPS * 24000
    assert scattered.nbytes == STEPS * 3 * 24000
    assert lines["all_reduce", False].skew == 1.0
    for line in lines.values():
        assert 0 < line.moving * 3 * STEPS <= line.in_calls
        assert line.members == (0, 1, 2)


def test_the_plan_is_set_beside_what_was_measured(slow_rank, tmp_path):
    lines = {(line.name, line.backward): line for line in find(slow_rank).lines}
    recorded = lines["all_gather", False]
    cores = load(slow_rank).ranks[0].header["cores"]
    links = with_given(LOOPBACK, cores=cores)
    expected = predict(Situation("all_gather", Backend.GLOO, True, 3, 16000, 24000, False), links)
    assert recorded.planned == (expected.algorithm, round(expected.seconds * 1e9))
    assert expected.algorithm in recorded.algorithms
    # Ten times slower links: all that moves takes longer.
    slower = with_given(links, latency=links.latency * 10, bandwidth=links.bandwidth / 10)
    slower.write(tmp_path / "links.json")
    again = find(slow_rank, Links.read(tmp_path / "links.json")).lines
    assert min(line.planned[1] for line in again) > 2 * expected.seconds * 1e9
    assert all(line.planned[1] for line in again)


def test_a_mismatch_is_shown_by_rank(tmp_path):
    assert run_ranks(disagree, 3, str(tmp_path)) == [True] * 3
    found = find(tmp_path)
    (mismatch,) = found.mismatches
    assert mismatch.number == 1
    assert mismatch.odd == [1]
    assert [words.partition(":")[0] for words in mismatch.by_rank.values()] == [
        "all_gather",
        "all_reduce",
        "all_gather",
    ]
    did = "rank 1: all_reduce of 12 bytes of float32 at programs.py:"
    assert any(f"; {did}" in sentence for _, sentence in found.headlines)


def test_a_hang_names_the_call_and_who_has_not_come(hung):
    found = find(hung)
    assert found.hangs
    assert [bool(one.ended) for one in found.last_calls] == [False, True, False]
    assert [one.state for one in found.last_calls] == ["gone"] * 3
    level, sentence = found.headlines[0]
    assert level == "bad"
    assert re.search(
        r"Ranks 0, 2 are in call 3 of group 0, all_gather at .*programs.py:\d+", sentence
    )
    assert "Rank 1 has not come: its last call was all_reduce at programs.py:" in sentence
    assert sentence.endswith("was killed or crashed.")
    assert "has not ended" in shown(found)


@pytest.mark.parametrize("said", [("bad batch",), ()], ids=["a message", "none"])
def test_the_error_that_ended_a_rank_is_named_with_its_line(tmp_path, said):
    with pytest.raises(RankFailed, match="RankLate"):
        run_ranks(leave, 3, str(tmp_path), *said)
    level, sentence = find(tmp_path).headlines[0]
    assert level == "bad"
    # The first call of a group counts from the moment its ranks look for each other.
    waited = (
        r"Ranks 0, 2 raised in call 0 of group \S+ \(ranks 0, 1, 2\), all_reduce at programs.py:"
    )
    assert re.match(waited + r"\d+: RankLate: ", sentence), sentence
    line = next(at for at, text in enumerate(PROGRAMS, 1) if "ValueError(*said)" in text)
    error = ": ".join(["ValueError", *said])
    assert f"Rank 1 has not come: {error} at programs.py:{line} ended it" in sentence


def test_an_empty_directory_is_named(tmp_path):
    with pytest.raises(InputError, match="There is no recording"):
        find(tmp_path)


DAMAGES = {
    "empty": lambda raw: raw[:0],
    "cut in the header": lambda raw: raw[:3000],
    "cut in the ring": lambda raw: raw[:100_000],
    "a broken table": lambda raw: raw + b'{"kind": 9, "na\n',
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named(slow_rank, tmp_path, damage):
    for file in slow_rank.glob("rank-*"):
        raw = file.read_bytes()
        (tmp_path / file.name).write_bytes(DAMAGES[damage](raw) if "1" in file.name else raw)
    with pytest.raises(InputError, match=r"rank-1\.allgrad is damaged or cut short"):
        find(tmp_path)
    (tmp_path / "rank-1.allgrad").rename(tmp_path / "rank-1 (damaged).allgrad")
    assert find(tmp_path).recording.notes == ["There is no file of rank 1."]


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "rank-0.allgrad").mkdir()
    with pytest.raises(InputError, match=r"rank-0\.allgrad cannot be read: Is a directory"):
        find(tmp_path)


def shifted(file, out, by, wall):
    """The same file as another host would have written it: another clock, set wrong by ``wall``."""
    raw = bytearray(file.read_bytes())
    header = json.loads(raw[len(MAGIC) : CLOSED_AT].rstrip(b"\0"))
    header |= {"boot": "elsewhere", "host": "elsewhere", "wall": header["wall"] + wall}
    header["monotonic"] += by
    words = MAGIC + json.dumps(header).encode()
    raw[:CLOSED_AT] = words + b"\0" * (CLOSED_AT - len(words))
    for at in range(HEADER_BYTES, HEADER_BYTES + header["calls"] * EVENT_BYTES, EVENT_BYTES):
        start, end, _, what = struct.unpack_from("=4Q", raw, at)
        if what:
            struct.pack_into("=2Q", raw, at, start + by, end + by)
    out.write_bytes(raw)


def test_clocks_of_hosts_are_aligned_by_their_calls(slow_rank, tmp_path):
    for rank in (0, 2):
        source = slow_rank / f"rank-{rank}.allgrad"
        (tmp_path / source.name).write_bytes(source.read_bytes())
    name = "rank-1.allgrad"
    shifted(slow_rank / name, tmp_path / name, by=10**12, wall=700 * 10**6)
    expected, found = find(slow_rank), find(tmp_path)
    assert "2 hosts" in found.recording.clocks
    true = expected.recording.rank(1).events
    aligned = found.recording.rank(1).events
    assert 0 < found.recording.precision < 20e6
    assert np.abs(aligned.start - true.start).max() <= found.recording.precision
    assert np.abs(aligned.end - true.end).max() <= found.recording.precision
    assert max(found.ranks, key=lambda rank: rank.caused).rank == SLOW


def test_the_trace_has_a_slice_for_each_call_and_arrows_between_ranks(slow_rank, hung, tmp_path):
    found = find(slow_rank)
    write_trace(found, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    by_phase = Counter(event["ph"] for event in events)
    assert by_phase["X"] == found.recording.total
    assert by_phase["s"] == by_phase["f"] > STEPS
    slices = [event for event in events if event["ph"] == "X"]
    arrows = {event["id"]: event for event in events if event["ph"] == "s"}
    for end in (event for event in events if event["ph"] == "f"):
        begin = arrows[end["id"]]
        assert begin["pid"] != end["pid"]
        for one in (begin, end):  # an arrow is bound to the slice that it lies in
            assert any(
                (s["pid"], s["tid"]) == (one["pid"], one["tid"])
                and s["ts"] <= one["ts"] <= s["ts"] + s["dur"]
                for s in slices
            )
    write_trace(find(hung), tmp_path / "hung.json")
    events = json.loads((tmp_path / "hung.json").read_text())["traceEvents"]
    assert sorted(e["pid"] for e in events if e["ph"] == "B") == [0, 2]


def test_the_command_writes_what_is_asked_for(slow_rank, tmp_path):
    page, trace = tmp_path / "report.html", tmp_path / "trace.json"
    command = [sys.executable, "-m", "allgrad", "report"]
    done = subprocess.run(
        [*command, str(slow_rank), "-o", str(page), "--trace", str(trace)],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert str(page) in done.stdout.replace("\n", "")
    html = page.read_text()
    assert "Content-Security-Policy" in html
    assert f"Rank {SLOW} is late in" in html
    assert not re.findall(r"(?:src|href)=\"(?!data:)", html)
    assert json.loads(trace.read_text())["traceEvents"]


def test_names_of_the_user_are_shown_as_they_are(slow_rank, tmp_path):
    """Square brackets are no markup of rich, and colons no emoji."""
    (tmp_path / "[").mkdir()
    page, trace = (tmp_path / f"[/b] :x: run[red].{ending}" for ending in ("html", "json"))
    words = ["report", str(slow_rank), "-o", str(page), "--trace", str(trace)]
    done = CliRunner().invoke(app, words, env={"COLUMNS": "400"})
    assert done.exit_code == 0, done.output
    assert str(page) in done.output
    assert str(trace) in done.output
    found = find(slow_rank)
    site, group = "[b] train[red] :x:.py:7", "group [dp][/b]"
    kind = found.slowest[0].kind._replace(site=site)
    found.slowest[0] = replace(found.slowest[0], kind=kind)
    found.lines[0].site = site
    found.last_calls[0] = replace(found.last_calls[0], kind=kind)
    found.hangs = True
    found.mismatches = [Mismatch(group, 3, {0: site, 1: 60 * "x"}, {}, [1], 0)]
    found.ranks[0].host = "[i]node[/i]"
    told = shown(found)
    assert told.count(site) == 4
    assert f"Call 3 of {group}: what" in told
    assert "[i]node[/i]" in told


EVENT = np.dtype([(name, np.uint64) for name in ("start", "end", "bytes", "what")])


def enlarge(file, out, calls):
    """The same recording with so many calls: the first thousands of it again and again."""
    raw = file.read_bytes()
    header = json.loads(raw[len(MAGIC) : CLOSED_AT].rstrip(b"\0"))
    ring = np.frombuffer(raw, EVENT, header["calls"], HEADER_BYTES)
    own = ring[ring["what"] > 0]
    events = np.tile(own, calls // len(own) + 1)[:calls]
    span = int(own["end"].max() - own["start"].min()) + 10**6
    later = np.arange(calls) // len(own) * span
    events["start"] += later.astype(np.uint64)
    events["end"] += later.astype(np.uint64)
    events["what"] = events["what"] >> 32 << 32 | np.arange(calls, dtype=np.uint64)
    table = raw[HEADER_BYTES + header["calls"] * EVENT.itemsize :]
    words = MAGIC + json.dumps(header | {"calls": calls}).encode()
    closed = raw[CLOSED_AT:HEADER_BYTES]
    out.write_bytes(words.ljust(CLOSED_AT, b"\0") + closed + events.tobytes() + table)
    return out.stat().st_size


@pytest.mark.skipif(not os.environ.get("ALLGRAD_ALL"), reason="takes a minute: ALLGRAD_ALL=1")
@pytest.mark.timeout(300)
def test_a_million_calls_take_seconds_and_a_small_page(slow_rank, tmp_path):
    recorded = tmp_path / "recorded"
    recorded.mkdir()
    for file in sorted(slow_rank.glob("rank-*")):
        assert enlarge(file, recorded / file.name, 1_000_000) <= 40 * 1_000_000
    page, out = tmp_path / "report.html", tmp_path / "time"
    command = [sys.executable, "-m", "allgrad", "report", str(recorded), "-o", str(page)]
    measure = "import resource, subprocess, sys; subprocess.run(sys.argv[2:], check=True); "
    measure += "used = resource.getrusage(resource.RUSAGE_CHILDREN); "
    measure += "open(sys.argv[1], 'w').write(f'{used.ru_maxrss / 1024} {used.ru_utime}')"
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", measure, str(out), *command], check=True, timeout=200)
    took = time.monotonic() - began
    memory, processor = map(float, out.read_text().split())
    figures = f"{took:.1f} s ({processor:.1f} s of processor), {memory:.0f} MiB"
    assert min(took, processor) < 20, figures
    assert memory < 500, figures
    assert page.stat().st_size < 10e6
    assert json.loads(re.search(r'"shown":(\[.*?\])', page.read_text())[1])[1] == 3_000_000
    assert load(recorded).total == 3_000_000
