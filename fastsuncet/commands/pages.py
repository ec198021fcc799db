"""The HTML pages of `predict` and `suggest`, and the frame of all pages; pages.css and labeling.js belong to them.

A page holds all that it shows: nothing is loaded from another file or host.
"""

import base64
import hashlib
import html
import io
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from pipelines.datasets.image_headers import read_rgb
from pipelines.output import counted, say_line


def html_page(kind: str, title: str, body: str, *, head: str = "", script: str = "") -> str:
    """Return a page in which a browser loads nothing and runs no script but `script`.

    `kind` is its class in pages.css, `body` and further lines of `head` are HTML; `title` is text.
    """
    policy = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy, script = f"{policy}; script-src 'sha256-{digest}'", f"<script>{script}</script>\n"
    return f"""\
<!doctype html>
<html lang="en"><head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
{head}<title>{html.escape(title)}</title>
<style>{_file("pages.css")}</style>
</head><body class="{kind}">
{body}
{script}</body></html>
"""


def _file(name: str) -> str:
    return (files("fastsuncet.commands") / name).read_text(encoding="utf-8")


def thumbnail(image: Path | bytes | np.ndarray, side: int) -> str:
    """Return a small upright JPEG of a file, its content or pixels (H, W, 3) uint8, as a data URL.

    An empty one, and say why, where PIL cannot read the image.
    """
    try:
        pixels = image if isinstance(image, np.ndarray) else read_rgb(image, upright=True, least=side)
    except RuntimeError as error:  # DALI's decoders forgive more
        say_line(f"page: named but not shown: {error}")
        return "data:,"
    small = Image.fromarray(pixels)
    small.thumbnail((side, side))
    stream = io.BytesIO()
    small.save(stream, "JPEG", quality=75)
    return f"data:image/jpeg;base64,{base64.b64encode(stream.getvalue()).decode()}"


# ----------------------------------------------------------------------------------------- what predict found
SIDE = 160  # pixels of a thumbnail, of about 5 kB
OF_CLASS = 8  # pictures of a class, the surest and as many of the least sure, at most
THUMBNAILS = 1200  # in the parts by class, at most: 6 MB
BETWEEN, GAP = 120, 0.2  # pictures between two classes, at most; how close their probabilities are


class Prediction(NamedTuple):
    """The two most probable classes of an image, with calibrated probabilities from 0 to 1."""

    file: str  # its path below the folder
    label: str
    probability: float
    second_label: str
    second_probability: float


def prediction_page(predictions: Sequence[Prediction], folder: Path, about: Iterable[str]) -> str:
    """Return the page as HTML; `about` are lines to begin with, `folder` is where the images lie.

    Of each class the surest and the least sure pictures, then those whose two best classes are closer than GAP, by
    pairs of classes, the closest first. Long parts are cut, and say so.
    """
    by_class: dict[str, list[Prediction]] = defaultdict(list)
    for each in sorted(predictions, key=lambda each: -each.probability):
        by_class[each.label].append(each)
    classes = sorted(by_class)
    count = max(1, min(OF_CLASS, THUMBNAILS // (2 * max(1, len(classes)))))
    parts = [f"<h1>Predictions of {html.escape(str(folder))}</h1>"]
    for name, _, what in (line.partition(" ") for line in about):
        parts.append(f"<p><b>{html.escape(name)}</b> {html.escape(what.strip())}</p>")
    links = (
        f'<a href="#c{i}">{_isolated(name)} ({len(by_class[name]):,})</a>' for i, name in enumerate(classes)
    )
    parts.append(f"<nav>{''.join(links)}<a href='#between'>between two classes</a></nav>")
    for i, name in enumerate(classes):
        found = by_class[name]
        parts.append(f'<h2 id="c{i}">{_isolated(name)}, {counted(len(found), "image")}</h2>')
        surest, rest = found[:count], found[count:]
        parts.append(_row("surest", surest, folder))
        if rest:
            parts.append(_row("least sure", rest[::-1][:count], folder))
    parts.append('<h2 id="between">Between two classes</h2>')
    close = [each for each in predictions if each.probability - each.second_probability < GAP]
    close.sort(key=lambda each: each.probability - each.second_probability)
    cut = f", the closest {BETWEEN} of them" if len(close) > BETWEEN else ""
    parts.append(
        f"<p>{counted(len(close), 'image')} whose two best classes are closer than {100 * GAP:.0f} points{cut}.</p>"
    )
    pairs: dict[str, list[Prediction]] = defaultdict(list)
    for each in close[:BETWEEN]:
        pairs[" or ".join(map(_isolated, sorted((each.label, each.second_label))))].append(each)
    parts += [_row(pair, pairs[pair], folder) for pair in sorted(pairs, key=lambda pair: -len(pairs[pair]))]
    return html_page("predictions", f"Predictions of {folder}", "\n".join(parts))


def _isolated(name: str) -> str:
    """Return the name of a class as HTML; one that is written from right to left turns nothing round it."""
    return f"<bdi>{html.escape(name)}</bdi>"


def _row(title: str, found: Iterable[Prediction], folder: Path) -> str:
    lines = [f'<h3>{title}</h3>\n<div class="row">']
    for each in found:
        name = html.escape(each.file, quote=True)
        first = f"{_isolated(each.label)} {100 * each.probability:.0f} %"
        second = f"{_isolated(each.second_label)} {100 * each.second_probability:.0f} %"
        lines.append(
            f'<figure><img src="{thumbnail(folder / each.file, SIDE)}" alt="{name}" title="{name}" loading="lazy">'
            f"<figcaption><b>{first}</b><span>{second}</span><small>{name}</small></figcaption></figure>"
        )
    return "\n".join([*lines, "</div>"])


# -------------------------------------------------------------------------------------------- images to label
SAVED = "new-labels.csv"  # not the name of the file that the run reads: nobody should replace that
LARGE_SIDE = 480  # pixels of a picture, of about 40 kB


def labeling_page(
    names: Sequence[str],
    pictures: Sequence[str],
    classes: Sequence[str],
    guesses: Sequence[Mapping[str, float]] = (),
) -> str:
    """Return the page as HTML: a picture, a button and a key for each class, undo, and one that saves the labels.

    `names` are the files as a labels.csv has them, `pictures` their data URLs, LARGE_SIDE pixels or less a side,
    `classes` those known so far, `guesses` the probabilities from 0 to 1 of some classes of each picture.
    """
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]
    data = {"id": digest, "saved": SAVED, "files": list(names), "classes": list(classes)}
    data["guesses"] = [[(label, f"{p:.0%}") for label, p in each.items()] for each in guesses]
    data["pictures"] = list(pictures)
    # "<" would end the script's element inside a file name.
    held = json.dumps(data).replace("<", "\\u003c")
    body = f"""\
<p><b id="progress"></b> <button id="undo"><kbd>u</kbd>undo</button><button id="skip"><kbd>z</kbd>skip</button>
<button id="save">save {SAVED}</button></p>
<img id="picture" alt="This picture cannot be shown.">
<p id="name"></p>
<p id="classes"></p>
<p><input id="new" placeholder="another class"><button id="add">add</button></p>
<script type="application/json" id="data">{held}</script>"""
    return html_page("labeling", f"{len(names)} images to label", body, script=_file("labeling.js"))
