// The page of `fastsuncet suggest`: it gives pictures a class and saves these as the lines of a labels.csv.
const data = JSON.parse(document.getElementById("data").textContent);
const keys = "123456789abcdefghijklmnopqrstvwxy";  // u is undo, z the next picture without a label
const get = id => document.getElementById(id);
const memory = "fastsuncet:" + data.id;
let given = {}, order = [], at = 0;  // file -> label; the files in the order of their labels; the picture shown
try {
  ({given, order} = JSON.parse(localStorage.getItem(memory)) || {given, order});
} catch { /* not allowed here */ }
for (const label of Object.values(given)) know(label);

function know(label) {
  if (!data.classes.includes(label)) data.classes.push(label);
}

function next() {
  const n = data.files.length;
  for (let i = 1; i <= n; i++)
    if (!(data.files[(at + i) % n] in given)) {
      at = (at + i) % n;
      return;
    }
}

function keep() {
  try {
    localStorage.setItem(memory, JSON.stringify({given, order}));
  } catch { /* not allowed here */ }
  show();
}

function give(label) {
  const file = data.files[at];
  given[file] = label;
  order = order.filter(x => x !== file);
  order.push(file);
  next();
  keep();
}

function undo() {
  const file = order.pop();
  if (file === undefined) return;
  delete given[file];
  at = data.files.indexOf(file);
  keep();
}

function add() {
  const label = get("new").value.trim();
  if (!label) return;
  know(label);
  get("new").value = "";
  get("new").blur();
  give(label);
}

function skip() {
  next();
  show();
}

function show() {
  const file = data.files[at], all = data.files.length, guesses = new Map(data.guesses[at]);
  get("picture").src = data.pictures[at];
  get("name").textContent = file + (file in given ? ": " + given[file] : "");
  get("progress").textContent =
    order.length < all ? order.length + " of " + all + " labeled" : "all " + all + " labeled: save them";
  get("classes").replaceChildren(...data.classes.map((label, i) => {
    const button = document.createElement("button");
    const part = (kind, text) => {
      const element = document.createElement(kind);
      element.textContent = text;
      button.append(element);
    };
    if (keys[i]) part("kbd", keys[i]);
    button.append(label);
    if (guesses.has(label)) part("b", guesses.get(label));
    button.onclick = () => give(label);
    return button;
  }));
}

function save() {
  const special = text => /[",\n\r]/.test(text) || text !== text.trim();
  const cell = text => special(text) ? '"' + text.replaceAll('"', '""') + '"' : text;
  const lines = ["file,label", ...order.map(file => cell(file) + "," + cell(given[file]))];
  const link = document.createElement("a");
  link.download = data.saved;
  link.href = URL.createObjectURL(new Blob([lines.join("\n") + "\n"], {type: "text/csv"}));
  link.click();
}

get("undo").onclick = undo;
get("skip").onclick = skip;
get("save").onclick = save;
get("add").onclick = add;
document.onkeydown = event => {
  if (event.target === get("new")) {
    // Enter can also end a word of an input method.
    if (event.key === "Enter" && !event.isComposing) add();
    return;
  }
  // A key held down labels one picture.
  if (event.ctrlKey || event.metaKey || event.altKey || event.repeat) return;
  const i = keys.indexOf(event.key);
  if (event.key === "u") undo();
  else if (event.key === "z") skip();
  else if (i >= 0 && i < data.classes.length) give(data.classes[i]);
};
if (data.files[0] in given) next();
show();
