"""Which fast paths a run uses, and why: by the table, kept verdicts, and those of children, which are stubs here."""

import os
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from fastsuncet.config import ConfigErrors
from fastsuncet.distributed.place import Place
from fastsuncet.errors import ConfigError
from fastsuncet.kernels import switches
from fastsuncet.optim import lars_kernel
from fastsuncet.tuning import fast_paths, processes, verdicts
from fastsuncet.tuning.fast_paths import APEX, GRAPH, GRAPH_VIEWS, PATHS, STAYS_OFF, VIEW, describe, resolved
from fastsuncet.tuning.verdicts import Verdict
from pipelines import cuda_compiler
from pipelines.dali.view_operator import use
from tests.support.pretended import CARD, Children, paper, pretend
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow
KERNELS = ["lars.cu", "contrast.cu", "norm.cu"]
NO_GRAPH = "meta.cuda_graph=false"
SLOW = Verdict("slower than without it: 2 ms against 1 ms")
FULL = Verdict("the device has too little memory for the trial of norm.cu", final=False)


@pytest.fixture(autouse=True)
def _one_machine(tmp_path, monkeypatch):
    pretend(monkeypatch, tmp_path)


def choose(config, arithmetic, before=None, ranks=1):
    return fast_paths.choose(config, arithmetic, Place(0, ranks, CARD), [128] * 1000, before or {})


def used(found: fast_paths.Paths) -> list[str]:
    assert list(found) == list(PATHS)
    return [path for path, reason in found.items() if reason is None]


def test_paths_table_is_that_of_the_docs():
    page = (Path(__file__).parents[2] / "docs" / "speed.md").read_text()
    rows = re.findall(r"^\| `(.+?)` \| .+? \| .+? \| (.*?) \|$", page, re.M)
    assert rows == [(name, f"`{path.key}`" if path.key else "") for name, path in PATHS.items()]


