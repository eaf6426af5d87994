"""The walks themselves: every block is run or has its reason, and a block that fails is named by its line."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

import pytest

from walks.walk import READERS, ROOT, Failed, Reader, Walk, blocks, commands


def walked(folder: Path, text: str, reader: Reader | None = None) -> Walk:
    """The walk through a page, in this environment."""
    page, clone = folder / "page.md", folder / "clone"
    page.write_text(text)
    clone.mkdir()
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    walk = Walk(page, reader or Reader(), clone, environment)
    walk.walk()
    return walk


def test_the_nightly_suites_walk_through_every_page() -> None:
    suites = runpy.run_path(str(ROOT / ".ci" / "suites.py"))
    assert set(suites["WALKS"]) == set(READERS)
    assert {f"walk {Path(page).stem}" for page in READERS} <= {suite.name for suite in suites["NIGHTLY"]}


@pytest.mark.parametrize("page", READERS)
def test_what_a_reader_does_otherwise_is_still_on_the_page(page: str) -> None:
    reader, found = READERS[page], blocks((ROOT / page).read_text())
    named = [command for block in found if block.language in ("sh", "console") for _, command, _ in commands(block)]
    assert any(command.startswith("pip install '.[") for command in named)
    for beginning in reader.elsewhere:
        assert any(command.startswith(beginning) for command in named), beginning
    for text in reader.replaced:
        assert any(text in command for command in named), text
    for beginning in reader.anew:
        assert any(block.code.startswith(beginning) for block in found), beginning


def test_variables_files_and_names_go_on_from_block_to_block(tmp_path: Path) -> None:
    text = """# Page

```sh
export FIRST=1
export SECOND=$((FIRST + 1)) \\
  THIRD=3
```

```python title="other.py"
x = 2
```

```python
import os, other
assert os.environ["SECOND"] == str(other.x) and os.environ["THIRD"] == "3"
y = other.x
```

```python
assert y == 2
```

```console
$ echo "made in 12.5 s"
made in 3 s
```

```json
{}
```
"""
    walk = walked(tmp_path, text, Reader(elsewhere={"docker": ("there is none", ())}))
    assert (walk.passed, walk.elsewhere) == (6, 0)


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ("```sh\ntrue\nfalse\n```", "page.md:4: false: ends with 1"),
        ("```python\nx = 1\n\nx.nothing\n```", 'line 5, in <module>'),
        ("```console\n$ echo one\ntwo\n```", "page.md:3: it does not print 'two', but:\none"),
        ("```sh\necho remat-service serve\n```", "does not get ready"),
    ],
)  # fmt: skip
def test_what_does_not_hold_is_named_by_its_line(tmp_path: Path, block: str, said: str) -> None:
    with pytest.raises(Failed) as failed:
        walked(tmp_path, f"# Page\n{block}\n")
    assert said in str(failed.value)


def test_a_section_is_a_process_that_begins_with_the_head(tmp_path: Path) -> None:
    section = "```python\nassert x == 1\nx = 2\n```\n"
    text = f"# Page\n\n```python\nx = 1\n```\n\n## One\n\n{section}\n## Two\n\n{section}"
    assert walked(tmp_path, text, Reader(by_section=True)).passed == 3
