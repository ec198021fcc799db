"""`fastsuncet predict --page`: one HTML file with the surest and the least sure pictures of each class.

The file holds everything it shows: no script, no font and no picture of another file or host.
"""

import base64
import hashlib
import html
import io
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image

from pipelines.datasets.image_headers import read_rgb
from pipelines.output import counted, say_line

SIDE = 160  # pixels of a thumbnail, of about 5 kB
OF_CLASS = 8  # pictures of a class, the surest and as many of the least sure, at most
THUMBNAILS = 1200  # in the parts by class, at most: 6 MB
BETWEEN, GAP = 120, 0.2  # pictures between two classes, at most; how close their probabilities are

STYLE = """\
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76em; margin: 1.5em auto; padding: 0 1em; }
h1 { font-size: 1.5em; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15em; margin: 2em 0 .4em; border-bottom: 1px solid #8888; overflow-wrap: anywhere; }
h3 { font-size: 1em; font-weight: 400; margin: .8em 0 .3em; color: #777; }
p { margin: .3em 0; }
nav { display: flex; flex-wrap: wrap; gap: .2em .8em; margin-top: 1em; }
nav a { overflow-wrap: anywhere; }
.row { display: grid; grid-template-columns: repeat(auto-fill, minmax(7.5em, 1fr)); gap: .7em; }
figure { margin: 0; min-width: 0; }
img { width: 100%; aspect-ratio: 1; object-fit: contain; background: #8882; border-radius: 4px; }
figcaption { font-size: .8em; line-height: 1.3; overflow-wrap: anywhere; }
figcaption span { display: block; }
small { color: #777; display: block; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
"""


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
    return html_page(f"Predictions of {folder}", STYLE, "\n".join(parts))


def html_page(title: str, style: str, body: str, *, head: str = "", script: str = "") -> str:
    """Return a page in which a browser loads nothing and runs no script but `script`.

    `body` and further lines of `head` are HTML; `title` is text.
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
<style>{style}</style>
</head><body>
{body}
{script}</body></html>
"""


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
            f'<figure><img src="{thumbnail(folder / each.file)}" alt="{name}" title="{name}" loading="lazy">'
            f"<figcaption><b>{first}</b><span>{second}</span><small>{name}</small></figcaption></figure>"
        )
    return "\n".join([*lines, "</div>"])


def thumbnail(image: Path | bytes | np.ndarray, side: int = SIDE) -> str:
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
