"""The package itself: names, help, explain, info."""

import doctest
import importlib.metadata
import inspect
import re
from pathlib import Path

import numpy as np
import pytest
from reference import inputs

import narrows

ROOT = Path(__file__).parent.parent.parent


def test_doctests():
    for module in (narrows, narrows._api, narrows._backward, narrows._merge):
        result = doctest.testmod(module)
        assert result.failed == 0 and result.attempted > 0


def test_version():
    in_cmake = re.search(r"project\(narrows VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text()).group(1)
    assert narrows.__version__ == in_cmake == narrows.info().version
    assert importlib.metadata.version("narrows") == in_cmake


def test_every_field_of_the_header_is_an_argument():
    header = (ROOT / "include" / "narrows" / "narrows.hpp").read_text()
    fields = header.split("struct Options {")[1].split("\n};")[0]
    fields = re.sub(r"//.*", "", fields)
    names = {
        re.split("[={]", name)[0].strip(" *")
        for line in re.findall(r"^\s*[\w:<>]+\*? ([^;(]+);", fields, re.MULTILINE)
        for name in line.split(",")
    }
    own = {
        narrows.attention: {"q", "k", "v", "o", "lse", "return_lse"},
        narrows.attention_with_cache: {"q", "k_cache", "v_cache", "o", "lse", "return_lse"},
        narrows.attention_backward: {"q", "k", "v", "o", "lse", "dout", "dlse", "wanted", *narrows.Gradients._fields},
        **dict.fromkeys(
            (
                narrows.explain,
                narrows.prepare,
                narrows.prepare_backward,
                narrows.workspace_size,
                narrows.backward_workspace_size,
            ),
            {"q", "k", "v"},
        ),
    }
    for function, arguments in own.items():
        assert names and names | arguments == set(inspect.signature(function).parameters)
    explained = narrows.attention.__doc__ + narrows.attention_with_cache.__doc__
    assert [name for name in names if not re.search(rf"\b{name}\b", explained)] == []
    for function in (narrows.attention, narrows.attention_with_cache, narrows.attention_backward):
        assert [name for name in own[function] if not re.search(rf"\b{name}\b", function.__doc__)] == []


def test_every_function_has_help():
    functions = [x for x in map(narrows.__dict__.get, narrows.__all__) if inspect.isfunction(x)]
    assert len(functions) == 11 and all(function.__doc__ for function in functions)


def test_info():
    info = narrows.info()
    assert "cpu" in [family.name for family in info.families if family.available]
    assert info.threads >= 1 and info.cpu and info.instruction_set
    for part in (info.version, info.cpu, info.instruction_set, *(family.name for family in info.families)):
        assert part in str(info)


def test_explain():
    q, k, v = inputs(b=2, sq=9, sk=13, h=4, hk=2, d=16, dv=8)
    cost = narrows.explain(q, k, v, causal=True)
    pairs = 2 * 4 * sum(range(5, 14))
    assert cost.visible_pairs == pairs
    assert cost.flops == 2 * (16 + 8) * pairs
    assert cost.fused_bytes < cost.three_kernel_bytes
    assert cost.family == "cpu" and cost.limited_by in ("compute", "memory")
    assert cost.problem in str(cost)
    with pytest.raises(ValueError, match="^scale: nan: must be finite"):
        narrows.explain(q, k, v, scale=np.nan)
    wide = [x.reshape(1, 2, *x.shape[1:]) for x in (q, k, v)]
    assert narrows.explain(*wide, causal=True).visible_pairs == pairs
