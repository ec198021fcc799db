"""Every case of the benchmarks compares equals, and reports what it measured."""

import re
import sys
from datetime import date

import pytest
import torch

from fastsuncet import load_config, nt_xent
from fastsuncet.distributed.place import Place
from fastsuncet.errors import FastSuncetError
from fastsuncet.optim import lars_kernel
from fastsuncet.tuning.paths import PATHS, VIEW
from pipelines import cuda_compiler
from tests.support.host_kernels import on_the_host
from tests.support.pictures import write_pictures
from tools.bench import contrast, harness, lars, peers, pixels, run, step

pytestmark = pytest.mark.slow


@pytest.fixture
def rows_of(capsys, monkeypatch):
    """Run a case with --quick; return its tables' rows as {name: {head: cell}}, in order, and what it printed."""
    monkeypatch.setattr(harness, "settle", lambda: None)  # test_harness.py waits for workers

    def rows(case, *more):
        assert run.main([case, *more, "--quick"]) == 0
        text = capsys.readouterr().out
        assert text.startswith(f"{date.today()}, ") and f"torch {torch.__version__}" in text
        found, head = [], []
        for line in text.splitlines():
            cells = [cell.strip() for cell in line[1:-1].split(" | ")] if line.startswith("| ") else []
            if cells and not cells[0]:
                head = cells
            elif cells and cells[0] != "---":
                found.append(dict(zip(head, cells, strict=True)))
        return found, text

    return rows


def median_of(cell: str) -> float:
    return float(cell.split(" (")[0].replace(",", ""))


@pytest.mark.parametrize("case", run.CASES)
def test_case_has_a_help(case, capsys):
    with pytest.raises(SystemExit, match="0"):
        run.main([case, "--help"])
    assert f" {case} [-h]" in (said := capsys.readouterr().out) and "--quick" in said


@pytest.mark.parametrize("loss", contrast.DENSE)
def test_contrast_authors_form_has_our_value_and_gradient(loss):
    results = []
    for prepare in contrast.contenders(loss).values():
        z, ids = contrast.inputs(loss, 512 if loss == "paws" else 64)
        results.append((contrast.forward_backward(prepare(ids), z), z.grad))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4 * ours.abs().max().item())
    assert results[0][1].norm() > 0.001


@pytest.mark.parametrize("name", [lars.TIMM, lars.KERNEL])
def test_lars_contender_takes_the_steps_of_foreach(name):
    def after_three_steps(contender):
        params = lars.parameters("resnet_tiny")[:9]
        with torch.no_grad():
            params[1].zero_()  # a norm of 0 is a case of its own in every implementation
        step = lars.contenders(params, kernel=contender == lars.KERNEL)[contender]
        for _ in range(3):
            step()
        return [p.detach() for p in params]

    begin = lars.parameters("resnet_tiny")
    with on_the_host(lars_kernel):  # the kernel's own source, thread for thread on the CPU
        ours, peer = after_three_steps(lars.OURS), after_three_steps(name)
    assert max((a - b).norm() / b.norm() for a, b in zip(ours, begin) if b.norm() > 0) > 1e-4
    torch.testing.assert_close(peer, ours, rtol=1e-5, atol=1e-6)


