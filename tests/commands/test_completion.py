"""The completion script, run by bash."""

import shutil
import subprocess

import pytest

from fastsuncet import cli

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("fin", ["finetune"]),
        ("evaluate k", ["knn"]),
        ("train in1k_10", ["in1k_10pct", "in1k_10pct_authors", "in1k_10pct_paws", "in1k_10pct_paws_small"]),
        ("train --dry", ["--dry-run", "--dry-run=step"]),
        ("train run.yaml optimization.trust", ["optimization.trust_coefficient="]),
        ("export run --to t", ["torchvision", "timm"]),
        ("predict digits_d", ["digits_demo"]),
        ("data p", ["pack"]),
        ("config optimization.trust", ["optimization.trust_coefficient"]),
    ],
)
def test_completion_of_a_line(line, words, capsys):
    assert cli.main(["completion", "bash"]) == 0
    call = f"COMP_WORDS=(fastsuncet {line}); COMP_CWORD={len(line.split())}; _fastsuncet"
    script = f'{capsys.readouterr().out}\n{call}\nprintf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == words and done.stderr == ""
