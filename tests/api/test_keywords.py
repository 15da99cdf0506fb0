"""Keywords that users of other libraries type get helpful errors, and text mixes with patterns."""

import inspect
import re
from pathlib import Path

import pytest
import torch

import sparse_flash as sf
from sparse_flash.api.keywords import _ADVICE

Q = torch.randn(1, 2, 8, 16)


def test_advice_names_keywords_that_attention_takes():
    known = inspect.signature(sf.attention).parameters
    for advice in _ADVICE.values():
        assert set(re.findall(r"pass (\w+)=", advice)) <= set(known), advice


def test_torch_compile_says_what_to_write_too():
    with pytest.raises(Exception, match=r'is_causal.*pass mask="causal"'):
        torch.compile(lambda q: sf.attention(q, q, q, is_causal=True), backend="eager", fullgraph=True)(Q)


SETTINGS = """
[mypy]
ignore_missing_imports = True
[mypy-sparse_flash.*]
follow_imports = silent
[mypy-torch.*,numpy.*,scipy.*,triton.*,rich.*,matplotlib.*,transformers.*]
follow_imports = skip
"""
LINES = """
import sparse_flash as sf
from sparse_flash.parallel.plan import ContextPlan
def calls(q: object, plan: ContextPlan) -> None:
    sf.attention(q, q, q, "causal", scale=0.5, return_lse=True)
    sf.attention(q, q, q, causl=True)  # wrong
    sf.attention_varlen(q, q, q, q, mask="causal", max_seqlen_q=3)
    sf.attention_varlen(q, q, q, q, max_seqlens_q=3)  # wrong
    sf.attention_decode(q, q, q, kv_lens=q)
    sf.attention_decode(q, q, q, is_causal=True)  # wrong
    plan.attention(q, q, q, sinks=q)
    plan.attention(q, q, q, kv_lens=q)  # wrong
"""


def test_type_checkers_reject_only_the_misspelt_keyword(monkeypatch, tmp_path):
    mypy = pytest.importorskip("mypy.api")
    (tmp_path / "settings.ini").write_text(SETTINGS)
    (tmp_path / "calls.py").write_text(LINES)
    monkeypatch.setenv("MYPYPATH", str(Path(sf.__file__).parents[1]))
    monkeypatch.chdir(tmp_path)
    found, _, _ = mypy.run(["--config-file=settings.ini", "--cache-dir=cache", "calls.py"])
    wrong = [number for number, line in enumerate(LINES.splitlines(), 1) if "# wrong" in line]
    assert re.findall(r"^calls.py:(\d+): error: Unexpected keyword argument", found, re.M) == list(map(str, wrong)), found
    assert found.count("error:") == len(wrong), found


@pytest.mark.parametrize("call", [sf.attention, sf.attention_varlen, sf.attention_decode])
def test_the_signature_shows_only_named_arguments(call):
    parameters = inspect.signature(call).parameters.values()
    assert "backend" in {p.name for p in parameters}
    assert all(p.kind is not p.VAR_KEYWORD for p in parameters)


def test_spec_text_combines_with_a_pattern_on_either_side():
    expected = sf.parse("causal & local(4)")
    assert sf.causal() & "local(4)" == "local(4)" & sf.causal() == expected
    assert sf.causal() | "local(4)" == "local(4)" | sf.causal() == sf.parse("causal | local(4)")
    assert (sf.causal() & "local(4) | sinks(2)") == sf.parse("causal & (local(4) | sinks(2))")
    with pytest.raises(ValueError, match="did you mean 'local'"):
        sf.causal() & "lokal(4)"