def test_dense_nt_xent_is_our_loss():
    z = torch.randn(12, 7, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(step.dense_nt_xent(*z.chunk(2), 0.2), nt_xent(z, 0.2))


@pytest.mark.parametrize("blur", pixels.TARGETS)
@pytest.mark.parametrize("engine", pixels.DATA_LOADERS)
def test_data_loader_gives_two_different_views_in_0_to_1(engine, blur, tmp_path):
    write_pictures(tmp_path, 1)
    files = pixels.Files(list(tmp_path.rglob("*.jpg")), pixels.two_views(engine, blur))
    one, other = files[0]
    for view in (one, other):
        assert view.shape == (3, 224, 224) and view.dtype == torch.float32
        assert 0 <= view.min() < view.max() <= 1
    assert not torch.equal(one, other)


def test_contrast_reports_time_memory_operators_and_waits(rows_of):
    rows, _ = rows_of("contrast")
    assert [row[""] for row in rows] == [contrast.OURS, contrast.AUTHORS] * len(contrast.DENSE)
    for row in rows:
        assert median_of(row["CPU ms"]) > 0 and int(row["operators"]) > 10 and row["host waits"] == "0"
    assert float(rows[1]["memory, MB"]) > 4 * float(rows[0]["memory, MB"])


def test_lars_reports_time_operators_waits_and_bytes(rows_of):
    found, text = rows_of("lars", "--device", "cpu")
    ours, timm, _ = found
    assert [row[""] for row in found] == [lars.OURS, lars.TIMM, lars.SGD] and "64 tensors" in text
    assert int(ours["operators"]) <= 30 and ours["host waits"] == "0"
    assert float(ours["moved, MB"]) < float(timm["moved, MB"])
    assert "no 'fastsuncet kernel': it needs a CUDA device" in text
    assert re.search(r"^(met|MISSED): time of timm's Lars, times ours: .*, target at least 1$", text, re.M)


def test_step_reports_speed_operators_and_waits(rows_of, monkeypatch):
    """Of one network and one stream for each settings: two graphs and the plain step would not fit a card."""
    build, built, read, steps = step.build, [], step.PairedStream.__call__, {}
    monkeypatch.setattr(step, "build", lambda *given: built.append(given) or build(*given))

    def recorded(stream, number):
        steps.setdefault(stream, []).append(number)
        return read(stream, number)

    monkeypatch.setattr(step.PairedStream, "__call__", recorded)
    more = "meta.deterministic=false"
    found, text = rows_of("step", "digits_demo", "--against", more, "--device", "cpu")
    assert [config.meta.deterministic for config, *_ in built] == [True, False]
    assert len(steps) == 2 and all(each == list(range(len(each))) for each in steps.values())
    rows = {row[""]: row for row in found}
    assert "a step of 256 views" in text
    assert all(median_of(row["views/s"]) > 0 for row in found)
    assert rows[step.FIXED]["x one fixed batch"] == "1 (1-1)" and rows[step.FIXED]["host waits"] == "0"
    assert 100 < int(rows[step.FIXED]["operators"]) <= 320 and not rows[step.END_TO_END]["operators"]
    names = {f"{name}{words}" for name in (step.FIXED, step.END_TO_END) for words in ("", f", {more}")}
    assert rows.keys() - {step.PLAIN} == names


@pytest.mark.parametrize("missing", [None, "no compiler"])
def test_step_on_a_gpu_is_that_of_a_run_whose_trials_pass(monkeypatch, missing):
    monkeypatch.setitem(PATHS, VIEW, PATHS[VIEW]._replace(missing=lambda: missing))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(cuda_compiler, "unavailable", lambda: None)
    monkeypatch.setattr(step, "PairedStream", lambda config, *_: lambda step: config.data.view_operator)
    config = load_config("digits_demo", ["meta.precision=bf16"])
    bench, _ = step.StepBench.open(config, Place(0, 1, torch.device("cuda", 0)))
    assert bench.batch is (missing is None) and bench.config.model.fused_batchnorm is True


def test_pixels_reports_speed_and_cpu_time_against_the_peer(rows_of):
    (peer, ours), text = rows_of("pixels")
    assert peer["x peer, wall"] == "" and median_of(ours["x peer, wall"]) > 0
    assert all(median_of(row[head]) > 0 for row in (peer, ours) for head in ("images/s", "CPU ms/image"))
    assert "8 files" in text and "images/s over DataLoader, v2 on tensors, blur 23" in text


def test_peers_trains_ours_on_any_tree_and_needs_lightly_for_the_rest(tmp_path, monkeypatch):
    write_pictures(tmp_path, 8, side=40)
    config = peers.config_of(str(tmp_path), 32, "resnet_tiny", 4)
    assert config.data.augmentation.blur == 0 and config.criterion.supervised_epochs == 0
    bench, stream = step.StepBench.open(config, Place(0, 1, torch.device("cpu")))
    assert bench.ours(stream)().isfinite().all()
    stream.close()
    monkeypatch.setitem(sys.modules, "lightly.loss", None)
    with pytest.raises(FastSuncetError, match="lightly cannot be imported"):
        run.main(["peers", str(tmp_path)])
