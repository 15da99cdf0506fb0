"""Keywords that users of other libraries type get helpful errors, and text mixes with patterns."""

import inspect
import re
from pathlib import Path

import pytest
import torch

import sparse_flash as sf
from sparse_flash.api.keywords import _WRITE_INSTEAD

Q = torch.randn(1, 2, 8, 16)
CALLS = {
    "attention": (sf.attention, (Q, Q, Q)),
    "attention_varlen": (sf.attention_varlen, (Q[0].transpose(0, 1),) * 3 + (torch.tensor([0, 8]),)),
    "attention_decode": (sf.attention_decode, (Q, Q, Q)),
}


@pytest.mark.parametrize(
    "name, keyword, instead",
    [
        ("attention", "is_causal", 'mask="causal"'),
        ("attention", "enable_gqa", "leave it out"),
        ("attention", "window_size", "local(w)"),
        ("attention", "sm_scale", "scale="),
        ("attention", "return_attn_probs", "return_lse=True"),
        ("attention", "causl", "did you mean 'causal'?; pass mask=\"causal\""),
        ("attention", "attn_mask", "BlockMask.from_dense"),
        ("attention", "block_mask", "mask="),
        ("attention", "mask_mod", "BlockMask.from_mask_mod"),
        ("attention", "cache_seqlens", "kv_lens="),
        ("attention", "block_size", "block_size=...); a chooser has its own, as in sampled(8, keep=0.1, block=64)"),
        ("attention", "max_seqlen", "attention_varlen"),
        ("attention_decode", "is_causal", "it takes q, k, v,"),
        ("attention_varlen", "cu_seqlens", "did you mean 'cu_seqlens_q'?"),
        *((name, "backened", "did you mean 'backend'?") for name in CALLS),
        *((name, "zzz", "it takes q, k, v,") for name in CALLS),
    ],
)
def test_a_keyword_that_a_function_does_not_take_gets_an_error_that_says_what_to_write(name, keyword, instead):
    call, arguments = CALLS[name]
    said = rf"{name}\(\) got an unexpected keyword argument '{keyword}'; {keyword}: .*{re.escape(instead)}"
    with pytest.raises(TypeError, match=said):
        call(*arguments, **{keyword: None})


def test_advice_names_keywords_that_attention_takes():
    known = inspect.signature(sf.attention).parameters
    for advice in _WRITE_INSTEAD.values():
        assert set(re.findall(r"pass (\w+)=", advice)) <= set(known), advice


@pytest.mark.parametrize("keyword, instead", [("block_size", "as in sampled(8, keep=0.1, block=64)"), ("kep", "it takes spec, q")])
def test_blocks_beside_a_chooser_are_an_error_that_says_where_they_go(keyword, instead):
    with pytest.raises(TypeError, match=rf"choose_blocks\(\) got an unexpected .* '{keyword}'; .*{re.escape(instead)}"):
        sf.choose_blocks("causal & sampled(8, keep=0.1)", Q, Q, **{keyword: 64})
    with pytest.raises(ValueError, match="block= in the chooser says the size of blocks"):
        sf.compile_mask("causal & sampled(8, keep=0.1)", 640, block_size=64)


def test_torch_compile_says_what_to_write_too():
    with pytest.raises(Exception, match='is_causal: pass mask="causal"'):
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
from sparse_flash.api.keywords import _WRITE_INSTEAD
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


def test_type_checkers_reject_a_misspelt_keyword_and_no_other_line(monkeypatch, tmp_path):
    mypy = pytest.importorskip("mypy.api")
    (tmp_path / "settings.ini").write_text(SETTINGS)
    (tmp_path / "calls.py").write_text(LINES)
    monkeypatch.setenv("MYPYPATH", str(Path(sf.__file__).parents[1]))
    monkeypatch.chdir(tmp_path)
    found, _, _ = mypy.run(["--config-file=settings.ini", "--cache-dir=cache", "calls.py"])
    wrong = [number for number, line in enumerate(LINES.splitlines(), 1) if "# wrong" in line]
    assert re.findall(r"^calls.py:(\d+): error: Unexpected keyword argument", found, re.M) == list(map(str, wrong)), found
    assert found.count("error:") == len(wrong), found


@pytest.mark.parametrize("name", CALLS)
def test_the_signature_shows_the_named_arguments_alone(name):
    parameters = inspect.signature(CALLS[name][0]).parameters.values()
    assert "backend" in {p.name for p in parameters}
    assert all(p.kind is not p.VAR_KEYWORD for p in parameters)


def test_text_stands_beside_a_pattern_on_either_side():
    expected = sf.parse("causal & local(4)")
    assert sf.causal() & "local(4)" == "local(4)" & sf.causal() == expected
    assert sf.causal() | "local(4)" == "local(4)" | sf.causal() == sf.parse("causal | local(4)")
    assert (sf.causal() & "local(4) | sinks(2)") == sf.parse("causal & (local(4) | sinks(2))")
    with pytest.raises(ValueError, match="did you mean 'local'"):
        sf.causal() & "lokal(4)"
    with pytest.raises(TypeError, match="unsupported operand"):
        sf.causal() & 4
