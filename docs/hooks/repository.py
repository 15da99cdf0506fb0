"""Links from a page to files outside docs/, such as ../examples/decoding.py, which a forge follows by itself.

Each such file gets a place in the site under repository/: Markdown as a page, other source code as a page that shows it,
anything else (results, pictures, reports) as it is. The links then lead there, and MkDocs checks them like all others.
"""

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.structure.files import File, InclusionLevel

LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
CODE = {".py": "python", ".toml": "toml", ".yml": "yaml"}
# Pages of the navigation that are not in docs/.
PAGES = ("CONTRIBUTING.md", "CHANGELOG.md")


def on_files(files, config):
    docs = Path(config.docs_dir)
    root = docs.parent
    pages = [docs / file.src_uri for file in files.documentation_pages()] + [root / name for name in PAGES]
    targets = {target for page in pages for _, link, _ in LINK.findall(page.read_text()) if (target := _outside(page, link, docs))}
    for path in sorted(targets | {root / name for name in PAGES}):
        place = _place(path, docs)
        if path.suffix in CODE:
            code = f"---\nsearch:\n  exclude: true\n---\n\n# {path.name}\n\n```{CODE[path.suffix]}\n{path.read_text()}```\n"
            files.append(File.generated(config, place, content=code, inclusion=InclusionLevel.NOT_IN_NAV))
        else:
            named = path in {root / name for name in PAGES}
            level = InclusionLevel.INCLUDED if named else InclusionLevel.NOT_IN_NAV
            files.append(File.generated(config, place, abs_src_path=str(path), inclusion=level))
    return files


def on_page_markdown(markdown, page, config, files):
    if page.parent is None:  # a page of the top level would be alone in its navigation
        page.meta.setdefault("hide", []).append("navigation")
    docs = Path(config.docs_dir)
    place = PurePosixPath(page.file.src_uri)
    generated = place.parts[0] == "repository"
    source = docs.parent.joinpath(*place.parts[1:]) if generated else docs / place

    def rewritten(match):
        target = (source.parent / match[2]).resolve()
        if not (generated or _outside(source, match[2], docs)):
            return match[0]
        return match[1] + os.path.relpath(_place(target, docs), place.parent) + match[3]

    # Forges end a cell at any bar that is not escaped, MkDocs shows the escape of one within code.
    markdown = re.sub(r"(?m)^\|.*\|$", lambda row: re.sub(r"`[^`]*`", lambda code: code[0].replace(r"\|", "|"), row[0]), markdown)
    return LINK.sub(rewritten, markdown)


def _outside(page: Path, link: str, docs: Path) -> Path | None:
    """The file of the repository that a link of a page leads to, if it is there and not in docs/."""
    target = (page.parent / link).resolve()
    return target if target.is_file() and docs not in target.parents and docs.parent in target.parents else None


def _place(path: Path, docs: Path) -> str:
    """Returns the address that a file of the repository has in the site."""
    if docs in path.parents:
        return path.relative_to(docs).as_posix()
    return f"repository/{path.relative_to(docs.parent).as_posix()}" + ".md" * (path.suffix in CODE)
