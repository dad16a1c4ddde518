"""The benchmark: correct results, correct figures, and a wrong result that is found."""

import contextlib
import json
import sys
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from allgrad._wire.algorithms import TABLE
from allgrad.cli.bench import command, measure, run, show
from allgrad.cli.bench.baselines import Implementation, baseline_of, implementations_of
from allgrad.cli.bench.cases import Case, cases, expected, inputs_and_gradients
from allgrad.cli.bench.measure import PeakMemory, Times
from allgrad.cli.bench.run import Measured, Spread, Summary
from allgrad.cli.main import app
from allgrad.errors import InputError
from allgrad.testing import run_ranks

ALL = [
    replace(case, tensors=min(case.tensors, 10))
    for case in cases([3], [8192], ["all_gather", "reduce_scatter", "all_reduce", "broadcast"])
]


def name_of(case):
    return f"{case.title}, {case.nbytes}"


@pytest.mark.parametrize("case", [*ALL, Case("all_to_all", 4, 8192)], ids=name_of)
def test_every_implementation_is_checked(case):
    by_rank = run_ranks(measure.measure_time, case.world, case, 2, 1)
    for times in by_rank:
        assert baseline_of(case) in times
        for name, timed in times.items():
            assert timed.wrong == ("gradient" if name == "pad, gather, select" else "")
            assert len(timed.forward) == len(timed.both) == 2
            assert min(timed.forward) > 0 < min(timed.both)


def with_one_implementation(forward):
    """Time an implementation of the test's own instead of allgrad's."""
    real = measure.implementations_of
    measure.implementations_of = lambda *_, **__: {"allgrad": Implementation(forward)}
    try:
        return measure.measure_time(Case("all_reduce", 2, 4096), 2, 1)
    finally:
        measure.implementations_of = real


def test_every_algorithm_of_the_table_can_be_measured():
    case = Case("all_to_all", 3, 6144)
    times = run_ranks(measure.measure_time, 3, case, 2, 1, ["nn"], True)[0]
    by_algorithm = [f"allgrad, {entry.name}" for entry in TABLE["all_to_all"]]
    assert list(times) == ["allgrad", "raw", "nn", *by_algorithm]
    assert not any(timed.wrong for timed in times.values())


def test_a_wrong_result_is_found():
    own = run_ranks(with_one_implementation, 2, lambda xs: [x + 0 for x in xs])
    assert [times["allgrad"].wrong for times in own] == ["values", "values"]
    quiet = run_ranks(with_one_implementation, 2, lambda xs: [2 * x - x + right(x) for x in xs])
    assert [times["allgrad"].wrong for times in quiet] == ["gradient", "gradient"]


def right(x):
    import allgrad as ag

    return ag.all_reduce(x.detach(), grad="none") - x.detach()


def test_expected_results_agree_with_autograd():
    for case in (Case("all_gather", 3, 8192, skewed=True), Case("all_reduce", 3, 8192)):
        pieces = [inputs_and_gradients(case, rank) for rank in range(3)]
        xs = [x[0].requires_grad_() for x, _ in pieces]
        joined = torch.cat(xs) if case.skewed else sum(xs)
        gradients = torch.autograd.grad(sum((joined * g[0]).sum() for _, g in pieces), xs)
        for rank in range(3):
            (y,), (g,) = expected(case, rank)
            assert torch.equal(y, joined.detach())
            assert torch.equal(g, gradients[rank])
    assert Case("all_gather", 4, 8192, skewed=True).rows == (4, 4, 4, 32)


def test_a_sample_is_the_slowest_rank():
    fast, slow = Times("", [1.0, 5.0, 1.0], [2.0] * 3), Times("", [3.0, 1.0, 3.0], [9.0] * 3)
    summary = run._slowest([fast, replace(slow, wrong="values")])
    assert summary.forward == Spread(3.0, 3.0, 4.0)
    assert summary.both.median == 9.0
    assert summary.wrong == "values"


