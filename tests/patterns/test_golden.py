"""Spec text means what it meant in all earlier versions: golden.json."""

import json
import re

import chosen
import golden
import pytest

import sparse_flash as sf
from sparse_flash import patterns

KNOWN = json.loads(golden.FILE.read_text())


@pytest.mark.parametrize("text", KNOWN)
def test_text_of_earlier_versions_reads_back_and_keeps_what_it_kept(text):
    said = (
        f"{text!r} means something else than in earlier versions, whose users saved it with their models. Do not change "
        "golden.json: give what is new another name, or a field whose default keeps the old meaning (see CONTRIBUTING.md)"
    )
    assert sf.parse(text).to_spec() == text and golden.golden(text).items() <= KNOWN[text].items(), said


def test_every_built_in_pattern_and_chooser_that_has_a_meaning_by_its_text_is_in_the_file():
    assert set(golden.specs()) <= set(KNOWN), "run `make golden`, which adds what is missing"
    named = set(re.findall(r"[a-z_]+", " ".join(KNOWN)))
    assert {*patterns.__all__, *chosen.BUILT_IN} - named == {"from_mask_fn", "scored"}
