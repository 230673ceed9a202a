"""examples/transformer: that it trains, tells runs apart, and judges their distance."""

import importlib.util
import json
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")

SCRIPT = Path(__file__).parents[2] / "examples" / "transformer" / "train.py"
spec = importlib.util.spec_from_file_location("train", SCRIPT)
train = importlib.util.module_from_spec(spec)
spec.loader.exec_module(train)

SMALL = ["--device", "cpu", "--context", "32", "--batch", "2", "--layers", "1", "--heads", "1"]


def test_a_few_steps(tmp_path, capsys):
    path = tmp_path / "result.json"
    runs = ["narrows", "torch", "three_kernels"]
    train.main([*SMALL, "--steps", "30", "--json", str(path), "--runs", *runs])
    result = json.loads(path.read_text())
    assert list(result["runs"]) == runs and result["left_out"] == {}
    for run in result["runs"].values():
        assert len(run["losses"]) == 30 and run["losses"][-1] < run["losses"][0] - 0.2
        assert run["tokens_per_second"] > 0 and run["peak_bytes"] is None
    assert 0 < result["distances"]["narrows torch"]["max"] < 1e-4  # neither is the other
    assert result["noise"] == result["distances"]["torch three_kernels"]["mean"]
    printed = capsys.readouterr().out
    assert f"{result['runs']['narrows']['losses'][29]:.5f}" in printed and "twice the noise" in printed


def runs_of(**shifts):
    return {name: {"losses": [1.0 + shift, 2.0 - shift]} for name, shift in shifts.items()}


@pytest.mark.parametrize(("narrows", "within"), [(0.25, True), (-0.5, True), (0.75, False)])
def test_the_judgement(narrows, within):
    result = train.compared(runs_of(torch=0.0, narrows=narrows, flash=0.125, three_kernels=-0.125))
    assert result["noise_of"] == "flash three_kernels" and result["noise"] == 0.25
    assert (result["narrows"], result["within_noise"]) == (abs(narrows), within)
    assert result["distances"]["torch narrows"] == {"mean": abs(narrows), "max": abs(narrows)}


def test_without_noise_to_judge_by():
    assert "within_noise" not in train.compared(runs_of(torch=0.0, narrows=1.0))
    exact = {"torch": 0.0, "flash": 0.0}
    assert train.compared(runs_of(narrows=0.0, **exact))["within_noise"] is True
    assert train.compared(runs_of(narrows=1e-9, **exact))["within_noise"] is False
