"""Documents and sections that comments name: every one of them is there."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from helpers import ROOT

FOLDERS = ("cpp", "cuda", "python", "tests", "tools")
C_LIKE = {".h", ".cpp", ".inc", ".cu", ".cuh"}
HASHED = {".sh", ".cmake"}  # and CMakeLists.txt
PATH = r"(?<![\w./{}$-])(?:[\w.-]+/)*[\w-]+\.md\b(?!/)"
NUMBER = r"\d+(?:\.\d+)*"
# `X.md 3`, `X.md 2, 3, 5`, `X.md 10 and 8`, `X.md 2 to 7`, `X.md, section 3`: each is a section.
CITED = re.compile(
    rf"(?P<path>{PATH})`?(?:,?\s+(?:sections?\s+)?"
    rf"(?P<sections>{NUMBER}(?:(?:,\s*|\s+(?:and|to)\s+){NUMBER})*)(?!\w|\.\d))?"
)
HEADING = re.compile(rf"^#{{1,6}}\s+({NUMBER})\.?(?:\s|$)", re.MULTILINE)
# Sections also begin as bold numbers, as `**7.5 Rewind.** ...` does.
BOLD = re.compile(rf"^\*\*({NUMBER})\.?\s", re.MULTILINE)


def c_comments(text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of comments; what stands in strings is none. Runs of // are one comment."""
    token = re.compile(
        r'R"(?P<d>[^()\s\\]{0,16})\(.*?\)(?P=d)"|"(?:\\.|[^"\\\n])*"|'
        r"(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'|"
        r"(?P<run>//[^\n]*(?:\n[ \t]*//[^\n]*)*)|(?P<block>/\*.*?\*/)",
        re.DOTALL,
    )
    for found in token.finditer(text):
        comment = found["run"] or found["block"]
        if comment:
            clean = re.sub(r"^[ \t]*(?://+|/?\*+/?)", "", comment, flags=re.MULTILINE)
            yield text.count("\n", 0, found.start()) + 1, clean


def hash_comments(text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of runs of lines that are comments, and of comments that end a line."""
    run: list[str] = []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if line.lstrip().startswith("#"):
            run.append(line.lstrip().lstrip("#"))
            continue
        if run:
            yield number - len(run), "\n".join(run)
            run = []
        if found := re.search(r"\s#\s(.*)", line):
            yield number, found[1]


def python_comments(text: str) -> Iterator[tuple[int, str]]:
    """(line, text) of comments and docstrings."""
    run: list[str] = []
    last = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        if run and token.start[0] != last + 1:
            yield last - len(run) + 1, "\n".join(run)
            run = []
        run.append(token.string.lstrip("#"))
        last = token.start[0]
    if run:
        yield last - len(run) + 1, "\n".join(run)
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            doc = ast.get_docstring(node, clean=False)
            if doc:
                yield node.body[0].lineno, doc


def comments(path: Path) -> Iterator[tuple[int, str]]:
    if path.suffix in C_LIKE:
        read = c_comments
    elif path.suffix in {".py", ".pyi"}:
        read = python_comments
    elif path.suffix in HASHED or path.name == "CMakeLists.txt":
        read = hash_comments
    else:
        return iter(())
    return read(path.read_text(encoding="utf-8"))


def citations(comment: str) -> list[tuple[str, list[str]]]:
    """(path, sections) in the order in which a comment names them."""
    found = []
    for match in CITED.finditer(comment):
        sections = re.findall(NUMBER, match["sections"] or "")
        found.append((match["path"], sections))
    return found


def document(name: str, beside: Path) -> Path | None:
    """Looked up from the repository's root, then from docs/, then beside the citing file."""
    for folder in (ROOT, ROOT / "docs", beside.parent):
        if (folder / name).is_file():
            return folder / name
    # A bare `model.md` or `numerics.md` is the specification.
    spec = ROOT / "docs" / "spec" / name
    return spec if "/" not in name and spec.is_file() else None


@cache
def sections_of(path: Path) -> frozenset[str]:
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.M | re.DOTALL)
    return frozenset(HEADING.findall(text)) | frozenset(BOLD.findall(text))


def sources() -> list[Path]:
    files = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))
    return sorted(p for p in files if p.is_file() and p != Path(__file__).resolve())


def cited() -> list[tuple[Path, int, str, list[str]]]:
    found = []
    for path in sources():
        for line, comment in comments(path):
            found += [(path, line, name, sections) for name, sections in citations(comment)]
    return found


@pytest.mark.parametrize(
    ("comment", "want"),
    [
        ("the layer graph (spec/model.md 2 to 7).", [("spec/model.md", ["2", "7"])]),
        (
            "spec/exl3.md 1.5, spec/model.md 6",
            [("spec/exl3.md", ["1.5"]), ("spec/model.md", ["6"])],
        ),
        ("(spec/exl3.md 2, 3, 5): the oracle", [("spec/exl3.md", ["2", "3", "5"])]),
        (
            "spec/model.md 10 and 8, spec/exl3.md 1.1: x",
            [("spec/model.md", ["10", "8"]), ("spec/exl3.md", ["1.1"])],
        ),
        ("`model.md` section 3", [("model.md", ["3"])]),
        ("`design.md`, section 1.", [("design.md", ["1"])]),
        ("(design.md\n 4). All of it", [("design.md", ["4"])]),
        ("numerics.md 3: tabulated in fp64", [("numerics.md", ["3"])]),
        ("spec/numerics.md for attention: one", [("spec/numerics.md", [])]),
        ("the table in cpp/README.md.", [("cpp/README.md", [])]),
        ("spec/exl3.md 1.7, 6), nothing", [("spec/exl3.md", ["1.7", "6"])]),
        ("$out/kernel_contracts.md", []),
    ],
)
def test_citations_are_read(comment: str, want: list[tuple[str, list[str]]]) -> None:
    assert citations(comment) == want


def test_strings_and_code_are_no_comments() -> None:
    text = 'f("x.md 1");  // a.md 2\n/* b.md\n * 3 */ char c = \'"\'; // d.md 4\n// e.md\n// 5\n'
    found = [c for _, comment in c_comments(text) for c in citations(comment)]
    assert found == [("a.md", ["2"]), ("b.md", ["3"]), ("d.md", ["4"]), ("e.md", ["5"])]
    text = 'def f():\n    """See a.md 1."""\n    return "b.md 2"  # c.md\n    # 3\n'
    found = [c for _, comment in python_comments(text) for c in citations(comment)]
    assert found == [("c.md", ["3"]), ("a.md", ["1"])]


def test_sections_are_read(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# T\n## 7\n### 7.5\n## 8. Title\n#### 9.1 More\n**6.4 Bold.** x\n```\n## 3\n```\n"
    )
    assert sections_of(page) == {"7", "7.5", "8", "9.1", "6.4"}


def test_cited_documents_are_there() -> None:
    all_cited = cited()
    assert len(all_cited) > 50
    missing = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path, line, name, _ in all_cited
        if document(name, path) is None
    ]
    assert not missing, "\n".join(missing)


def test_cited_sections_are_there() -> None:
    missing = [
        f"{path.relative_to(ROOT)}:{line}: {name} {section}"
        for path, line, name, sections in cited()
        for section in sections
        if (page := document(name, path)) is not None and section not in sections_of(page)
    ]
    assert not missing, "\n".join(missing)
