"""Verdicts decide which paths a run uses: kept ones, and those of children, which are stubs here."""

import json
import os

import pytest
import torch

from fastsuncet.config import ConfigErrors, load_config
from fastsuncet.distributed.launch import Place
from fastsuncet.errors import ConfigError
from fastsuncet.kernels import self_test
from fastsuncet.training.kernel_choice import GRAPH, GRAPH_VIEWS, STAYS_OFF, VIEW, Verdict, describe, resolved
from fastsuncet.tuning import processes, verdicts
from pipelines.dali.view_operator import use
from tests.support.ranks import run_ranks
from tests.support.runs import CONFIGS

CARD = torch.device("cuda", 0)
WORDS = ("data.root=none", "meta.precision=bf16", "data.split.file=none", "data.view_operator=false")
KERNELS = ["lars.cu", "contrast.cu", "norm.cu"]
MACHINE = {"card": "a card", "driver": "1", "memory": 1 << 50}


@pytest.fixture(autouse=True)
def _one_machine(tmp_path, monkeypatch):
    pretend(monkeypatch, tmp_path)


def pretend(patch: pytest.MonkeyPatch, folder, machine=MACHINE) -> None:
    patch.setenv("FASTSUNCET_CACHE", str(folder / "cache"))
    patch.setattr(self_test, "_reasons", {})
    patch.setattr(use, "proved", set())
    patch.setattr(verdicts, "describe_machine", lambda device: machine)


def paper(*overrides: str, world_size: int = 64):
    config = load_config(CONFIGS / "in1k_10pct.yaml", [*WORDS, *overrides])
    return config, config.resolve(world_size, 1_281_167, 1000, 128_000)


class Children:
    """Stands for the processes that try something: `found` has each path's verdict, or the signal that kills it."""

    def __init__(self, patch: pytest.MonkeyPatch, graph=None, **found):
        self.found, self.tried = {path.replace("_", "."): what for path, what in found.items()}, []
        self.seconds = 0  # of a clock on which a process takes 10 to start and each path 5
        self.graph = graph or {"base": [2.0] * 8, "contender": [1.0] * 4}
        patch.setattr(processes, "run_child", self.run)
        patch.setattr(processes, "run_children", self.run_all)

    def run(self, request, environment, go_on):
        lines = []
        self.tried.append(request["try"])
        self.seconds += 10 + 5 * len(request["try"])
        for path in request["try"]:
            lines.append({"path": path})
            verdict = self.found.get(path, Verdict(None, (1.0, 2.0)))
            if isinstance(verdict, str):
                return lines, f"was killed by {verdict}: no output"
            lines.append({"path": path, **verdict._asdict()})
        return lines, "ended with exit code 0: no output"

    def run_all(self, request, seconds, stopped):
        self.tried.append(GRAPH)
        self.seconds += 15
        return [self.graph]


def settle(config, arithmetic, before=None, **place):
    place = Place(0, 1, 0, CARD)
    return verdicts.settle(config, arithmetic, place, [128] * 1000, before or {})


@pytest.mark.slow
def test_settle_tries_each_path_once_for_a_machine_and_shapes(monkeypatch, capsys):
    children = Children(monkeypatch)
    config, sizes = paper()
    assert settle(config, sizes) == dict.fromkeys([*KERNELS, GRAPH])
    assert (
        children.tried == [KERNELS, GRAPH]
        and "speed: tries lars.cu, contrast.cu, norm.cu" in capsys.readouterr().out
    )
    fast = resolved(config, settle(config, sizes))
    assert (fast.model.fused_batchnorm, fast.meta.cuda_graph) == (True, True)
    assert len(children.tried) == 2 and capsys.readouterr().out == ""
    # Other shapes, another card, another program.
    settle(*paper("criterion.unsupervised_batch_size=1408"))
    assert children.tried[2:] == [["contrast.cu", "norm.cu"], GRAPH]
    monkeypatch.setattr(verdicts, "describe_machine", lambda device: {**MACHINE, "driver": "2"})
    settle(config, sizes)
    assert children.tried[4:] == [KERNELS, GRAPH]


SLOW = Verdict("slower than PyTorch's operators: 2 ms against 1 ms", (2.0, 1.0))
FULL = Verdict("the device has too little memory for the trial of norm.cu", None, final=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("found", "reason", "kept"),
    [
        (SLOW, SLOW.reason, True),
        (FULL, FULL.reason, False),
        ("SIGSEGV", "the process that tried it was killed by SIGSEGV: no output", False),
    ],
)
def test_path_that_fails_is_off_and_tried_again_unless_it_was_measured(monkeypatch, found, reason, kept):
    children = Children(monkeypatch, contrast_cu=found)
    config, sizes = paper("meta.cuda_graph=false")
    expected = {"lars.cu": None, "contrast.cu": reason, "norm.cu": None, GRAPH: "meta.cuda_graph is false"}
    for _ in range(2):
        assert settle(config, sizes) == expected
        assert self_test._reasons["contrast.cu", CARD] == reason
    ended = isinstance(found, str)
    first = [KERNELS, ["norm.cu"]] if ended else [KERNELS]
    assert children.tried == first + [["contrast.cu"]] * (not kept)
    if kept:
        assert not resolved(config, settle(config, sizes)).meta.cuda_graph


