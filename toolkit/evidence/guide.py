"""The documentation as pages that open offline: `docs/*.md`, and the API by pdoc, in `results/report/docs/`.

A link leads to another page, to a notebook's page of the report or to a module's page of the API. What has no page,
such as a notebook that has not run, stays text.
"""

import html
import re
import shutil
import warnings
from collections.abc import Collection
from pathlib import Path

import mistune

from toolkit import paths
from toolkit.evidence.catalogue import notebooks
from toolkit.evidence.page import render
from toolkit.files import make_folder, replacing_folder

API = "api"
INDEX = "index.html"
TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
BRIEF = re.compile(r"Understand | in ten minutes|, one meaning each| in detail| that are kept")  # not in the contents
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)  # addresses of cited numbers
THUMBNAIL = re.compile(r'<img src="([^"]+)" width="(\d+)" alt="([^"]*)">')
LINE_BREAK = "<br>"
PACKAGES = {"toolkit": "toolkit", "kernels": "toolkit.kernels"}  # folder of the checkout -> package


def write_guide(api: Collection[str] | None = None) -> Path:
    """Write all pages and return the first. `api` names the modules that get one, which is every module by default.

    Raises `UserError` without a checkout, which has the texts, and for trouble with the disk.
    """
    report, texts = make_folder(paths.results_dir() / "report"), pages()
    with replacing_folder(report / "docs") as folder:
        names = [*modules().values()] if api is None else [*api]
        if names:
            _write_api(names, folder / API)
        contents = [(name, BRIEF.sub("", title(text)).strip('"')) for text, name in texts.items()]
        entries = {
            f"{API}/{INDEX}": "API",
            f"{API}/toolkit/kernels.html": "Kernels",
        }  # of another folder: not in its list
        contents += [(page, words) for page, words in entries.items() if (folder / page).is_file()]
        contents += [(f"../{INDEX}", "Report")]
        for text, name in texts.items():
            body = _markdown(_Renderer(text, texts, folder, report), text.read_text(encoding="utf-8"))
            render("guide.html", folder / name, title=title(text), contents=contents, page=name, body=body)
    return report / "docs" / INDEX


def pages() -> dict[Path, str]:
    """The Markdown files, in the order in which a newcomer reads them, and the name of each one's page."""
    root = paths.checkout()
    first = [root / "docs" / f"{name}.md" for name in ("README", "endor", "flash", "spqr", "hermes", "corm", "citing")]
    others = [file for file in sorted((root / "docs").glob("*.md")) if file not in first]
    names = {file: INDEX if file.stem == "README" else f"{file.stem}.html" for file in [*first, *others]}
    return names | {root / "CONTRIBUTING.md": "contributing.html", root / "results/reference/README.md": "results.html"}


def title(text: Path) -> str:
    """The first heading of a Markdown file."""
    return TITLE.search(text.read_text(encoding="utf-8"))[1]


def anchor(heading: str) -> str:
    """The name of a heading in an address, as GitHub makes it."""
    words = re.sub(r"<[^>]+>", "", html.unescape(heading)).lower()
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


def modules() -> dict[str, str]:
    """Every module but the command lines: its file below the checkout, and its name."""
    root, found = paths.checkout(), {}
    for folder, package in PACKAGES.items():
        for file in sorted((root / folder).rglob("*.py")):
            if file.name != "__main__.py":
                parts = file.relative_to(root / folder).with_suffix("").parts
                name = ".".join([package, *(part for part in parts if part != "__init__")])
                found[file.relative_to(root).as_posix()] = name
    return found


def _write_api(names: Collection[str], folder: Path) -> None:
    import pdoc
    import pdoc.render

    pdoc.render.configure(
        docformat="google", show_source=False, template_directory=Path(__file__).with_name("templates") / API
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*has already been added")  # a package names its modules, too
        pdoc.pdoc(*names, output_directory=folder)


def _markdown(renderer: "_Renderer", text: str) -> str:
    return str(mistune.create_markdown(renderer=renderer, plugins=["table"])(COMMENT.sub("", text)))


class _Renderer(mistune.HTMLRenderer):
    """Makes the HTML of one Markdown file; its pictures are copied beside the page."""

    def __init__(self, file: Path, texts: dict[Path, str], folder: Path, report: Path):
        super().__init__(escape=True)
        self.file, self.texts, self.folder, self.report = file, texts, folder, report
        self.modules = modules()
        self.notebooks = {each.path: each.id for each in notebooks().values()}

    def heading(self, text: str, level: int, **attributes: object) -> str:
        return f'<h{level} id="{anchor(text)}">{text}</h{level}>\n'

    def link(self, text: str, url: str, title: str | None = None) -> str:
        address = self._address(url)
        return super().link(text, address, title) if address else text

    def codespan(self, text: str) -> str:
        """Code; the name of a module or a notebook leads to its page."""
        code = super().codespan(text)
        folder = f"{text.rstrip('/')}/__init__.py"
        names = (text, f"toolkit/{text}", folder, f"toolkit/{folder}")
        found = (self._module(name) for name in names if "/" in text)  # `evidence` is a column, no package
        page = next(filter(None, found), None) or self._notebook(text)
        return f'<a href="{page}">{code}</a>' if page else code

    def image(self, text: str, url: str, title: str | None = None) -> str:
        return super().image(text, self._copied(url), title)

    def inline_html(self, text: str) -> str:
        """Thumbnails and line breaks as they are; all other HTML as text."""
        if thumbnail := THUMBNAIL.fullmatch(text):
            source, width, alt = thumbnail.groups()
            return f'<img src="{self._copied(source)}" width="{width}" alt="{alt}">'
        return text if text == LINE_BREAK else super().inline_html(text)

    def _copied(self, url: str) -> str:
        """The address of a picture's copy beside the page."""
        source = (self.file.parent / url).resolve()
        name = "-".join(source.relative_to(paths.checkout()).parts)
        shutil.copyfile(source, make_folder(self.folder / "pictures") / name)
        return f"pictures/{name}"

    def block_code(self, code: str, info: str | None = None) -> str:
        from pygments import highlight
        from pygments.formatters import HtmlFormatter
        from pygments.lexers import get_lexer_by_name

        lexer = {"python": "pycon" if code.startswith(">>>") else "python"}.get(info or "", "text")
        return highlight(code, get_lexer_by_name(lexer), HtmlFormatter())

    def _address(self, url: str) -> str | None:
        place, _, where = url.partition("#")
        if not place or re.match(r"\w+:", url):
            return url
        target = (self.file.parent / place).resolve()
        if target in self.texts:
            return self.texts[target] + (f"#{where}" if where else "")
        if target in self.notebooks:
            return self._notebook(self.notebooks[target])
        root = paths.checkout()
        return self._module(target.relative_to(root).as_posix()) if target.is_relative_to(root) else None

    def _module(self, file: str) -> str | None:
        name = self.modules.get(file)
        page = f"{API}/{name.replace('.', '/')}.html" if name else ""
        return page if page and (self.folder / page).is_file() else None

    def _notebook(self, id: str) -> str | None:
        page = f"{id.replace('/', '-')}.html"
        return f"../{page}" if id in self.notebooks.values() and (self.report / page).is_file() else None
