"""The generated pages of the documentation site hold everything, and links lead to pages of the site."""

import pytest
import yaml

from fastsuncet import cli
from fastsuncet.config.schema import CONFIG
from tools import docs_site


def test_config_page_has_every_key_that_can_be_written_with_its_default():
    page = docs_site.config_page()
    written = {key for key, field in CONFIG.values.items() if not field.exclude}
    assert {key for key in CONFIG.values if f'<span id="{key}">' in page} == written
    (row,) = [line for line in page.splitlines() if 'id="optimization.weight_decay"' in line]
    assert row.endswith("| `1.0e-06` | a number, 0 or more and up to 1,000,000,000 |")


def test_commands_page_has_the_help_of_every_command():
    page = docs_site.commands_page()
    assert all(f"## fastsuncet {name}\n\n```text\nusage: fastsuncet {name}" in page for name in cli.COMMANDS)


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        ("README.md", "[a](docs/data.md#examples)", "[a](data.md#examples)"),
        ("README.md", "![a](docs/demo/curves.png)", "![a](demo/curves.png)"),
        ("README.md", "[![a](docs/demo/curves.png)](RESULTS.md)", "[![a](demo/curves.png)](results.md)"),
        ("README.md", "[RESULTS.md](RESULTS.md)", "[Results](results.md)"),
        ("README.md", "[a](docs/notebooks/first_run.ipynb)", "[a](notebooks/first_run.md)"),
        ("README.md", "[a](configs/in1k_simclr.yaml)", "[a](source/configs/in1k_simclr.yaml.md)"),
        ("docs/data.md", "[a](../configs/in1k_simclr.yaml)", "[a](source/configs/in1k_simclr.yaml.md)"),
        ("docs/notebooks/first_run.ipynb", "[a](../data.md)", "[a](../data.md)"),
        ("RESULTS.md", "numbers: [docs/demo](docs/demo).", "numbers: docs/demo."),
        ("README.md", "[a](https://a.b/c.md)", "[a](https://a.b/c.md)"),
        ("README.md", "[b](missing.md) x[0](y)", "[b](missing.md) x[0](y)"),
    ],
)
def test_relink_leads_to_the_page_of_the_site(page, link, expected):
    assert docs_site.relink(link, page) == expected


def test_sources_has_a_page_for_each_linked_file():
    pages = docs_site.sources()
    assert "````yaml\n# ImageNet" in pages["source/configs/in1k_10pct.yaml.md"]
    assert "source/fastsuncet/training/step.py.md" in pages


def test_site_searches_without_a_server():
    """The plugin's own script is of another host: the site has one of this project."""
    config = yaml.safe_load((docs_site.ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert config["plugins"][:2] == ["search", "offline"]
    (script,) = config["extra"]["polyfills"]
    assert "iframe-worker" in script and (docs_site.ROOT / "docs" / script).is_file()
