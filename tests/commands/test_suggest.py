"""Suggested images: typical ones of clusters without a label, a CSV to fill in, a page to label them on."""

import csv
import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch

import fastsuncet
from fastsuncet.commands.pages import labeling_page, thumbnail
from fastsuncet.commands.suggest import suggestions
from fastsuncet.evaluation.encoder import load_encoder
from fastsuncet.evaluation.suggestions import typical
from pipelines.data_errors import DataError
from tests.support.exports import save_run
from tests.support.pictures import write_image
from tests.support.runs import TINY


def test_typical_takes_the_center_of_each_cluster_without_a_label():
    angles = torch.tensor([0.0, 0.9, 2.0, 4.0])  # of four clusters
    points = (angles[:, None] + torch.linspace(-0.1, 0.1, 21)).flatten()
    x = torch.stack([points.cos(), points.sin()], 1)
    labeled = torch.zeros(len(x), dtype=torch.bool)
    labeled[3] = True
    found = typical(x, labeled, 3)
    assert sorted((found // 21).tolist()) == [1, 2, 3]
    assert all(abs(i % 21 - 10) <= 1 for i in found.tolist())
    assert torch.equal(typical(x, labeled, 3), found)
    assert len(set(typical(x, labeled, 500).tolist())) == len(x) - 1, "all of them, and none twice"
    # Copies of one image, also of a labeled one, come last.
    copied, none = torch.cat([x, x[[3, 31]].repeat(15, 1)]), torch.zeros(30, dtype=torch.bool)
    for count in (40, 500):
        found = typical(copied, torch.cat([labeled, none]), count).tolist()
        assert len(set(found)) == min(count, len(copied) - 1)
        first = found[: len(x) - 1]
        assert len(copied[first].unique(dim=0)) == len(first)


@pytest.mark.slow
def test_page_takes_classes_by_key_and_click_and_saves_them(tmp_path, browser):
    """In Chromium, as a person does it: guesses, a new class, undo, skip, the page opened again, the saved file."""
    names = ["a.png", 'b,"<script>.png', "c.png"]
    for i in range(3):
        write_image(tmp_path / f"{i}.png", 60, 40)
    guesses = [{"dog": 0.61, "cat": 0.394}, {"cat": 1.0, "dog": 0.0}, {"dog": 0.5, "cat": 0.5}]
    pictures = [thumbnail(tmp_path / f"{i}.png", 160) for i in range(3)]
    (tmp_path / "next.html").write_text(labeling_page(names, pictures, ["cat", "dog"], guesses))
    browser.window(800)

    def shown() -> list[str]:
        """Return the progress, the picture's name and the buttons of classes."""
        where = "#progress, #name, #classes button"
        return browser.run(f"[...document.querySelectorAll('{where}')].map(x => x.textContent)")

    browser.open(tmp_path / "next.html")
    assert shown() == ["0 of 3 labeled", "a.png", "1cat39%", "2dog61%"]
    assert browser.run("document.getElementById('picture').naturalWidth") == 60
    browser.press("2", times=3)
    browser.press("1")
    browser.press("u", times=3)
    assert shown() == ["1 of 3 labeled", names[1], "1cat100%", "2dog0%"]
    browser.press("z")
    browser.run("document.querySelector('#classes button').click()")
    browser.run("document.querySelector('#new').focus()")
    bird = "bird, " + 60 * "2"  # a digit here is no class
    for key in bird:
        browser.press(key)
    browser.press("Enter")
    assert shown()[0] == "all 3 labeled: save them" and shown()[-1] == f"3{bird}"
    # Chromium gives what a page stored to the next page a moment later: once in 300 times that page came first.
    for _ in range(20):
        browser.open(tmp_path / "next.html")
        if shown()[0] == "all 3 labeled: save them":  # not an older state of the page either
            break
        time.sleep(0.1)
    assert shown()[0] == "all 3 labeled: save them", "the browser remembers"
    browser.run("document.querySelector('#save').click()")
    saved = browser.download("new-labels.csv")
    browser.window(390, 844)
    assert browser.run("document.documentElement.scrollWidth") == 390, "nothing is cut on a phone"
    assert saved == f'file,label\na.png,dog\nc.png,cat\n"b,""<script>.png","{bird}"\n'


@pytest.mark.slow
def test_suggest_writes_unlabeled_images_and_a_page(run, picture, run_cli):
    for i in range(8):
        quote = '"' * (i % 2)
        picture(Path(f"mine/ new{quote}<{i}>.png"), "red", 20 + i)
    shutil.copy("mine/red0.png", "mine/ cut.png")
    os.truncate("mine/ cut.png", 2000)  # its header is good
    command = f"suggest {run} --count 5 --output new/next.csv --page"
    assert "5 of 8 images without a label" in run_cli(command)
    with open("new/next.csv", newline="") as stream:
        rows = list(csv.DictReader(stream, skipinitialspace=True))  # as a labels.csv is read
    assert len(rows) == 5 and all(row["file"].startswith(" new") and row["label"] == "" for row in rows)
    page = Path("new/next.html").read_text()
    assert page.count("data:image/jpeg") == 5 and "<0>" not in page and "https:" not in page
    guesses = json.loads(page.split('id="data">')[1].split("</script>")[0])["guesses"]
    assert [each[0][0] for each in guesses] == ["red"] * 5 and all(len(each) == 2 for each in guesses)
    assert fastsuncet.suggest(run, 5) == [row["file"] for row in rows]
    held_out = load_encoder(run).trained.with_values({"data.validation": 0.34})
    assert suggestions(held_out, 5).labeled == 18, "six of them are held out"
    Path("held_out.csv").write_text("file,label\ngone.png,red\nred0.png,blue\nred1.png,red\n")
    held_out = held_out.with_values({"data.validation": "held_out.csv"})
    assert suggestions(held_out, 5).labeled == 18, "also those of a table that no longer fits"
    Path("held_out.csv").rename("own.csv")
    with pytest.raises(DataError, match=r"gone\.png"):  # its other images may be labeled nowhere else
        suggestions(held_out.with_values({"data.validation": "own.csv"}), 5)
    picture(Path("mine/later.png"), "red", 40)
    assert run_cli(command, "--force").count("has 1 new image, left out") == 1


@pytest.mark.slow
def test_suggest_names_and_shows_images_that_have_no_file(tmp_path):
    run, few = tmp_path / "run", "data.synthetic.images=20"
    split = ("data.split.kind=bernoulli", "data.split.file=null", "data.split.sha256=null")
    save_run(run, "model.name=resnet_tiny", *TINY, few, *split)
    found = suggestions(run, 2, page=True)
    assert len(set(found.names)) == 2 and found.page.count("data:image/jpeg") == 2
    assert fastsuncet.suggest(run, 2) == found.names
    with pytest.raises(DataError, match="images of synthetic that can be read have no label"):
        suggestions(run, 20)


@pytest.mark.slow
def test_suggest_says_that_all_images_have_a_label(run, run_cli):
    assert "can be read have a label, so there is none" in run_cli(f"suggest {run} --output next.csv", code=3)
