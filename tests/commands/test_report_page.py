"""The page of a run: what it shows, that all text is escaped, that it fits a phone, and that it follows a run."""

import json
import os
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from fastsuncet.commands.report import figures, page
from pipelines.output import printable
from tests.support.reports import LABELS, make_run, result, write_lines
from tests.support.runs import Killed, kill

EVIL = "<script>alert(1)<b>"
TRAIN = {"epoch": 0.5, "loss": 8.5, "nt_xent": 5.0, "suncet": 3.5, "lr": 0.3, "views_per_second": 900.0}
TRAIN |= {"data_wait": 0.25, "petaflops": 0.5, "seconds": 60.0, "updates": 10, "views": 100}
NEW = {"nt_xent_gradient": 0.5, "suncet_gradient": 0.25, "peak_memory_gb": 1.5}
KNN = {"knn_accuracy": 0.625, "knn_supports": 16, "rankme": 42.5, "rankme_features": 30.25}


class Tags(HTMLParser):
    """Collects the tags of a page, its text, and whatever a browser would fetch."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.fetched, self.ids, self.labels, self.text = [], [], [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.text += "" if tag == "wbr" else " "
        self.ids += [value for key, value in attrs if key == "id"]
        self.labels += [value for key, value in attrs if key == "aria-label"]
        self.fetched += [value for key, value in attrs if key in ("src", "href", "xlink:href", "data")]

    def handle_data(self, data):
        self.text += data


def write_status(run: Path, state: str, message: str = "") -> None:
    (run / "status.json").write_text(json.dumps({"state": state, "step": 20, "message": message}))


@pytest.fixture
def run(tmp_path) -> Path:
    """A run in a folder whose name is markup, with everything that a page can show."""
    run = make_run(tmp_path, "a", 0.5).rename(tmp_path / EVIL)
    for tag, lr in (("low", 0.1), ("high", 1.0)):
        result(run, 20, 0.75, lr=lr, tag=tag)
    result(run, 20, 0.25, home=tmp_path / "other")
    for seed in (0, 1):
        draw = {"labels": LABELS | {"names": str(seed)}, "asked": {"data.split.seed": seed}}
        result(run, 20, 0.5, kind="linear", **draw)
    lines = [{"step": step, "kind": "train", **TRAIN, **NEW} for step in (10, 20)]
    write_lines(run, *lines, {"step": 20, "kind": "knn", **TRAIN, **KNN})
    write_status(run, "running", message="<img src=x onerror=alert(1)>")
    Image.new("RGB", (8, 8)).save(run / "views.png")
    (run / "checkpoints" / "step_00000020").mkdir(parents=True)
    (run / "checkpoints" / "step_00000020" / "meta.json").write_text("{")  # damaged
    (run / "checkpoints" / "step_00000020.old").mkdir()  # a user's copy is none
    return run


@pytest.fixture
def plain(monkeypatch):
    """Leave the curves out, which take most of a page's time."""
    monkeypatch.setattr(figures, "draw_lines", lambda *_: "<svg></svg>")


SHOWN = (
    *(EVIL, "<img src=x onerror=alert(1)>", "SimCLR + SuNCEt", "62.50% at update 20", "42.5", "time 25"),
    *("losses", "gradient norms", "RankMe", "optimization.warmup"),
    *("fine-tuning, 10 % labels, update 10", "top-1 accuracy 50.00\u00a0%"),
    *("fine-tuning, 10 % labels, low, lr=0.1, update 20", "fine-tuning, 10 % labels, high, lr=1, update 20"),
    *(f"a linear classifier, 10 % labels, update 20, data.split.seed={seed}" for seed in (0, 1)),
    "Bring one of them back",  # the damaged checkpoint is named
)


def test_page_holds_everything_and_fetches_nothing(run):
    found = Tags(page.write_page(run, refresh=True).read_text())
    assert not {"script", "link", "iframe", "object", "b"} & set(found.tags)
    assert found.tags.count("svg") == 8 and found.tags.count("img") == 1
    assert len(set(found.ids)) == len(found.ids) > 0
    assert "losses; at the end: sum 8.5, nt_xent 5, suncet 3.5" in found.labels
    assert all(value.startswith(("#", "data:image/png;base64,")) for value in found.fetched)
    assert [words for words in SHOWN if words not in found.text] == []
    assert f"{run}/checkpoints/step_00000020" in found.text and "step_00000020.old" not in found.text
    assert f"encoder {run.parent / 'other'}, update 20" in found.text
    assert f"fastsuncet predict '{run}' FOLDER" in found.text
    assert "representation has collapsed" not in found.text


def test_page_names_a_collapse_and_labels_that_were_learned(run, plain):
    write_lines(run, {"step": 20, "kind": "knn", **TRAIN, **KNN, "rankme": 1.01})
    text = page.write_page(run).read_text()
    assert "representation has collapsed" in text and "has learned from" not in text
    path = next((run / "results").glob("*.json"))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"learned": 9}))
    text = page.write_page(run).read_text()
    assert text.count("(too high: on labels that the network has learned from)") == 1


