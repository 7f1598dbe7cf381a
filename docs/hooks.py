"""MkDocs calls this while it builds the site: the order of pages, files outside docs/ that pages link to, and the
options of commands.

On GitHub a link from a page to ``../../benchmarks/results/x.json`` leads to the repository. The site has none beside
it, so each such file becomes a part of the site, below ``repository/``: data and pictures as they are, sources as a
page that shows them, a folder as a page that lists its files.

The line ``<!-- options of telegrad report -->`` becomes the command's usage and a table of its options, from the parser
itself. ``<!-- options of telegrad simulate training-step beside telegrad simulate allreduce -->`` leaves out those
that the second command has alike.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, InclusionLevel

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PARTS = {
    "tutorial": "Tutorial",
    "how-to": "How-to",
    "reference": "Reference",
    "explanation": "Explanation",
    "results": "Results",
}
SECTIONS = {"api": "Python API", "papers": "Papers"}
OPTIONS = re.compile(r"^<!-- options of telegrad ([a-z -]+?)(?: beside telegrad ([a-z -]+?))? -->$", re.MULTILINE)
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
_AS_THEY_ARE = {".csv", ".json", ".png", ".svg"}
_LANGUAGES = {".cpp": "cpp", ".hpp": "cpp", ".md": "markdown", ".py": "python", ".sbatch": "bash", ".yaml": "yaml"}


def on_files(files: Any, config: Any) -> Any:
    pages = [file for file in files.documentation_pages() if file.abs_src_path]
    config.nav = navigation({file.src_uri: Path(file.abs_src_path).read_text() for file in pages})
    linked = {path for file in pages for path in outside(file.src_uri, Path(file.abs_src_path).read_text())}
    folders = {path for path in linked if path.is_dir()}
    for path in sorted(linked | {one for folder in folders for one in folder.iterdir() if one.is_file()}):
        files.append(_published(path, config))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    return with_options(relinked(page.file.src_uri, markdown))


# Commands.


def with_options(markdown: str) -> str:
    """With the options of each command that the page asks for."""
    return OPTIONS.sub(lambda match: _options_of(match[1], match[2]), markdown)


def _options_of(name: str, other: str | None) -> str:
    command = command_of(name)
    others = command_of(other).params if other else []
    known = [_row(one) for one in others]
    rows = [row for one in command.params if (row := _row(one)) not in known]
    absent = [one for one in others if one.name not in {its.name for its in command.params}]
    usage = command.get_usage(command.make_context(f"telegrad {name}", [], resilient_parsing=True))
    lines = ["", "```text", usage.removeprefix("Usage: "), "```", ""]
    if absent:
        lines += [f"Without {', '.join(_names(one) for one in absent)}.", ""]
    if rows:
        lines += ["| option | default | meaning |", "|---|---|---|", *rows, ""]
    return "\n".join(lines)


def command_of(name: str) -> Any:
    """The parser of ``telegrad simulate allreduce``, without its first word."""
    import typer

    from telegrad.tools.cli import make_app

    found = typer.main.get_command(make_app())
    for word in name.split():
        found = found.commands[word]
    if found.context_settings.get("ignore_unknown_options"):
        raise RuntimeError(f"telegrad {name} cannot be imported here: call `make build` first")
    return found


def _names(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name}`"
    return " ".join(f"`{one}`" for one in (*parameter.opts, *parameter.secondary_opts))


def _row(parameter: Any) -> str:
    default = "required" if parameter.required else _default(parameter)
    text = re.sub(r"\[/?[a-z ]*\]", "", getattr(parameter, "help", None) or "")  # Rich's markup
    for character in "|<*":
        text = text.replace(character, f"&#{ord(character)};")
    return f"| {_names(parameter)} | {default} | {text} |"


def _default(parameter: Any) -> str:
    if parameter.default in (None, "", [], ()):
        return ""
    if isinstance(parameter.default, bool):
        return "yes" if parameter.default else "no"
    return f"`{parameter.default}`"


# Pages.


def navigation(pages: dict[str, str]) -> list[Any]:
    """The start page and the parts, each of which begins with its index."""
    found: list[Any] = [{"Start": "index.md"}]
    for folder, title in PARTS.items():
        names = [name for name in pages if name.startswith(f"{folder}/")]
        if names:
            found.append({title: _in_order(folder, names, pages)})
    return found


def _in_order(folder: str, names: list[str], pages: dict[str, str]) -> list[Any]:
    """The index, then pages in the order in which it links to them, then others by name; a folder's as one."""
    index = f"{folder}/index.md"
    order = [_inside(index, target) for _, target, _ in LINK.findall(pages.get(index, ""))]
    folders: dict[str, list[str]] = {}
    for name in names:
        inner = os.path.dirname(os.path.relpath(name, folder))
        if inner in SECTIONS:
            folders.setdefault(inner, []).append(name)
    inside = {name for group in folders.values() for name in group}

    def rank(name: str) -> tuple[bool, int, str]:
        return name != index, order.index(name) if name in order else len(order), name

    first = {min(group, key=rank): inner for inner, group in folders.items()}
    return [
        {SECTIONS[first[name]]: _in_order(f"{folder}/{first[name]}", folders[first[name]], pages)}
        if name in first
        else name
        for name in sorted(names, key=rank)
        if name in first or name not in inside
    ]


def outside(page: str, text: str) -> Iterator[Path]:
    """Files and folders of the repository, outside docs/, to which a page links."""
    for _, target, _ in LINK.findall(text):
        path = _linked(page, target)
        if path is not None:
            yield path


def relinked(page: str, text: str) -> str:
    """With links to the copies in the site instead."""

    def one(match: re.Match[str]) -> str:
        path = _linked(page, match[2])
        if path is None:
            return match[0]
        return f"{match[1]}{os.path.relpath(_place(path), os.path.dirname(page) or '.')}{match[3]}"

    return LINK.sub(one, text)


def _inside(page: str, target: str) -> str:
    return os.path.normpath(os.path.join(os.path.dirname(page), target))


def _linked(page: str, target: str) -> Path | None:
    if "://" in target or target.startswith("mailto:"):
        return None
    path = Path(os.path.normpath(DOCS / os.path.dirname(page) / target))
    is_outside = path.is_relative_to(ROOT) and not path.is_relative_to(DOCS)
    return path if is_outside and path.exists() else None


def _place(path: Path) -> str:
    name = f"repository/{path.relative_to(ROOT).as_posix()}"
    if path.is_dir():
        return f"{name}/index.md"
    return name if path.suffix in _AS_THEY_ARE else f"{name}.md"


def _published(path: Path, config: Any) -> File:
    place = _place(path)
    if path.suffix in _AS_THEY_ARE:
        return File.generated(config, place, abs_src_path=str(path), inclusion=InclusionLevel.NOT_IN_NAV)
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        inside = sorted(one for one in path.iterdir() if one.is_file())
        lines = [f"- [{one.name}]({os.path.relpath(_place(one), os.path.dirname(place))})" for one in inside]
        text = f"# {name}\n\n" + "\n".join(lines) + "\n"
    else:
        fence = "`" * 6
        text = f"# {name}\n\n{fence}{_LANGUAGES.get(path.suffix, 'text')}\n{path.read_text()}\n{fence}\n"
    return File.generated(config, place, content=text, inclusion=InclusionLevel.NOT_IN_NAV)