def made_up(wrong=""):
    ours = Summary(
        "", Spread(0.5, 0.4, 0.6), Spread(1.0, 0.9, 1.1), PeakMemory(2**20, 2**20, 3 << 20)
    )
    raw = Summary(
        wrong, Spread(1.0, 0.9, 1.1), Spread(4.0, 3.9, 4.1), PeakMemory(2**20, 2**21, 2**22)
    )
    return Measured(Case("all_gather", 2, 4096), "raw", {"allgrad": ours, "raw": raw})


def printed(measured):
    console = Console(width=100, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    for table in show.tables(measured):
        console.print(table)
    return console.export_text()


def test_tables_show_ratios_and_what_is_wrong():
    text = printed([made_up()])
    assert "0.50" in text
    assert "0.25" in text
    assert "raw*" in text
    assert "3  3.00" in text
    assert "wrong" not in text
    assert printed([made_up("gradient")]).count("wrong gradient") == 1  # its forward was right
    assert printed([made_up("values")]).count("wrong values") == 2


def test_files_hold_all_figures(tmp_path):
    show.write_json(tmp_path / "a.json", run.machine(), [made_up("gradient")])
    written = json.loads((tmp_path / "a.json").read_text())
    assert written["torch"] == torch.__version__
    (case,) = written["cases"]
    assert (case["operation"], case["world"], case["nbytes"]) == ("all_gather", 2, 4096)
    assert case["implementations"]["raw"]["wrong"] == "gradient"
    assert case["implementations"]["allgrad"]["both"] == {"median": 1.0, "low": 0.9, "high": 1.1}
    pytest.importorskip("matplotlib")
    show.draw(tmp_path / "a.png", [made_up("gradient")])
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    show.draw(tmp_path / "a", [made_up("gradient")])
    assert (tmp_path / "a").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("suffix", ["", ".png", ".PNG", ".svg", ".pdf", ".jpg"])
def test_a_file_that_is_not_refused_can_be_drawn(tmp_path, suffix):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"run{suffix}"
    command.require_drawable(path)
    assert not path.exists()
    show.draw(path, [made_up()])
    assert path.stat().st_size > 1000


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(command, "measure", lambda *_, **__: pytest.fail("measured"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = CliRunner().invoke(app, ["bench", "--png", str(tmp_path / "run.png")])
    assert done.exit_code == 2
    assert "pip install 'allgrad[cli]'" in " ".join(done.output.replace("│", " ").split())


def test_sizes_are_read_as_people_write_them():
    assert [show.parse_bytes(s) for s in ("4KiB", "64 mib", "4096")] == [4096, 2**26, 4096]
    assert [show.format_bytes(n) for n in (4, 4096, 2**26, 2050)] == [
        *("1 element", "4 KiB", "64 MiB", "2050 B")
    ]
    for bad in ("4KB", "", "-4KiB", "1000", "0"):
        with pytest.raises(InputError, match="not a size"):
            show.parse_bytes(bad)
    with pytest.raises(InputError, match="not numbers of ranks"):
        command.choose("1", "4KiB", "all_gather")
    with pytest.raises(InputError, match="no gossip"):
        command.choose("2", "4KiB", "all_gather,gossip")


@pytest.mark.skipif(
    not run.can_measure_memory(), reason="this system does not report the memory of a process"
)
def test_memory_is_measured_in_new_processes():
    case = Case("all_reduce", 1, 2**24)
    peak = run._peak_memory(case, "raw")
    assert peak.result == 2**24
    assert 0.9 < peak.forward / peak.result < 1.5
    assert 1.8 < peak.both / peak.result < 2.6


def test_the_command_measures(tmp_path):
    words = ["--ranks", "2", "--sizes", "4KiB", "--only", "broadcast", "--repeats", "2"]
    out = tmp_path / "out.json"
    done = CliRunner().invoke(app, ["bench", *words, "--no-memory", "--json", str(out)])
    assert done.exit_code == 0, done.output
    assert "forward + backward, 2 ranks" in " ".join(done.output.split())
    assert "linear by hand" in done.output
    assert len(json.loads(out.read_text())["cases"]) == 1


def test_names_of_the_user_are_shown_as_they_are(monkeypatch, capsys):
    """Square brackets are no markup of rich, and colons no emoji."""
    about = {"torch": "2", "link": "[/b] 200mbit[red] :x:"}
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(run, "machine", lambda _: about)
    monkeypatch.setattr(run, "run", lambda *_, **__: iter([made_up()]))
    assert command.measure([], None, False, json=None, png=None)
    assert "link [/b] 200mbit[red] :x:. Medians, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--json", "nowhere/run.json"), "There is no directory nowhere"),
        (("--png", "nowhere/run.png"), "There is no directory nowhere"),
        (("--calibrate", "nowhere/links.json"), "There is no directory nowhere"),
        (("--json", "."), ". is a directory"),
        (("--png", "run.xyz"), "run.xyz cannot be drawn: its name ends in none of"),
        (("--png", "run.png.gz"), "Name a file such as run.png"),
        (("--png", "[b] run[red].xyz"), "[b] run[red].xyz cannot be drawn"),
        (("--only", "[/b] [red]"), "There is no [/b] [red] to measure"),
        (("--peers", "nn,deepspeed"), "There is no deepspeed beside allgrad"),
        (("--hosts", "2", "--ranks", "4"), "--ranks-per-host"),
        (("--quick", "--ranks", "1"), "numbers of ranks"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_bad_input_is_refused_before_anything_is_measured(monkeypatch, words, said):
    monkeypatch.setattr(command, "measure", lambda *_, **__: pytest.fail("measured"))
    done = CliRunner().invoke(app, ["bench", *words])
    assert done.exit_code == 2
    assert said in " ".join(done.output.replace("│", " ").split())


def test_quick_leaves_what_is_given_and_peers_may_have_commas(monkeypatch):
    seen = {}

    def measured(chosen, repeats, memory, *, peers, **_):
        seen.update(worlds={case.world for case in chosen}, repeats=repeats, memory=memory)
        seen.update(peers=peers)
        return True

    monkeypatch.setattr(command, "measure", measured)
    words = ["--quick", "--ranks", "3", "--peers", "raw, one by one"]
    assert CliRunner().invoke(app, ["bench", *words]).exit_code == 0
    assert seen["worlds"] == {3}
    assert (seen["repeats"], seen["memory"]) == (9, False)
    many = replace(Case("all_reduce", 3, 8192), tensors=10)
    kept = implementations_of(many, 0, seen["peers"])
    assert [name for name in kept if not name.startswith("allgrad")] == [
        "raw, one by one",
        "raw, flattened by hand",
    ]


def test_hosts_are_asked_for_where_they_can_be_made(monkeypatch):
    monkeypatch.setattr(command, "why_no_hosts", lambda: "only root may make network namespaces")
    found = CliRunner().invoke(app, ["bench", "--hosts", "2"])
    assert found.exit_code == 2
    assert "only root" in found.output


def test_ranks_are_those_of_the_hosts(monkeypatch):
    seen = {}

    def measured(chosen, *_, hosts, **__):
        seen.update(worlds={case.world for case in chosen}, hosts=hosts)
        return True

    class Made(contextlib.nullcontext):
        def __init__(self, hosts, *, ranks_per_host, rate):
            super().__init__((hosts, ranks_per_host, rate))

    monkeypatch.setattr(command, "why_no_hosts", lambda: "")
    monkeypatch.setattr(command, "Hosts", Made)
    monkeypatch.setattr(command, "measure", measured)
    options = ["--hosts", "2", "--ranks-per-host", "3", "--link", "200mbit"]
    assert CliRunner().invoke(app, ["bench", *options]).exit_code == 0
    assert seen == {"worlds": {6}, "hosts": (2, 3, "200mbit")}
