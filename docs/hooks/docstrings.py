"""Docstrings as Markdown: what they say of each parameter or field becomes a list.

In this project's docstrings a sentence that starts with names of parameters and a colon is about those, as in
``q_len, kv_len: tokens``.
"""

import re

from griffe import Class, Extension, Function

NAMES = re.compile(r"(?:(?<=[.;)] )|(?<=\n)|^)((?:[a-z_]\w*, )*[a-z_]\w*): ", re.M)


class ParameterLists(Extension):
    def on_function_instance(self, *, func, **options):
        _rewrite(func)

    def on_class_members(self, *, cls, **options):
        _rewrite(cls)


def _rewrite(obj):
    if obj.docstring is not None:
        obj.docstring.value = as_markdown(obj.docstring.value, _names(obj))


def as_markdown(text: str, known: set[str]) -> str:
    """A docstring; known: the names of parameters and fields that it may describe."""
    return "\n\n".join(_listed(paragraph, known) for paragraph in re.sub(r"::$", ":", text, flags=re.M).split("\n\n"))


def _names(obj) -> set[str]:
    if isinstance(obj, Function):
        return {parameter.name for parameter in obj.parameters}
    init = obj.members.get("__init__")
    parameters = {parameter.name for parameter in init.parameters} if isinstance(init, Function) else set()
    return parameters | {name for name, member in obj.members.items() if not isinstance(member, (Class, Function))}


def _listed(paragraph: str, known: set[str]) -> str:
    if paragraph.startswith("    "):
        return paragraph  # code
    found = [match for match in NAMES.finditer(paragraph) if set(match[1].split(", ")) <= known]
    if not found:
        return paragraph
    bounds = [*(match.start() for match in found), len(paragraph)]
    names = (", ".join(f"`{name}`" for name in match[1].split(", ")) for match in found)
    items = [f"- {name}: {' '.join(paragraph[match.end() : stop].split())}" for name, match, stop in zip(names, found, bounds[1:])]
    return "\n\n".join(filter(None, [paragraph[: bounds[0]].strip(), "\n".join(items)]))
