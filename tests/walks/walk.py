"""Walk through a page as its reader does: an empty environment, a copy of the repository, the page's blocks in order.

`python tests/walks/walk.py docs/quickstart-research.md` makes the environment by `python -m venv`, runs each `sh`,
`console` and `python` block as it stands, writes what has a title to the file of that name, too, and ends at the first
block that fails, with its line. `READERS` says what a reader brings along, and what is checked another way here.

`pip` gets one constraint that no page has: torch is the release of `constraints.txt`, since another one would bring
gigabytes of CUDA. The environment is deleted at the end: 1.5 GB with torch.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
LONGEST_S = 1500
READY_S = 300
"""A server that starts in an empty environment compiles the solver first."""

FENCE = re.compile(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
SERVES = re.compile(r"remat-service (serve|worker)\b")

PYTHON = """
import json, os, sys, traceback
names = {"__name__": "__main__"}
for line in sys.stdin:
    page, before, code, answer = json.loads(line)
    try:
        exec(compile("\\n" * before + code, page, "exec"), names)
        said = "passed"
    except BaseException:
        traceback.print_exc()
        said = "failed"
    with open(answer + ".part", "w") as file:
        file.write(said)
    os.rename(answer + ".part", answer)
"""
"""Runs one block after the other in one namespace; a traceback names the lines of the page."""


@dataclass(frozen=True)
class Reader:
    """Who walks: what stands on no page because the reader has it, and what cannot be run on this machine."""

    python: str = ""
    """Run before a process's first block: the model and the data that the page takes for given."""
    packages: tuple[str, ...] = ()
    """Installed before the page begins: what its reader comes from."""
    anew: tuple[str, ...] = ()
    """Beginnings of blocks for which the page says that they are of another process."""
    by_section: bool = False
    """Each section is a process of its own, which begins with the blocks before the first section."""
    replaced: Mapping[str, str] = field(default_factory=dict)
    """Text of commands, and what stands in its place: an address of the reader's own network."""
    elsewhere: Mapping[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    """Beginnings of commands that are not run: why, and the command that checks what can be checked here."""
    database: bool = False
    """A PostgreSQL server is there, at `postgresql://DATABASE/`."""


TRAINING = """
import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Sequential(
            torch.nn.Linear(64, 256), torch.nn.Tanh(), torch.nn.Linear(256, 64)) for _ in range(6)))

    def forward(self, batch):
        return self.layers(batch).square().mean()


model, loader = Model(), [torch.randn(512, 64) for _ in range(3)]
batch, optimizer = loader[0], torch.optim.SGD(model.parameters(), lr=0.1)
"""
"""What a training job has of its own: a model that returns its loss, batches, an optimizer."""

COMPOSE = (str(Path(sys.executable).with_name("check-jsonschema")), "--builtin-schema", "vendor.compose-spec")
READERS = {
    "README.md": Reader(
        elsewhere={
            "make demo": ("tests/benchmarks/test_demo.py runs it", ()),
            "make test": ("it is the suite test-quick", ()),
        }
    ),
    "docs/quickstart-training.md": Reader(
        python=TRAINING, anew=("import remat\n\nmodel = remat.optimize(model, batch, plan=",)
    ),
    "docs/quickstart-platform.md": Reader(
        database=True,
        replaced={"remat@db/": "DATABASE/"},
        elsewhere={
            "docker compose": ("it needs Docker; its file follows the schema", (*COMPOSE, "docker/compose.yaml")),
            "kubectl apply": ("it needs a cluster; tests/service/test_docker.py validates its manifests", ()),
        },
    ),
    "docs/quickstart-research.md": Reader(),
    "docs/migration.md": Reader(by_section=True, packages=("transformers",)),
}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, with the line where its code begins."""

    line: int
    language: str
    title: str | None
    code: str
    section: int


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page, in their order."""
    found = []
    for match in FENCE.finditer(text):
        before = text[: match.start(3)]
        found.append(Block(before.count("\n") + 1, match[1], match[2], match[3], before.count("\n## ")))
    return found


def commands(block: Block) -> Iterator[tuple[int, str, list[str]]]:
    """The commands of a block of a shell, each with its line and with what the page says that it prints."""
    said: list[str] = []
    at, command = block.line, ""
    for number, line in enumerate(block.code.splitlines(), block.line):
        if block.language == "console" and not line.startswith("$ "):
            said.append(line)
            continue
        if command and not command.endswith("\\"):
            yield at, command, said
            command, said = "", []
        at = at if command else number
        command = command.removesuffix("\\") + line.removeprefix("$ ")
    if command.strip():
        yield at, command, said


def shape(line: str) -> str:
    """A line without its numbers: times, and what is rounded, differ between machines."""
    return " ".join(re.sub(r"\d[\d.]*", "#", line).split())


class Failed(Exception):
    """A block of the page does not do what the page says."""


class Walk:
    """One reader on the way through one page, in a folder of his own."""

    def __init__(self, page: Path, reader: Reader, folder: Path, environment: Mapping[str, str]) -> None:
        self.page, self.reader, self.folder, self.environment = page, reader, folder, environment
        self.passed, self.elsewhere = 0, 0
        self._state, self._log = folder.parent / "state.sh", folder.parent / "log"
        self._state.touch()
        self._log.touch()
        self._python: subprocess.Popen[bytes] | None = None
        self._servers: dict[str, subprocess.Popen[bytes]] = {}
        self._section = 0

    def walk(self) -> None:
        """Go through all blocks.

        Raises:
            Failed: one does not do what the page says.
        """
        found = blocks(self.page.read_text())
        try:
            for block in found:
                if self.reader.by_section and block.section != self._section:
                    self._section = block.section
                    self._begin([head for head in found if head.section == 0 and head.language == "python"])
                self._block(block)
        finally:
            self.stop()

    def stop(self) -> None:
        """End what still runs."""
        for process in (*self._servers.values(), *filter(None, [self._python])):
            _end(process)

    def _block(self, block: Block) -> None:
        if block.title is not None:
            file = self.folder / block.title
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.code)
            self._tell(block.line, f"written to {block.title}")
        if block.language == "python":
            if self._python is None or block.code.startswith(self.reader.anew):
                self._begin([])
            begun = time.monotonic()
            self._exec(block)
            self._passed(block.line, "python", begun)
        elif block.language in ("sh", "console"):
            for line, command, said in commands(block):
                self._command(line, command, said)
        elif block.title is None:
            self._tell(block.line, f"{block.language or 'text'}: nothing to run")

    def _command(self, line: int, command: str, said: list[str]) -> None:
        for beginning, (why, check) in self.reader.elsewhere.items():
            if command.startswith(beginning):
                if check:
                    self._run(line, " ".join(check))
                self._tell(line, f"{beginning}: not run here: {why}")
                self.elsewhere += 1
                return
        begun, serves = time.monotonic(), SERVES.search(command)
        for text, instead in self.reader.replaced.items():
            command = command.replace(text, instead.replace("DATABASE", self.environment.get("DATABASE", "")))
        if serves:
            self._serve(line, command, serves[1])
        else:
            printed = self._run(line, command)
            lines = iter([shape(one) for one in printed.splitlines()])
            missing = [one for one in said if shape(one) and shape(one) not in lines]
            if missing:
                raise Failed(f"{self.page.name}:{line}: it does not print {missing[0]!r}, but:\n{printed}")
        self._passed(line, command, begun)

    def _run(self, line: int, command: str) -> str:
        """Run a command in a shell, after all that was exported before, and return what it prints."""
        script = f". {self._state}\nset -eo pipefail\n{command}\nexport -p > {self._state}\n"
        done = subprocess.run(
            ["bash", "-c", script], cwd=self.folder, env=self.environment, timeout=LONGEST_S, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        if done.returncode:
            raise Failed(f"{self.page.name}:{line}: {command}: ends with {done.returncode}:\n{done.stdout[-6000:]}")
        return done.stdout

    def _serve(self, line: int, command: str, kind: str) -> None:
        """Start a process that goes on running; a second server takes the place of the first, as in one terminal."""
        if kind in self._servers:
            _end(self._servers.pop(kind))
        begun = self._log.stat().st_size
        self._servers[kind] = process = self._start(f"exec env {command}", subprocess.DEVNULL)
        until = time.monotonic() + READY_S
        while "ready" not in self._since(begun):
            if process.poll() is not None or time.monotonic() > until:
                raise Failed(f"{self.page.name}:{line}: {command}: does not get ready:\n{self._since(begun)}")
            time.sleep(0.2)

    def _begin(self, head: list[Block]) -> None:
        """Start a Python of its own, with what the reader has and with the blocks of the head."""
        if self._python is not None:
            _end(self._python)
        self._python = self._start(f"exec python -u -c {shlex.quote(PYTHON)}", subprocess.PIPE)
        for block in (Block(1, "python", None, self.reader.python, 0), *head):
            self._exec(block)

    def _start(self, command: str, given: int) -> subprocess.Popen[bytes]:
        """Start a process after all that was exported before; what it prints goes to the log."""
        with self._log.open("ab") as log:
            return subprocess.Popen(
                ["bash", "-c", f". {self._state}\n{command}"], cwd=self.folder, env=self.environment, stdin=given,
                stdout=log, stderr=log,
            )  # fmt: skip

    def _exec(self, block: Block) -> None:
        """Have the Python of now run a block; it says at the end of each how that went, in a file."""
        begun, answer = self._log.stat().st_size, self._log.with_name("answer")
        answer.unlink(missing_ok=True)
        asked = [self.page.name, block.line - 1, block.code, str(answer)]
        self._python.stdin.write(json.dumps(asked).encode() + b"\n")
        self._python.stdin.flush()
        until = time.monotonic() + LONGEST_S
        while not answer.exists():
            if self._python.poll() is not None or time.monotonic() > until:
                raise Failed(f"{self.page.name}:{block.line}: Python ended:\n{self._since(begun)[-6000:]}")
            time.sleep(0.05)
        if answer.read_text() != "passed":
            raise Failed(f"{self.page.name}:{block.line}: the block fails:\n{self._since(begun)[-6000:]}")

    def _since(self, begun: int) -> str:
        return self._log.read_bytes()[begun:].decode(errors="replace")

    def _passed(self, line: int, what: str, begun: float) -> None:
        self.passed += 1
        self._tell(line, f"{what.strip()}: {time.monotonic() - begun:.0f} s")

    def _tell(self, line: int, what: str) -> None:
        print(f"{self.page.name}:{line} {what}", flush=True)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process, which may have ended by itself."""
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def copied(folder: Path) -> None:
    """Copy what git has of the repository, with changes that are not committed yet."""
    names = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, check=True,
        capture_output=True, text=True,
    ).stdout  # fmt: skip
    for name in filter(None, names.split("\0")):
        if (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)


def empty_environment(folder: Path) -> dict[str, str]:
    """Make an environment that has nothing but pip, with a home of its own; of the variables pip's are left."""
    subprocess.run([sys.executable, "-m", "venv", str(folder / "environment")], check=True)
    (folder / "home").mkdir()
    (pinned,) = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch==")]
    (folder / "constraints.txt").write_text(f"{pinned}\n")
    before = [path for path in os.environ["PATH"].split(":") if not Path(path).is_relative_to(ROOT)]
    return {
        **{name: value for name, value in os.environ.items() if not re.match("REMAT|PYTHON|VIRTUAL|PG", name)},
        "PATH": ":".join([str(folder / "environment" / "bin"), *before]),
        "HOME": str(folder / "home"),
        "PIP_CONSTRAINT": str(folder / "constraints.txt"),
        "PIP_NO_COMPILE": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


def main() -> int:
    """The exit status: 1 where the page does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", choices=sorted(READERS))
    page = parser.parse_args().page
    reader = READERS[page]
    with tempfile.TemporaryDirectory(prefix="remat-walk-") as name, ExitStack() as stack:
        clone = Path(name) / "remat"
        copied(clone)
        environment = empty_environment(Path(name))
        if reader.database:
            sys.path.insert(0, str(ROOT))
            from benchmarks.harness.postgres import PrivatePostgres

            server = stack.enter_context(PrivatePostgres())
            address = f"postgres@127.0.0.1:{server.port}"
            environment |= {"DATABASE": address, "PGHOST": "127.0.0.1", "PGPORT": str(server.port)}
            environment |= {"PGUSER": "postgres", "PATH": f"{environment['PATH']}:{server.bin}"}
        if reader.packages:
            subprocess.run(["pip", "install", "--quiet", *reader.packages], env=environment, check=True)
        walk = Walk(ROOT / page, reader, clone, environment)
        try:
            walk.walk()
        except Failed as failed:
            print(f"FAILED at {failed}")
            return 1
    print(f"{walk.passed} passed, {walk.elsewhere} checked elsewhere")
    return 0


if __name__ == "__main__":
    sys.exit(main())