@pytest.mark.slow
def test_settle_where_no_process_can_be_started_uses_pytorchs_operators(monkeypatch):
    monkeypatch.setattr(processes.subprocess, "Popen", lambda *_, **__: os.read(-1, 1))  # an OSError
    found = settle(*paper("meta.cuda_graph=false"))
    assert {path for path, reason in found.items() if reason} == {*KERNELS, GRAPH}
    assert found["norm.cu"].startswith("the process that tried it cannot be started: ")


@pytest.mark.slow
def test_continued_run_tries_no_path_that_it_was_started_without(monkeypatch, capsys):
    children = Children(monkeypatch, lars_cu=SLOW)
    before = {"lars.cu": True, "contrast.cu": True, "norm.cu": False, GRAPH: False}
    found = settle(*paper(), before)
    assert children.tried == [["lars.cu", "contrast.cu"]]
    assert found == {"lars.cu": SLOW.reason, "contrast.cu": None, "norm.cu": STAYS_OFF, GRAPH: STAYS_OFF}
    assert self_test._reasons["norm.cu", CARD] == STAYS_OFF
    assert "lars.cu: used before and not here" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "graph", "reason"),
    [
        (
            (),
            {"problem": "6 steps gave other bits than without it"},
            "6 steps gave other bits than without it",
        ),
        ((), {"base": [1.0] * 8, "contender": [1.2] * 4}, "it is slower: 1.20 times as long a step"),
        ((), {"base": [1.0] * 8, "contender": [1.01] * 4}, None),
        (("criterion.unsupervised_batch_size=11264",), None, "392 views a process keep the GPU busy"),
        (("criterion.micro_batch=192",), None, "it has not been tried with criterion.micro_batch"),
    ],
)
def test_graph_is_tried_where_a_process_has_few_views(monkeypatch, words, graph, reason):
    Children(monkeypatch, graph)
    config, sizes = paper(*words)
    assert (sizes.samples(0) // 64 > GRAPH_VIEWS) == ("busy" in (reason or ""))
    found = settle(config, sizes)[GRAPH]
    assert found == reason if reason is None else found.startswith(reason)


@pytest.mark.slow
def test_written_graph_that_fails_its_trial_is_refused(monkeypatch):
    Children(monkeypatch, {"problem": "rank 1: was killed by SIGKILL: no output", "final": False})
    with pytest.raises(ConfigError, match=r"could not use it: rank 1: was killed .*\. Write auto"):
        settle(*paper("meta.cuda_graph=true"))


@pytest.mark.slow
def test_too_many_activations_are_refused_before_any_trial(monkeypatch):
    """Fused BatchNorm counts in 64 bits, so its trial decides."""
    children = Children(monkeypatch, norm_cu=SLOW)
    words = ("criterion.supervised_epochs=0", "data.split.kind=none", "data.split.file=null")
    for fused in ("false", "auto"):
        config, sizes = paper(*words, f"model.fused_batchnorm={fused}", world_size=1)
        with pytest.raises(ConfigError, match="counts them in 32 bits"):
            settle(config, sizes)
        assert len(children.tried) == (fused == "auto")


@pytest.mark.slow
def test_step_that_no_card_holds_is_refused_before_any_trial(monkeypatch):
    """The paper's batch on one H200, and in pieces."""
    children = Children(monkeypatch)
    monkeypatch.setattr(verdicts, "describe_machine", lambda device: {**MACHINE, "memory": 141 * 10**9})
    with pytest.raises(
        ConfigErrors, match=r"about 364 GB, and the GPU has 141 GB\. Set\s+criterion.micro_batch=512"
    ):
        settle(*paper(world_size=1))
    assert children.tried == []
    assert settle(*paper("criterion.micro_batch=512", world_size=1))["norm.cu"] is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cards", "tried", "seconds", "graph"),
    [
        (8, [KERNELS], 25, "1,024 views a process keep the GPU busy; `fastsuncet tune` tries it"),
        (16, [KERNELS], 25, "512 views a process keep the GPU busy; `fastsuncet tune` tries it"),
        (64, [KERNELS, GRAPH], 40, None),
    ],
)
def test_paper_starts_processes_on_its_first_start_only(monkeypatch, cards, tried, seconds, graph):
    """`in1k_10pct` on H100s, the table of docs/gpu.md. On one the step does not fit, see above."""
    children = Children(monkeypatch)
    monkeypatch.setattr(verdicts, "describe_machine", lambda device: {**MACHINE, "memory": 80 * 10**9})
    config, sizes = paper(world_size=cards)
    for _ in range(2):
        paths = settle(config, sizes)
        assert (children.tried, children.seconds) == (tried, seconds)
        assert paths == {**dict.fromkeys(KERNELS), GRAPH: graph}
    fast = resolved(config, paths)
    line = f"lars.cu, contrast.cu, norm.cu{'' if graph else ', CUDA graph'}"
    assert describe(fast, paths).startswith(line) and fast.model.fused_batchnorm is True


