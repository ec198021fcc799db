"""`fastsuncet suggest --page`: one HTML file to give pictures a class on, without a server or a network."""

import hashlib
import json
from collections.abc import Mapping, Sequence

from fastsuncet.commands.prediction_page import html_page

SAVED = "new-labels.csv"  # not the name of the file that the run reads: nobody should replace that
SIDE = 480  # pixels of a picture, of about 40 kB

STYLE = """\
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 44em; margin: 1em auto; padding: 0 1em; }
img { width: 100%; height: 55vh; object-fit: contain; background: #8882; border-radius: 4px; }
button, input { font: inherit; padding: .4em .8em; margin: .2em .3em .2em 0; min-height: 2.6em;
  box-sizing: border-box; max-width: 100%; overflow-wrap: anywhere; }
#name { overflow-wrap: anywhere; color: #777; }
kbd { opacity: .6; margin-right: .4em; }
button b { margin-left: .4em; }
@media (hover: none) { kbd { display: none; } }
@media (max-width: 40em) { img { height: 45vh; } }
"""

SCRIPT = """\
const data = JSON.parse(document.getElementById("data").textContent);
const keys = "123456789abcdefghijklmnopqrstvwxy";  // u is undo, z the next picture without a label
const get = id => document.getElementById(id);
const memory = "fastsuncet:" + data.id;
let given = {}, order = [], at = 0;
try { ({given, order} = JSON.parse(localStorage.getItem(memory)) || {given, order}); } catch { /* not allowed here */ }
for (const label of Object.values(given)) if (!data.classes.includes(label)) data.classes.push(label);
const next = () => { const n = data.files.length; for (let i = 1; i <= n; i++)
  if (!(data.files[(at + i) % n] in given)) { at = (at + i) % n; return; } };
function keep() {
  try { localStorage.setItem(memory, JSON.stringify({given, order})); } catch { /* not allowed here */ }
  show();
}
function give(label) { const file = data.files[at]; given[file] = label; order = order.filter(x => x !== file);
  order.push(file); next(); keep(); }
function undo() { const file = order.pop(); if (file === undefined) return;
  delete given[file]; at = data.files.indexOf(file); keep(); }
function add() { const label = get("new").value.trim(); if (!label) return;
  if (!data.classes.includes(label)) data.classes.push(label); get("new").value = ""; get("new").blur(); give(label); }
function show() {
  const file = data.files[at];
  get("picture").src = data.pictures[at]; get("name").textContent = file + (file in given ? ": " + given[file] : "");
  const all = data.files.length, guesses = new Map(data.guesses[at]);
  get("progress").textContent =
    order.length < all ? order.length + " of " + all + " labeled" : "all " + all + " labeled: save them";
  get("classes").replaceChildren(...data.classes.map((label, i) => { const button = document.createElement("button");
    if (keys[i]) { const key = document.createElement("kbd"); key.textContent = keys[i]; button.append(key); }
    button.append(label);
    if (guesses.has(label)) { const sure = document.createElement("b"); sure.textContent = guesses.get(label);
      button.append(sure); }
    button.onclick = () => give(label); return button; }));
}
function save() {
  const cell = text => /[",\\n\\r]/.test(text) || text !== text.trim() ? '"' + text.replaceAll('"', '""') + '"' : text;
  const lines = ["file,label", ...order.map(file => cell(file) + "," + cell(given[file]))];
  const link = document.createElement("a"); link.download = data.saved;
  link.href = URL.createObjectURL(new Blob([lines.join("\\n") + "\\n"], {type: "text/csv"})); link.click();
}
get("undo").onclick = undo; get("skip").onclick = () => { next(); show(); }; get("save").onclick = save;
get("add").onclick = add;
document.onkeydown = event => {
  // Enter can also end a word of an input method.
  if (event.target === get("new")) { if (event.key === "Enter" && !event.isComposing) add(); return; }
  if (event.ctrlKey || event.metaKey || event.altKey || event.repeat) return;  // a key held down labels one picture
  const i = keys.indexOf(event.key);
  if (event.key === "u") undo(); else if (event.key === "z") { next(); show(); }
  else if (i >= 0 && i < data.classes.length) give(data.classes[i]);
};
if (data.files[0] in given) next();
show();
"""


def labeling_page(
    names: Sequence[str],
    pictures: Sequence[str],
    classes: Sequence[str],
    guesses: Sequence[Mapping[str, float]] = (),
) -> str:
    """Return the page as HTML: a picture, a button and a key for each class, undo, and one that saves the labels.

    `names` are the files as a labels.csv has them, `pictures` their data URLs, SIDE pixels or less a side,
    `classes` those known so far, `guesses` the probabilities from 0 to 1 of some classes of each picture.
    """
    digest = hashlib.sha256("\n".join(names).encode(errors="surrogateescape")).hexdigest()[:16]
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
    return html_page(f"{len(names)} images to label", STYLE, body, script=SCRIPT)
