"""Tables on pages contain the figures from the committed files that the pages name."""

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from scripts.studies.tables import comparison, half_width, read_results, tokens_to_loss
from tests.paths import ROOT

Rows = list[list[str]]


def msign(content: dict[str, Any]) -> Rows:
    """Return the rows of the msign table: steps and dtype, errors, gains and |f|."""
    return [
        [
            f"{row['steps']}{' of `simple`' * (row['schedule'] == 'simple')}, {row['dtype']}",
            f"{row['error']:.3f}",
            f"{row['worst error']:.3f}",
            f"{row['least gain']:.3f} to {row['greatest gain']:.3f}",
            f"{row['largest |f|']:.1e}" if row["largest |f|"] else "0",
        ]
        for row in content["settings"]
    ]


RULES = {
    "muon": "Muon",
    "muon_sphere": "MuonSphere",
    "spectral_sphere": "SSO",
    "muon_plus_plus": "Muon++",
    "torch.optim muon": "torch.optim.Muon",
}


def steps(content: dict[str, Any]) -> Rows:
    """Return the milliseconds per step of each matrix rule, and the ratio to the time of Muon."""
    (rows,) = content["models"].values()
    spent = {row["optimizer"]: row["ms"] for row in rows}
    return [
        [name, f"{spent[rule]:.0f}", f"{spent[rule] / spent['muon']:.2f}"]
        for rule, name in RULES.items()
    ]


LIBRARIES = {
    "Muon": "`Muon`",
    "MuonSphere": "`MuonSphere`",
    "SpectralSphere": "`SpectralSphere`",
    "MuonPlusPlus": "`MuonPlusPlus`",
    "torch Muon": "torch.optim.Muon",
    "dion Muon": "dion's Muon",
    "KellerJordan Muon": "KellerJordan/Muon",
    "gram-newton-schulz Muon": "gram-newton-schulz's Muon, in float16",
}


def libraries(content: dict[str, Any]) -> Rows:
    """Return the milliseconds per step of each optimizer on each set of weights, with default
    settings and with equal settings."""
    rows = []
    for name, shown in LIBRARIES.items():
        spent = [
            found.get(side)
            for found in content["figures"].values()
            for side in (name, f"{name}, equal")
        ]
        rows.append([shown, *("" if ms is None else f"{ms:.0f}" for ms in spent)])
    return rows


SHARDED = {
    "Muon, equal": "`Muon`",
    "SpectralSphere, equal": "`SpectralSphere`",
    "dion Muon": "dion's Muon",
}


def sharded_libraries(content: dict[str, Any]) -> Rows:
    """Return the milliseconds per step and the megabytes sent by each optimizer on each set of
    sharded weights."""
    rows = []
    for name, shown in SHARDED.items():
        spent = [found[name] for found in content["figures"].values()]
        pairs = [(f"{each['ms']:.0f}", f"{each['bytes'] / 1e6:.1f}") for each in spent]
        rows.append([shown, *[cell for pair in pairs for cell in pair]])
    return rows


def pc_layers(content: dict[str, Any]) -> Rows:
    """Return the time of a step, and the bytes of master weights and state, relative to a run
    without PC layers."""
    sides = {"materialized": content, "in the graph": content["variants"]["pc.evaluator=in_graph"]}
    without = content["variants"]["pc=null"]

    def ratios(figures: dict[str, Any]) -> list[str]:
        step, other = (sum(each["phase_seconds"].values()) for each in (figures, without))
        memory = figures["optimizer_bytes"] / without["optimizer_bytes"]
        return [f"{step / other:.2f}", f"{memory:.2f}"]

    return [[name, *ratios(figures)] for name, figures in sides.items()]


TABLES: list[tuple[str, str, Callable[[dict[str, Any]], Rows]]] = [
    ("numerics.md", "msign.json", msign),
    ("library.md", "library.json", libraries),
    ("library.md", "library_two_ranks.json", sharded_libraries),
    ("performance.md", "pc_layers.json", pc_layers),
    ("performance.md", "optimizer_llama271m.json", steps),
]


def recorded(name: str) -> Any:
    """Read a file in benchmarks/results."""
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text())


@pytest.mark.parametrize(("page", "file", "rows"), TABLES, ids=[file for _, file, _ in TABLES])
def test_a_table_has_the_figures_of_its_file(page, file, rows) -> None:
    content = recorded(file)
    _, named, after = (ROOT / "docs" / page).read_text().partition(f"benchmarks/results/{file}")
    assert named
    lines = after[after.index("\n|") :].lstrip().split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    assert cells == rows(content)


def test_a_page_has_the_figures_of_its_rehearsal() -> None:
    text = (ROOT / "docs" / "planning.md").read_text()
    content = recorded("rehearsal_llama8b_1024.json")
    for name in ("forward_backward", "optimizer"):
        assert f" {content['phases'][name]['launches']:,} " in text
    assert f"{content['peak_memory_bytes'] / 2**30:.2f} of" in text


