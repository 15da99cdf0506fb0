"""The documentation site, as far as it can be compared with the code without building it; `make docs` does the rest."""

import ast
import re
from pathlib import Path

import sparse_flash as sf
from sparse_flash.masks.registry import pattern_class
from sparse_flash.patterns import __all__ as pattern_names

DOCS = Path(__file__).parent.parent / "docs"
REFERENCE = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))


def test_the_reference_has_every_public_name_but_patterns():
    shown = set(re.findall(r"^::: (?:sparse_flash|benchmarks\.rows)\.(\w+)$", REFERENCE, re.M))
    assert shown == set(sf.__all__) - set(pattern_names)


def test_the_guide_has_every_built_in_chooser():
    told = re.findall(r"^\| `(\w+)(?:\(\d+\))?` \|", (DOCS / "guides" / "choosers.md").read_text(), re.M)
    assert set(told) >= {name for name in sf.list_choosers() if pattern_class(name).__module__ == "sparse_flash.choosers.built_in"}


def test_the_home_page_has_the_readmes_uses_with_their_figures():
    readme, home = ((DOCS / path).read_text() for path in ("../README.md", "index.md"))
    rows = re.findall(r"^\| \[.*$", readme.partition("## What it is not for")[0], re.M)
    assert len(rows) >= 10 and all(re.sub(r"\]\((docs/)?", lambda at: "](" if at[1] else "](../", row) in home for row in rows)


def test_the_page_of_patterns_leads_to_each_ones_file_where_no_site_is_built():
    links = re.findall(r"^- \[`(\w+)`\]\(\.\./(patterns/\w+\.py)\): \S", (DOCS / "patterns.md").read_text(), re.M)
    assert [name for name, _ in links] == pattern_names and all((DOCS.parent / path).is_file() for _, path in links)


def test_every_member_that_the_reference_lists_exists():
    listed = re.findall(r"^::: sparse_flash\.(\w+)\n    options:\n      members:\n((?: +- \w+\n)+)", REFERENCE, re.M)
    assert {"BlockMask", "BlockSelection"} <= {name for name, _ in listed}
    for name, members in listed:
        assert [m for m in re.findall(r"- (\w+)", members) if not hasattr(getattr(sf, name), m)] == []


def test_dir_shows_only_public_names():
    assert {name for name in dir(sf) if not name.startswith("__")} == {*sf.__all__, "integrations"}


def test_the_reference_has_every_public_function_of_the_integrations():
    for module in ("block_sparse_attn", "diffusers", "flash_attn"):
        tree = ast.parse((DOCS.parent / f"sparse_flash/integrations/{module}.py").read_text())
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")}
        assert names and all(re.search(rf"\b{name}\b", REFERENCE) for name in names)
