"""examples/shared_prefix: that cascade attention is the plain call, and that the script would say so if it were not."""

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "shared_prefix" / "cascade.py"
spec = importlib.util.spec_from_file_location("cascade", SCRIPT)
cascade = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cascade)

SMALL = ["--sequences", "3", "--prefix", "64", "--own", "8", "--heads", "4", "--kv-heads", "2"]


def test_both_ways_agree(capsys):
    assert cascade.main(SMALL) == 0
    printed = capsys.readouterr().out
    assert "3 sequences, 64 shared keys, 6 to 8 own ones, 4 heads on 2; cpu" in printed
    kib = 2 * 2 * 128 * 4 / 1024  # of a token's K and V
    own = 8 + 7 + 6
    assert f"plain    reads {(3 * 64 + own) * kib / 1024:8.1f} MiB" in printed
    assert f"cascade  reads {(64 + own) * kib / 1024:8.1f} MiB" in printed


def test_a_forgotten_prefix_is_seen(monkeypatch):
    monkeypatch.setattr(cascade.narrows, "merge", lambda parts: parts[1])
    assert cascade.main(SMALL) == 1