def test_page_of_a_moved_run_evaluates_it_and_not_what_its_config_names(tmp_path, plain):
    run = make_run(tmp_path, "a").rename(tmp_path / "b")
    (run / "checkpoints" / "step_00000020").mkdir(parents=True)
    wanted = f"evaluate linear {run}/config.yaml logging.folder={tmp_path} logging.write_tag=b\n"
    assert wanted in page.write_page(run).read_text()
    run = run.rename(tmp_path / "a")
    assert f"evaluate linear {run}/config.yaml\n" in page.write_page(run).read_text()


@pytest.mark.slow
def test_page_fits_a_phone_and_a_dark_screen(run, browser):
    page.write_page(run)
    browser.window(390, dark=True)
    browser.open(run / page.NAME)
    assert browser.run("document.documentElement.scrollWidth") <= 390
    narrow = "Math.min(...[...document.querySelectorAll('svg')].map(x => x.getBoundingClientRect().width))"
    assert browser.run(narrow) > 340, "a curve has the whole width"
    assert "invert" in browser.run("getComputedStyle(document.querySelector('svg')).filter")
    browser.window(1280)
    assert browser.run(narrow) > 340 and browser.run("document.documentElement.scrollWidth") <= 1280
    assert browser.run("getComputedStyle(document.querySelector('svg')).filter") == "none"


def test_page_killed_while_it_is_written_leaves_the_old_one(tmp_path, monkeypatch):
    run = make_run(tmp_path, "a")
    before = page.write_page(run).read_bytes()
    monkeypatch.setattr(os, "replace", lambda *_: kill())
    with pytest.raises(Killed):
        page.write_page(run)
    assert (run / page.NAME).read_bytes() == before and not list(run.glob(".tmp-*"))


def test_page_takes_anything_for_numbers(run):
    for other in (None, float("nan"), EVIL):
        values = dict.fromkeys((*TRAIN, *NEW, *KNN, "joules"), other)
        write_lines(run, *({"step": 20, "kind": kind, **values} for kind in ("train", "knn")))
        assert EVIL not in page.write_page(run).read_text()


def test_page_takes_no_picture_behind_a_link(run, plain, tmp_path):
    picture = (run / "views.png").rename(tmp_path / "secret.png")
    for spoil in (lambda path: path.write_text("secret"), lambda path: path.symlink_to(picture)):
        (run / "views.png").unlink(missing_ok=True)
        spoil(run / "views.png")
        text = page.write_page(run).read_text()
        assert "views.png is not shown: it is a link, or no PNG" in text and "data:image/png" not in text


def test_page_of_a_run_that_has_not_begun_and_without_matplotlib(tmp_path, monkeypatch):
    run = make_run(tmp_path, "a").rename(tmp_path / os.fsdecode(b"run\xff"))
    text = page.write_page(run).read_text()
    assert "<h1>run?</h1>" in text and "not started" in text and 'http-equiv="refresh"' not in text
    assert "No metrics yet." in text and "No checkpoint yet." in text
    write_lines(run, {"step": 20, "kind": "train", **TRAIN}, {"step": 20, "kind": "knn", "knn_accuracy": 0.5})
    monkeypatch.setattr(page, "drawing_problem", lambda: "matplotlib is <missing>")
    text = page.write_page(run).read_text()
    assert "matplotlib is &lt;missing&gt;" in text and "peak memory, GB a process</dt><dd>-<" in text


def test_watch_writes_a_page_whenever_its_run_goes_on_until_it_is_done(run, plain, capsys, monkeypatch):
    """A file that is listed can be removed before its time is read."""
    glob = Path.glob
    removed = {"[!.]*": [run / "removed"]}
    monkeypatch.setattr(Path, "glob", lambda path, names: [*glob(path, names), *removed.get(names, ())])
    (run / "latest").symlink_to("gone")
    lines = (run / "metrics.jsonl").read_text()
    waited = []

    def wait(seconds):
        waited.append("refresh" in (run / page.NAME).read_text())
        if len(waited) == 2:
            line = json.dumps({"step": 12345, "kind": "train", **TRAIN})
            (run / "metrics.jsonl").write_text(f"{lines}{line}\n")
        if len(waited) == 3:
            write_status(run, "done")

    page.watch([run], wait)
    assert waited == [True] * 3 and capsys.readouterr().out.count("wrote") == 3
    text = (run / page.NAME).read_text()
    assert "12,345" in text and 'http-equiv="refresh"' not in text
    assert not list(run.glob(".tmp-*"))


def test_page_command(run, plain, run_cli):
    run = run.rename(run.with_name("a\x1bb"))
    for words, code, said in (
        (["--page"], 2, "which run? For example"),
        (["--page", "RUN", "--lengths"], 2, "--lengths belongs to a comparison of runs"),
        (["--watch", "RUN", "--output", "x"], 2, "--output belongs to a comparison of runs"),
        (["--page", "gone"], 3, "gone does not exist. `fastsuncet train` makes one"),
        (["--page", "RUN"], 0, ""),
    ):
        printed = run_cli("report", *(run if word == "RUN" else word for word in words), code=code)
        assert said in printed and (code or printed.endswith(f"wrote {printable(str(run / page.NAME))}\n"))
