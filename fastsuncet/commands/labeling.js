// The page of `fastsuncet suggest`: it gives pictures a class and saves these as the lines of a labels.csv.
const data = JSON.parse(document.getElementById("data").textContent);
const keys = "123456789abcdefghijklmnopqrstvwxy";  // u is undo, z the next picture without a label
const get = id => document.getElementById(id);
const memory = "fastsuncet:" + data.id;
let given = new Map(), at = 0;  // file -> label, the last one given at the end; the picture shown
try {
  given = new Map(JSON.parse(localStorage.getItem(memory)));
} catch { /* not allowed here */ }
given.forEach(know);

function know(label) {
  if (!data.classes.includes(label)) data.classes.push(label);
}

function next() {
  const n = data.files.length;
  for (let i = 1; i <= n; i++)
    if (!given.has(data.files[(at + i) % n])) {
      at = (at + i) % n;
      return;
    }
}

function keep() {
  try {
    localStorage.setItem(memory, JSON.stringify([...given]));
  } catch { /* not allowed here */ }
  show();
}

function give(label) {
  given.delete(data.files[at]);
  given.set(data.files[at], label);
  next();
  keep();
}

function undo() {
  const file = [...given.keys()].pop();
  if (!given.delete(file)) return;
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
  get("name").textContent = file + (given.has(file) ? ": " + given.get(file) : "");
  get("progress").textContent =
    given.size < all ? given.size + " of " + all + " labeled" : "all " + all + " labeled: save them";
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
  const lines = ["file,label", ...[...given].map(line => line.map(cell).join(","))];
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
if (given.has(data.files[0])) next();
show();
