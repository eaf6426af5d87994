"""The documentation is short, and in plain sentences: what `CONTRIBUTING.md` says of style and a program can count."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
MOST_WORDS = 25
"""A sentence. A formula or a piece of code counts as one word, and each cell of a table is read by itself."""
MOST_OF_ALL = 44_000
"""Words of all pages together; a table that a command writes, or a test compares, stands between its two comments."""
MOST_PAGES = 34
FORBIDDEN = re.compile(r"\b(house|lanes?|crowd|strangers?|emptying|roomy|dearer)\b", re.IGNORECASE)


def prose(text: str) -> str:
    """What a page says in words: without code, comments, and tables that a command writes."""
    text = re.sub(r"^ *```.*?^ *```\s*$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!-- (\w+): begin -->.*?<!-- \1: end -->", "", text, flags=re.DOTALL)
    return re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)


def passages(text: str) -> list[str]:
    """Paragraphs, items of lists and cells of tables, each in one line and with code and links as words."""
    text = re.sub(r"`[^`]+`", "code", prose(text))
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    found: list[str] = []
    for block in re.split(r"\n\s*\n", text):
        lines = [line for line in block.split("\n") if not line.startswith(("#", ":::", "    "))]
        rows = [line for line in lines if line.startswith("|")]
        found += [part for row in rows for cell in row.split("|") for part in cell.split(";")]
        rest = "\n".join(line for line in lines if not line.startswith("|"))
        found += [" ".join(item.split()) for item in re.split(r"\n(?=\s*(?:[-*]|\d+\.) )", rest)]
    return found


def sentences(text: str) -> list[str]:
    """The sentences of a page; what follows a colon, or another bold beginning, is one of its own."""
    ends = r"(?:[.?!:]|∎)[*_)\"]*\s+"
    text_without = [re.sub(r"\b(e\.g|i\.e|et al|cf|vs)\.", r"\1", passage) for passage in passages(text)]
    return [sentence for passage in text_without for sentence in re.split(ends, passage) if sentence.strip()]


def words(sentence: str) -> int:
    """How many words a sentence has; numbers and formulas are none."""
    tokens = [token.strip('.,:;?!*_"“”()[]') for token in re.split(r"\s+|/", sentence)]
    return sum(bool(re.fullmatch(r"a|[A-Za-z][A-Za-z'’-]*[A-Za-z]", token)) for token in tokens)


def too_long(text: str) -> list[str]:
    """The sentences of a page that are too long, each with its words."""
    return [f"{words(each)} words: {each.strip()}" for each in sentences(text) if words(each) > MOST_WORDS]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_sentences_are_short(page: Path) -> None:
    found = too_long(page.read_text())
    assert not found, "\n".join(found)


def test_a_long_sentence_is_found() -> None:
    long = "This is " + "a very " * 12 + "long sentence."
    assert too_long(f"Short one. {long} Short one.\n\n```\n{long}\n```\n") == [f"28 words: {long[:-1]}"]
    assert too_long(f"| cell | {long} |\n- item\n- {long}\n") != []
    assert too_long("One: two is " + "`code` " * 20 + "R_{a,b} ≤ 3 x_1 " * 20) == []


def test_words_that_mean_something_else_are_not_used() -> None:
    found = {page.name: FORBIDDEN.findall(re.sub(r"`[^`]+`", "", prose(page.read_text()))) for page in PAGES}
    assert {name: words for name, words in found.items() if words} == {}


def test_messages_do_not_use_them_either() -> None:
    """What is written in quotes, but for docstrings, in all that ships."""
    found = []
    for path in sorted(path for part in ("solver", "service", "client") for path in (ROOT / part).rglob("*.py")):
        tree = ast.parse(path.read_text())
        told = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        quoted = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in told)
        found += [(path.name, node.lineno) for node in quoted if FORBIDDEN.search(str(node.value))]
    assert found == []


def test_the_documentation_is_short() -> None:
    """All pages together, without code and tables that a command writes."""
    counts = {page.name: len(prose(page.read_text()).split()) for page in PAGES}
    assert sum(counts.values()) <= MOST_OF_ALL, "\n".join(f"{count:6} {name}" for name, count in counts.items())


def test_the_pages_are_few_and_all_in_the_navigation() -> None:
    nav = re.findall(r"([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = [path.name for path in DOCS.glob("*.md")]
    assert len(pages) <= MOST_PAGES
    assert sorted(nav) == sorted(pages)
    groups = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    assert [name for group in groups for name in group][1:] == [
        *("Tutorials", "How-to guides", "Reference", "Explanation")
    ]
