"""Suggested images: typical ones of clusters without a label, a CSV to fill in, a page to label them on."""

import json
import shutil
import subprocess

import pytest
import torch

from fastsuncet.commands.labeling_page import SCRIPT, labeling_page
from fastsuncet.evaluation.suggestions import typical
from tests.support.pictures import write_image

BROWSER = """\
const elements = {}, saved = {};
const element = id => elements[id] ||= {id, value: "", replaceChildren(...x) { this.children = x; }, append() {},
  blur() {}, click() {}};
globalThis.document = {getElementById: element, createElement: name => ({append() {}, click() { saved.link = this; }})};
globalThis.localStorage = {getItem: () => null, setItem: (key, value) => { saved.memory = value; }};
globalThis.Blob = class { constructor(parts) { saved.text = parts.join(""); } };
URL.createObjectURL = () => "blob:";
elements.data = {textContent: DATA};
"""


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


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
def test_page_gives_classes_by_key_and_click_and_saves_them(tmp_path):
    names = ["a.png", 'b,"<script>.png', "c.png"]
    for i in range(3):
        write_image(tmp_path / f"{i}.png")
    page = labeling_page(names, [tmp_path / f"{i}.png" for i in range(3)], ["cat", "dog"])
    data = page.split('id="data">')[1].split("</script>")[0]
    keys = """
const press = key => document.onkeydown({key, target: {}});
press("2"); press("1"); press("u"); press("z"); elements.classes.children[0].onclick();
elements.new.value = "bird, small"; elements.add.onclick(); elements.save.onclick();
console.log(JSON.stringify([saved.text, elements.progress.textContent, saved.link.download]));
"""
    code = BROWSER.replace("DATA", json.dumps(data)) + SCRIPT + keys
    done = subprocess.run(["node", "-e", code], capture_output=True, text=True, check=True)
    text, progress, name = json.loads(done.stdout)
    assert text == 'file,label\na.png,dog\nc.png,cat\n"b,""<script>.png","bird, small"\n'
    assert (progress, name) == ("3 of 3 labeled", "labels.csv")