@pytest.mark.parametrize(
    ("words", "path", "reason"),
    [
        ("optimization.optimizer=adamw", "lars.cu", "optimization.optimizer is adamw"),
        ("optimization.optimizer=adamw", APEX, "optimization.optimizer is adamw"),
        ("meta.cuda_graph=auto", APEX, "a CUDA graph reads the rate on the GPU"),
        ("criterion.supervised_epochs=0", "contrast.cu", None),  # SimCLR contrasts too
        ("criterion.instance=swav criterion.supervision=cross_entropy", "contrast.cu", "no contrastive loss"),
        ("meta.compile=true", "norm.cu", "meta.compile makes its own"),
        ("model.name=timm/test_vit", "norm.cu", "the network has no BatchNorm"),
        ("model.fused_batchnorm=false", "norm.cu", None),  # statistics over ranks
        ("model.fused_batchnorm=false model.sync_batchnorm=false", "norm.cu", "fused_batchnorm is false"),
        # The head's activations are rows of channels in any memory format.
        ("meta.channels_last=false model.head_batchnorm=true", "norm.cu", None),
        ("meta.channels_last=false", "norm.cu", "meta.channels_last is false"),
        ("data.backend=torchvision data.view_operator=auto", VIEW, "data.backend is torchvision"),
        ("data.view_operator=auto data.augmentation.blur_window=65", VIEW, None),
        # By a limit of view.cu, which the trial does not meet.
        ("data.view_operator=auto data.augmentation.blur_window=67", VIEW, "asks for 67"),
        ("data.view_operator=auto data.augmentation.blur_window=67 data.augmentation.blur=0", VIEW, None),
        ("meta.cuda_graph=false", GRAPH, "meta.cuda_graph is false"),
        ("criterion.unsupervised_batch_size=11264", GRAPH, "392 views a process keep the GPU busy"),
        ("criterion.micro_batch=192", GRAPH, "it has not been tried with criterion.micro_batch"),
    ],
)
def test_path_is_excluded_by_the_config_with_its_reason(words, path, reason):
    config, sizes = paper(64, *words.split())
    found = PATHS[path].excluded(config, sizes)
    assert found == reason if reason is None else reason in found
    if path == GRAPH:
        assert (sizes.update_views(True) // 64 > GRAPH_VIEWS) == ("busy" in reason)


def test_choose_tries_each_path_once_for_a_machine_and_shapes(monkeypatch, capsys):
    children = Children(monkeypatch)
    config, sizes = paper(64)
    choose(config, sizes)
    assert "speed: tries lars.cu, contrast.cu, norm.cu" in capsys.readouterr().out
    choose(config, sizes)
    assert children.tried == [KERNELS, GRAPH] and capsys.readouterr().out == ""
    # Other shapes, another card, another program.
    choose(*paper(64, "criterion.unsupervised_batch_size=1408"))
    assert children.tried[2:] == [["contrast.cu", "norm.cu"], GRAPH]
    choose(*paper(64, "data.augmentation.size=160"))
    assert GRAPH in children.tried[4:]
    del children.tried[4:]
    monkeypatch.setattr(verdicts, "describe_machine", lambda device: {"memory": 1 << 50, "driver": "2"})
    choose(config, sizes)
    assert children.tried[4:] == [KERNELS, GRAPH]


KILLED = "the process that tried it was killed by SIGSEGV: no output"


@pytest.mark.parametrize(
    ("found", "reason", "kept"),
    [(SLOW, SLOW.problem, True), (FULL, FULL.problem, False), ("SIGSEGV", KILLED, False)],
)
def test_path_that_fails_is_off_and_tried_again_unless_it_was_measured(monkeypatch, found, reason, kept):
    children = Children(monkeypatch, contrast_cu=found)
    config, sizes = paper(64, NO_GRAPH)
    for _ in range(2):
        chosen = choose(config, sizes)
        assert used(chosen) == ["lars.cu", "norm.cu"]
        assert chosen["contrast.cu"] == switches._reasons["contrast.cu", CARD] == reason
    first = [KERNELS, ["norm.cu"]] if isinstance(found, str) else [KERNELS]
    assert children.tried == first + [["contrast.cu"]] * (not kept)


@pytest.mark.parametrize(("timeout", "seconds"), [(1800, [600, 300, 150]), (400, [200, 100, 50])])
def test_kernels_that_hang_leave_time_for_the_others(monkeypatch, timeout, seconds):
    """The first process has all the time that a slow compiler needs, and all together twice that.

    All together end before the ranks that wait for them.
    """
    children = Children(monkeypatch, lars_cu="SIGKILL", contrast_cu="SIGKILL", norm_cu="SIGKILL")
    allowed = []
    monkeypatch.setattr(processes, "limited", lambda seconds, stopped: allowed.append(seconds))
    monkeypatch.setattr(fast_paths, "time", SimpleNamespace(monotonic=lambda: sum(allowed)), raising=False)
    choose(*paper(64, NO_GRAPH, f"meta.timeout={timeout}"))
    assert children.tried == [KERNELS, KERNELS[1:], KERNELS[2:]] and allowed == seconds


def test_choose_where_no_process_can_be_started_uses_pytorchs_operators(monkeypatch):
    monkeypatch.setattr(processes.subprocess, "Popen", lambda *_, **__: os.read(-1, 1))  # an OSError
    found = choose(*paper(64, NO_GRAPH))
    assert used(found) == []
    assert found["norm.cu"].startswith("the process that tried it cannot be started: ")


def test_choose_where_kernels_are_off_or_cannot_be_compiled_tries_none(monkeypatch):
    children = Children(monkeypatch)
    monkeypatch.setattr(cuda_compiler, "unavailable", lambda: "no NVRTC")
    assert [choose(*paper(64, NO_GRAPH))[path] for path in KERNELS] == ["no NVRTC"] * 3
    monkeypatch.setenv("FASTSUNCET_KERNELS", "off")
    found = choose(*paper(64, NO_GRAPH, "data.view_operator=auto"))
    assert {found[path] for path in (*KERNELS, VIEW, APEX)} == {"FASTSUNCET_KERNELS is off: unset it"}
    assert children.tried == []


def test_continued_run_obeys_what_was_chosen(monkeypatch, capsys):
    """It tries no path that it was started without."""
    children = Children(monkeypatch, lars_cu=SLOW)
    before = {"lars.cu": True, "contrast.cu": True, "norm.cu": False, GRAPH: False}
    found = choose(*paper(64), before)
    assert children.tried == [["lars.cu", "contrast.cu"]] and used(found) == ["contrast.cu"]
    assert (found["lars.cu"], found["norm.cu"], found[GRAPH]) == (SLOW.problem, STAYS_OFF, STAYS_OFF)
    assert switches._reasons["norm.cu", CARD] == STAYS_OFF
    assert "lars.cu: used before and not here" in capsys.readouterr().out
    found = choose(*paper(64, "optimization.optimizer=adamw"), {"lars.cu": False})
    assert found["lars.cu"] == "optimization.optimizer is adamw"  # a new run could not use it either


@pytest.mark.parametrize(("lars", "chosen"), [(None, "lars.cu"), ("no NVRTC", APEX)])
def test_apex_is_used_where_it_is_installed_and_lars_cu_is_not(monkeypatch, lars, chosen):
    monkeypatch.setattr(lars_kernel, "apex", lambda: "amp_C")
    Children(monkeypatch, lars_cu=Verdict(lars))
    assert {"lars.cu", APEX} & {*used(choose(*paper(64, NO_GRAPH)))} == {chosen}


@pytest.mark.parametrize(
    ("graph", "ranks", "reason"),
    [
        ({"problem": "other bits"}, 1, "other bits"),
        ({"problem": "other bits"}, 2, "set NCCL_GRAPH_REGISTER=0 and start again"),
        ({"base": [1.0] * 8, "contender": [1.2] * 4}, 2, "without it: 1.2e+03 ms against 1e+03 ms"),
    ],
)
def test_graph_is_tried_where_a_process_has_few_views(monkeypatch, graph, ranks, reason):
    Children(monkeypatch, graph)
    assert choose(*paper(64), ranks=ranks)[GRAPH].endswith(reason)


def test_written_graph_that_fails_its_trial_is_refused(monkeypatch):
    Children(monkeypatch, {"problem": "rank 1: was killed by SIGKILL: no output", "final": False})
    with pytest.raises(ConfigError, match=r"could not use it: rank 1: was killed .*\. Write auto"):
        choose(*paper(64, "meta.cuda_graph=true"))


SIMCLR = ("criterion.supervised_epochs=0", "data.split.kind=none", "data.split.file=null")


def test_too_many_activations_are_refused_before_any_trial(monkeypatch):
    """Fused BatchNorm counts in 64 bits, so its trial decides."""
    children = Children(monkeypatch, norm_cu=SLOW)
    for fused in ("false", "auto"):
        config, sizes = paper(1, *SIMCLR, f"model.fused_batchnorm={fused}")
        with pytest.raises(ConfigError, match="counts them in 32 bits"):
            choose(config, sizes)
        assert len(children.tried) == (fused == "auto")


def test_batch_that_overflows_batchnorms_index_is_refused():
    """2,674 views of 64 x 112 x 112 activations are the last that 32 bits count."""
    config, sizes = paper(1, *SIMCLR)
    few, many = (replace(sizes, local_unlabeled=n) for n in (1337, 1338))
    fused = config.with_values({"model.fused_batchnorm": True})
    without = config.with_values({"model.name": "timm/test_vit"})
    for fits in ((config, few, {}), (fused, many, {"norm.cu": None}), (without, many, {})):
        fast_paths.check_int32(*fits)
    # torch's takes the place of kernels that are not used.
    for each, found in ((config, {}), (fused, {"norm.cu": "no NVRTC"})):
        with pytest.raises(ConfigError, match=r"2,676 views at a time.*\(2676, 64, 112, 112\).*2,674 views"):
            fast_paths.check_int32(each, many, found)


def test_step_that_no_card_holds_is_refused_before_any_trial(monkeypatch, tmp_path):
    """The paper's batch on one H200, and in pieces."""
    children = Children(monkeypatch)
    pretend(monkeypatch, tmp_path, memory=141 * 10**9)
    refused = r"364 GB, and the GPU has 141 GB\. Set\s+criterion.micro_batch=512"
    with pytest.raises(ConfigErrors, match=refused):
        choose(*paper(1))
    assert children.tried == []
    assert choose(*paper(1, "criterion.micro_batch=512"))["norm.cu"] is None


@pytest.mark.parametrize(
    ("cards", "tried", "seconds", "graph"),
    [
        (8, [KERNELS], 25, "1,024 views a process keep the GPU busy; `fastsuncet tune` tries it"),
        (64, [KERNELS, GRAPH], 40, None),
    ],
)
def test_paper_starts_processes_on_its_first_start_only(monkeypatch, tmp_path, cards, tried, seconds, graph):
    """`in1k_10pct` on H100s, the table of docs/gpu.md. On one the step does not fit, see above."""
    children = Children(monkeypatch)
    pretend(monkeypatch, tmp_path, memory=80 * 10**9)
    config, sizes = paper(cards)
    for _ in range(2):
        found = choose(config, sizes)
        assert (children.tried, children.seconds) == (tried, seconds)
        assert used(found) == KERNELS + [GRAPH] * (graph is None) and found[GRAPH] == graph
    fast = resolved(config, found)
    line = f"lars.cu, contrast.cu, norm.cu{'' if graph else ', CUDA graph'}; not apex: "
    assert describe(fast, found).startswith(line) and fast.written == config
    assert (fast.model.fused_batchnorm, fast.meta.cuda_graph) == (True, graph is None)


# ------------------------------------------------------------------------------------------------------ the ranks
# The cards of two ranks: lars.cu is slow on card "b", and on card "c" there is no compiler. How many tries each rank
# makes, and why lars.cu is off on both.
BY_COMPILER = "rank 1: no NVRTC"
CARDS = {"aa": ([1, 0], None), "ab": ([1, 1], f"rank 1: {SLOW.problem}"), "ac": ([1, 0], BY_COMPILER)}


def choose_on_a_rank(rank, world_size, folder):
    place, found = Place(rank, world_size, CARD), {}
    for cards in CARDS:
        with pytest.MonkeyPatch.context() as patch:
            pretend(patch, Path(folder, cards), card=cards[rank])
            if cards[rank] == "c":
                patch.setattr(cuda_compiler, "unavailable", lambda: "no NVRTC")
            children = Children(patch, **({"lars_cu": SLOW} if cards[rank] == "b" else {}))
            chosen = fast_paths.choose(*paper(32 * world_size, NO_GRAPH), place, [128] * 1000, {})
            found[cards] = len(children.tried), chosen["lars.cu"], switches._reasons["lars.cu", CARD]
    # A written graph whose trial is ended by a signal to rank 1.
    with pytest.MonkeyPatch.context() as patch:
        pretend(patch, Path(folder))
        Children(patch, {"problem": "was stopped, or took too long", "final": False})
        run = paper(world_size * 32, "meta.cuda_graph=true")
        found["stopped"] = fast_paths.choose(*run, place, [128] * 1000, {}, lambda: rank == 1)[GRAPH]
    return found


def test_kernel_that_one_rank_cannot_use_is_used_by_none(tmp_path):
    """The first rank of each kind of card tries it. After a stop of one rank both go on to where a run stops."""
    ranks = run_ranks(choose_on_a_rank, 2, str(tmp_path))
    for cards, (tried, reason) in CARDS.items():
        assert [found[cards] for found in ranks] == [(count, reason, reason) for count in tried], cards
    assert [found["stopped"] for found in ranks] == ["was stopped, or took too long"] * 2


@pytest.mark.parametrize("reason", [None, "other pixels"])
def test_view_operator_is_on_if_it_passed(monkeypatch, reason):
    monkeypatch.setattr(fast_paths, "dali_problem", lambda: None)
    monkeypatch.setattr(use, "state", lambda: ["library", None])
    Children(monkeypatch, view_cu=Verdict(reason))
    config, sizes = paper(64, NO_GRAPH, "data.view_operator=auto")
    found = choose(config, sizes)
    assert found[VIEW] == reason and (0 in use.proved) == (reason is None)
    assert resolved(config, found).data.view_operator == (reason is None)


def test_resolved_auto_is_what_the_paths_allow():
    chosen = {"norm.cu": None, GRAPH: "slower", VIEW: None}

    def fused(*words, found=chosen):
        return resolved(paper(1, *words)[0], found).model.fused_batchnorm

    assert fused() is True and fused(found={}) is False and fused(found={"norm.cu": "slower"}) is False
    assert fused("model.fused_batchnorm=false") is False and fused("meta.compile=true") is False
    # The kernels then compute the head's statistics over ranks.
    assert fused("meta.channels_last=false") is False and fused("model.name=timm/resnet18") is False
    assert fused("model.fused_batchnorm=true", found={"norm.cu": "slower"}) is True
    config = paper(1, "data.view_operator=auto")[0]
    for found, operator in ((chosen, True), ({}, "auto")):  # on a CPU it needs no trial
        fast = resolved(config, found)
        assert (fast.meta.cuda_graph, fast.data.view_operator) == (False, operator)
        assert fast.written == config and resolved(fast, {}).written == config


def test_describe_names_what_runs_and_why_not():
    config, _ = paper(1, "model.fused_batchnorm=true")
    found = {"lars.cu": None, "contrast.cu": None, "norm.cu": "rank 1: no NVRTC"}
    used, no_norm = "lars.cu, contrast.cu", "not norm.cu: rank 1: no NVRTC"
    compiled = "not torch.compile: `fastsuncet tune` tries it"
    assert describe(config, found) == f"{used}; {no_norm}; {compiled}"
    assert "model.fused_batchnorm has no effect" in describe(config, {})
    assert "PyTorch's operators; not x: y" in describe(config, {"x": "y"})
    for words, note in (
        ("meta.autotune=null", "; Inductor does not time its reductions (meta.autotune)"),
        ("meta.autotune=true", ""),
    ):
        line = describe(paper(1, "meta.compile=true", words)[0], found)
        assert line == f"{used}, torch.compile; {no_norm}{note}"