# ------------------------------------------------------------------------------------------------------ the files
KEY = {"path": "x.cu", "shapes": (1, 2)}
KEPT = Verdict("slower", [2.0, 1.0])


def test_verdict_is_kept_whole_and_for_its_key_only(capsys):
    assert verdicts.read(KEY) is None and capsys.readouterr().out == ""
    verdicts.keep(KEY, KEPT)
    assert verdicts.read(KEY) == KEPT and verdicts.read({**KEY, "shapes": [1, 3]}) is None
    (file,) = verdicts.file_of(KEY).parent.iterdir()
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700


def link(file):
    file.rename(file.with_suffix(".other"))
    file.symlink_to(file.with_suffix(".other"))


def fifo(file):
    file.unlink()
    os.mkfifo(file)


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda file: file.chmod(0o620), "other users can write it (mode 620)"),
        (link, "symbolic links"),
        (fifo, "not a regular file"),
        (lambda file: file.write_bytes(file.read_bytes() + b" " * verdicts.LIMIT), "bytes; at most 65,536"),
        (lambda file: file.write_bytes(file.read_bytes()[:-9]), "delimiter"),
        (lambda file: file.write_bytes(b"[]"), "list indices"),
        (lambda file: file.write_text(file.read_text().replace('"slower"', "7")), "for something else"),
        (lambda file: file.write_text(file.read_text().replace("x.cu", "y.cu")), "for something else"),
    ],
)
def test_verdict_that_is_not_safe_or_not_whole_is_absent_and_said(spoil, problem, capsys):
    verdicts.keep(KEY, KEPT)
    spoil(verdicts.file_of(KEY))
    assert verdicts.read(KEY) is None
    said = capsys.readouterr().out
    assert said.startswith("speed: no verdict kept: ") and problem in said
    # The next trial replaces it.
    verdicts.keep(KEY, KEPT)
    assert verdicts.read(KEY) == KEPT


@pytest.mark.parametrize("error", [OSError("no space left"), RuntimeError("no home directory")])
def test_run_needs_no_folder_for_its_verdicts(monkeypatch, capsys, error):
    def fails(*_):
        raise error

    monkeypatch.setattr(verdicts.code_cache, "cache_folder", fails)
    assert verdicts.read(KEY) is None
    verdicts.keep(KEY, KEPT)
    assert f"x.cu cannot be kept for later runs: {error}" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------------ the ranks
def settle_on_a_rank(rank, world_size, folder, cards):
    """Each rank has its own card; the kernel is slow on card "b"."""
    from pathlib import Path

    with pytest.MonkeyPatch.context() as patch:
        pretend(patch, Path(folder), {**MACHINE, "card": cards[rank]})
        children = Children(patch, **({"lars_cu": SLOW} if cards[rank] == "b" else {}))
        config, sizes = paper("meta.cuda_graph=false", world_size=world_size)
        paths = verdicts.settle(config, sizes, Place(rank, world_size, 0, CARD), [128] * 1000, {})
        return len(children.tried), paths["lars.cu"], self_test._reasons["lars.cu", CARD]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cards", "tried", "reason"), [("aa", [1, 0], None), ("ab", [1, 1], f"rank 1: {SLOW.reason}")]
)
def test_first_rank_of_each_card_decides_and_all_ranks_agree(tmp_path, cards, tried, reason):
    found = run_ranks(settle_on_a_rank, 2, str(tmp_path), cards)
    assert found == [(count, reason, reason) for count in tried]


def settle_while_one_rank_stops(rank, world_size, folder):
    """A written graph whose trial is ended by a signal to rank 1."""
    from pathlib import Path

    with pytest.MonkeyPatch.context() as patch:
        pretend(patch, Path(folder))
        Children(patch, {"problem": "was stopped, or took too long", "final": False})
        config, sizes = paper("meta.cuda_graph=true", world_size=world_size * 32)
        place = Place(rank, world_size, 0, CARD)
        paths = verdicts.settle(config, sizes, place, [128] * 1000, {}, lambda: rank == 1)
        return paths[GRAPH]


@pytest.mark.slow
def test_stop_of_one_rank_is_no_failed_graph_on_another(tmp_path):
    """Both ranks go on to the place where a run stops."""
    first, second = run_ranks(settle_while_one_rank_stops, 2, str(tmp_path))
    assert first == second == "was stopped, or took too long"


def test_view_operator_is_on_if_it_passed(monkeypatch):
    from fastsuncet.training import kernel_choice

    config, _ = paper("data.view_operator=auto")
    for reason, operator in ((None, True), ("no C++ compiler", "auto")):
        paths = kernel_choice.agree(Place(0, 1, 0, CARD), {VIEW: reason})
        assert resolved(config, paths).data.view_operator == operator
        assert (0 in use.proved) == (reason is None)
        use.proved.clear()


def test_kept_files_are_json_that_a_person_can_read():
    verdicts.keep(KEY, KEPT)
    assert json.loads(verdicts.file_of(KEY).read_text())["reason"] == "slower"
