"""Build the documentation site: the hooks of mkdocs (mkdocs.yml names this file).

- The Markdown files at the top of the repository are pages; README.md is the home page.
- A link to any other file of the repository leads to a page that shows the file.
- config.md and commands.md are generated from the schema and from `--help`.
- A notebook is shown with the outputs that it was saved with.
- A ```math block, which code hosts show as an equation too, becomes MathML: nothing is fetched from another host.

mkdocs and its plug-ins are imported where they are used, so that tests can import this module without them.
"""

import html
import os
import posixpath
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

from fastsuncet.cli import COMMANDS
from fastsuncet.cli._parser import Parser, overview
from fastsuncet.config import FREE_ON_RESUME
from fastsuncet.config.messages import allowed, meaning
from fastsuncet.config.reader import as_yaml
from fastsuncet.config.schema import CONFIG, DEFAULTS

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("BENCHMARKS", "CHANGELOG", "CONTRIBUTING", "RESULTS", "SECURITY")
TOP = {"README.md": "index.md", **{f"{name}.md": f"{name.lower()}.md" for name in PAGES}}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sbatch": "bash"}
# Pages whose tables take the place of the table of contents.
WIDE = ("docs/gpu.md", "docs/paper.md", "docs/trust.md")
LINK = re.compile(r"\[((?:!\[[^\]]*\]\([^)]*\)|[^\]])*)\]\((?!https?:|#)([^)\s#]+)(#[^)\s]*)?\)")
FETCHED = re.compile(
    r'<(?:script|link(?! rel="canonical")|img|iframe)\b[^>]*\b(?:src|href)="(?:https?:)?//[^"]*"'
)


# ------------------------------------------------------------------------------------------------------------ links
def page_of(path: str) -> str:
    """Return the page of the site for a file of the repository: "configs/a.yaml" -> "source/configs/a.yaml.md"."""
    if path in TOP:
        return TOP[path]
    if path.startswith("docs/"):
        return re.sub(r"\.ipynb$", ".md", path.removeprefix("docs/"))
    return f"source/{path}.md"


def _target(link: re.Match[str], page: str) -> str:
    """Return the file or folder of the repository that a link of `page` leads to, "" of any other link."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), link[2]))
    return path if (ROOT / path).exists() else ""


def relink(text: str, path: str) -> str:
    """Return the Markdown of `path` ("docs/data.md") with its links changed to pages of the site.

    A folder has no page: of a link to one only the text is left. A link that shows a file's name shows its title.
    """

    def changed(link: re.Match[str]) -> str:
        target = _target(link, path)
        if not target or (ROOT / target).is_dir():
            return link[1] if target else link[0]
        name = _title(target) if link[1].endswith(".md") else relink(link[1], path)  # the link of a picture
        here = posixpath.dirname(page_of(path)) or "."
        return f"[{name}]({posixpath.relpath(page_of(target), here)}{link[3] or ''})"

    return LINK.sub(changed, text)


def _text(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def _title(path: str) -> str:
    return _text(path).splitlines()[0].lstrip("# ")


def sources() -> dict[str, str]:
    """Return page -> Markdown of each file outside of docs/ that a page links to."""
    pages = [*TOP, *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md")))]
    found = {}
    for path in (_target(link, page) for page in pages for link in LINK.finditer(_text(page))):
        uri = page_of(path)
        if uri.startswith("source/") and (ROOT / path).is_file():
            language = LANGUAGES.get(Path(path).suffix, "text")
            found[uri] = f"# {path}\n\n````{language}\n{_text(path)}````\n"
    return found


# ---------------------------------------------------------------------------------------------------- generated pages
def config_page() -> str:
    """Return the page of every config key, from the descriptions that `fastsuncet config` prints."""
    free = ", ".join(f"`{key}`" for key in FREE_ON_RESUME)
    lines = [
        "# Every config key",
        "",
        "`fastsuncet config SECTION.KEY` prints the same at a terminal. A key without a default must be written.",
        "",
        f"A run can be continued with other values of {free}; of every other key it cannot.",
    ]
    for section in filter(None, CONFIG.sections):
        lines += ["", f"## {section}", "", _cell(meaning(section)), ""]
        lines += ["| key | meaning | default | allowed |", "|---|---|---|---|"]
        for key in [key for key in CONFIG.values if key.rpartition(".")[0] == section]:
            default = f"`{as_yaml(DEFAULTS[key])}`" if key in DEFAULTS else "none: it must be written"
            name = f'<span id="{key}">`{key.rpartition(".")[2]}`</span>'
            lines.append(f"| {name} | {_cell(meaning(key))} | {default} | {_cell(allowed(CONFIG, key))} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    """Return plain text as Markdown for a cell of a table."""
    return re.sub(r"([|*_\[\]])", r"\\\1", html.escape(text, quote=False))


def commands_page() -> str:
    """Return the page with the `--help` of every command."""
    parts = ["# Commands\n"]
    with patch.dict(os.environ, COLUMNS="100"):
        texts = {"": overview(COMMANDS), **{name: Parser(name).format_help() for name in COMMANDS}}
    for name, text in texts.items():
        parts.append(f"## fastsuncet {name}".rstrip() + f"\n\n```text\n{text.rstrip()}\n```\n")
    return "\n".join(parts)


# ---------------------------------------------------------------------------------------------------- hooks of mkdocs
def math(source: str, *_: Any, **__: Any) -> str:
    """Return the LaTeX of a ```math block as MathML."""
    from latex2mathml.converter import convert

    return f'<div class="math">{convert(source, display="block")}</div>'


def on_config(config: Any) -> Any:
    """Let ```math blocks be equations."""
    fences = config.mdx_configs.setdefault("pymdownx.superfences", {}).setdefault("custom_fences", [])
    fences.append({"name": "math", "class": "math", "format": math})
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not in docs/."""
    from mkdocs.structure.files import File
    from nbconvert import MarkdownExporter

    pages = {TOP[name]: _text(name) for name in TOP}
    pages |= {"config.md": config_page(), "commands.md": commands_page(), **sources()}
    # Notebooks as they were saved: their Markdown, and their pictures.
    for path in sorted((ROOT / "docs").rglob("*.ipynb")):
        page, (text, resources) = path.relative_to(ROOT / "docs"), MarkdownExporter().from_filename(str(path))
        pages[str(page.with_suffix(".md"))] = text
        pages |= {str(page.parent / name): content for name, content in resources["outputs"].items()}
    for uri, content in pages.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Change the links of a page that is a file of the repository."""
    path = {uri: name for name, uri in TOP.items()}.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    if path in WIDE or page.file.src_uri.startswith("source/"):
        page.meta["hide"] = ["toc"]
    return relink(markdown, path) if (ROOT / path).exists() else markdown


def on_post_build(config: Any) -> None:
    """Fail if a page loads anything from another host."""
    from mkdocs.exceptions import PluginError

    for path in Path(config.site_dir).rglob("*.html"):
        if found := FETCHED.search(path.read_text(encoding="utf-8")):
            raise PluginError(f"{path} loads from another host: {found[0]}")
