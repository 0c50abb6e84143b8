"""The first and the last lines of a run."""

from tests.run_configs import tiny_config
from training.report.opening import first_line, next_commands, opening, sample_lines, short


def test_a_run_begins_with_what_it_is(tmp_path):
    config = tiny_config(str(tmp_path), parallel__tensor=2)
    folder = f"{tmp_path}/run"
    assert first_line(config) == (
        f"test in {folder}: Ctrl-C or `touch {folder}/STOP` saves and stops"
    )
    model, rules = opening(config, 4)
    assert model == (
        "llama of 78.1k parameters, on 4 ranks (data 2, tensor 2); 20 steps of 256 tokens, "
        "5.12k in all"
    )
    assert rules == (
        "spectral_sphere at 0.02 for matrices; adamw at 0.003 for embedding, head, gains"
    )


def test_it_ends_with_what_to_do_next(tmp_path):
    plot, *rest = next_commands(tiny_config(str(tmp_path)))
    assert plot == f"python scripts/plot.py {tmp_path}/run --html" and rest == []
    saved = list(next_commands(tiny_config(str(tmp_path), checkpoint__interval=5)))
    assert [command.split()[1] for command in saved] == [
        "scripts/plot.py", "scripts/generate.py", "scripts/convert_hf.py"
    ]  # fmt: skip


def test_a_sample_is_a_line():
    metrics = {"sample/web/prompt": "In the\nbeginning", "sample/web/text": " was\n\nthe word" * 50}
    (line,) = sample_lines(metrics)
    assert line.startswith("sample web: ...In the beginning | was the word") and len(line) < 240


def test_counts_are_short():
    assert [short(n) for n in (12, 1840, 1.84e6, 7e9, 1.5e13)] == [
        "12", "1.84k", "1.84M", "7B", "15T"
    ]  # fmt: skip