def test_a_page_has_what_was_measured_on_a_gpu_and_modelled_for_it() -> None:
    text = (ROOT / "docs" / "performance.md").read_text()
    for rule in ("muon", "sso"):
        content = recorded(f"h200/train_llama1b_{rule}.json")
        phases = {name: 1e3 * spent for name, spent in content["phase_seconds"].items()}
        cells = (
            f"{round(content['tokens_per_second'], -2):,.0f}", f"{content['mfu']:.1%}",
            f"{phases['forward'] + phases['backward']:,.0f} ms", f"{phases['optimizer']:,.0f} ms",
            f"{content['peak_memory_bytes'] / 2**30:.1f} GiB",
        )  # fmt: skip
        assert f"| {' | '.join(cells)} |" in text
        assert f"{1e3 * content['seconds_per_step']:,.0f}" in text
        modelled = recorded(f"h200/rehearsal_llama1b_{rule}.json")["modelled_seconds"]
        assert f"{1e3 * modelled:,.0f}" in text
    (rows,) = recorded("h200/optimizer_llama1b.json")["models"].values()
    shares = text.partition("| rule | ms |")[2].split("\n\n")[0].splitlines()[2:]
    found = [int(line.split(" | ")[1].strip(" |")) for line in shares]
    assert sorted(found) == sorted(round(row["ms"]) for row in rows)


def test_the_planned_cost_of_rules_is_that_of_full_runs() -> None:
    planned = json.loads((ROOT / "scripts" / "papers" / "gpu_hours.json").read_text())
    hours = {rule: planned[f"qwen3_1.7b_{rule}"]["gpu_hours"] for rule in ("adamw", "muon", "sso")}
    more = {f"{hours[rule] / hours['adamw'] - 1:.0%}" for rule in ("muon", "sso")}
    for page in ("planning.md", "performance.md"):
        text = " ".join((ROOT / "docs" / page).read_text().split())
        assert more == {"2%"} and "predicts 2% for both" in text


def known_figures() -> list[tuple[float, ...]]:
    """Return all figures that a page may quote from complete studies: for every variant and for the
    difference of any two variants with the same seeds, the mean with its standard error, and the
    mean with its interval. Figures for the first three seeds, and the number of tokens that AdamW
    needs with its interval, are included."""
    groups: dict[tuple[int, ...], list[list[float]]] = {}
    known: list[tuple[float, ...]] = []
    for path in (ROOT / "studies").rglob("results.json"):
        content = read_results(path)
        if not content["complete"]:
            continue
        rows = [row["losses"] for row in content["rows"] if None not in row["losses"]]
        for first in {3, len(content["seeds"])} if len(content["seeds"]) > 1 else ():
            seeds = tuple(content["seeds"][:first])
            groups.setdefault(seeds, []).extend(losses[:first] for losses in rows)
        if content["points"]:
            known += tokens_to_loss(content, comparison(content)).to_numpy()[:, 1:].tolist()
    for path in (ROOT / "benchmarks/results/papers").glob("*.json"):
        for row in json.loads(path.read_text()).values():
            if row.get("difference") is not None:
                difference = row["difference"]
                known += [(difference, row["low"], row["high"])]
                known += [(difference, row["difference_error"])]
    for seeds, losses in groups.items():
        table = np.array(losses)
        for each in (table, (table[:, None] - table[None]).reshape(-1, len(seeds))):
            mean, error = each.mean(1), each.std(1, ddof=1) / len(seeds) ** 0.5
            ends = [mean - half_width(len(seeds)) * error, mean + half_width(len(seeds)) * error]
            known += np.stack([mean, error], 1).tolist() + np.stack([mean, *ends], 1).tolist()
    return known


@pytest.mark.parametrize("page", ["results.md", "papers.md"])
def test_figures_with_errors_or_intervals_are_those_of_committed_studies(page: str) -> None:
    text, number = (ROOT / "docs" / page).read_text(), r"([+-]?\d\.\d{3,})"
    shown = re.findall(rf"{number} ± {number}", text)
    shown += re.findall(rf"{number},? \(?{number} to {number}", text)
    shown += re.findall(r"(\d\.\d\d) \((\d\.\d\d) to (\d\.\d\d)\)", text)
    known = known_figures()
    tables = {n: np.array([each for each in known if len(each) == n]) for n in (2, 3)}
    wrong = [
        each for each in shown
        if np.abs(tables[len(each)] - np.array(each, float)).max(1).min()
        > 0.501 * 10.0 ** -len(each[0].split(".")[1])
    ]  # fmt: skip
    assert len(shown) > 30 and not wrong
