"""`make test-torch TORCH=2.15.0`: an environment for that release of torch, and the tests of this folder in it.

TORCH=nightly takes the newest pre-release. The table of docs/faq.md is written with --record.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "faq.md"
NIGHTLY = ("--pre", "--index-url", "https://download.pytorch.org/whl/nightly/cpu")
TESTING = ("pytest", "pytest-timeout", "pytest-asyncio", "packaging")


class NotThere(Exception):
    """The package index has no such release."""


def made(release: str, folder: Path) -> Path:
    """The Python of an environment with the release, which is made where it is not there: a minute and 5 GB.

    A nightly one that is there gets the newest build.

    Raises:
        NotThere: the package index has no such release.
    """
    python = folder / "bin" / "python"
    stamp = folder / ".installed"
    if stamp.exists() and release != "nightly":
        return python
    pip = (str(python), "-m", "pip", "install", "--no-compile", "--disable-pip-version-check", "--quiet")
    subprocess.run((sys.executable, "-m", "venv", str(folder)), check=True)
    command = (*pip, "--upgrade", *NIGHTLY, "torch") if release == "nightly" else (*pip, f"torch=={release}")
    done = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)
    # without a network, too, pip finds no distribution: then it knows of no version at all
    others = "No matching distribution found for torch" in done.stderr and "(from versions: none)" not in done.stderr
    if done.returncode and others:
        raise NotThere(f"torch {release}: not run, since the package index of this machine does not have it")
    if done.returncode:
        sys.exit(done.stderr)
    pins = (str(python), "-m", "pip", "freeze", "--all", "--exclude-editable")
    freeze = subprocess.run(pins, check=True, capture_output=True, text=True)
    there = freeze.stdout.splitlines()  # the release asks for CUDA libraries of its own
    names = set(map(_package, there))
    there += [pin for pin in (ROOT / "constraints.txt").read_text().splitlines() if _package(pin) not in names]
    (folder / "constraints.txt").write_text("\n".join(there) + "\n")
    more = (*TESTING, "-e", f"{ROOT}[solver,torch]")
    subprocess.run((*pip, "-c", str(folder / "constraints.txt"), *more), check=True)
    stamp.touch()
    return python


def _package(pin: str) -> str:
    return re.sub(r"[-_.]+", "-", pin.partition("==")[0]).lower()


def version(python: Path) -> str:
    """The torch of an environment."""
    code = "import importlib.metadata as m; print(m.version('torch'))"
    return subprocess.run((str(python), "-c", code), check=True, capture_output=True, text=True).stdout.strip()


def record(row: str) -> None:
    """Put a row into the table, in place of the one of the same release."""
    before, rows, after = re.split(r"(?<=<!-- releases: begin -->\n)|(?=<!-- releases: end -->)", TABLE.read_text())
    head, lines = rows.strip().splitlines()[:2], rows.strip().splitlines()[2:]
    kept = sorted({line.split("|")[1]: line for line in (*lines, row)}.items(), key=lambda item: _order(item[0]))
    table = "\n".join((*head, *(line for _, line in kept)))
    TABLE.write_text(f"{before}\n{table}\n\n{after}")


def _order(name: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", name.partition("+")[0])]


def main() -> int:
    """The tests' exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("release", help="such as 2.15.0, or nightly")
    parser.add_argument("--environment", type=Path, help="where it is, or is made: .venv-torch-RELEASE")
    parser.add_argument("--if-there", action="store_true", help="a release that the index does not have is no failure")
    parser.add_argument("--record", action="store_true", help="write a row of docs/faq.md")
    asked = parser.parse_args()
    folder: Path = asked.environment or ROOT / f".venv-torch-{asked.release}"
    try:
        python = made(asked.release, folder)
    except NotThere as error:
        print(error)
        return 0 if asked.if_there else 1
    began = time.monotonic()
    code = subprocess.run((str(python), "-m", "pytest", "-q", "tests/releases"), cwd=ROOT, check=False).returncode
    seconds = round(time.monotonic() - began)
    there = version(python)
    print(f"torch {there}: {'passed' if code == 0 else 'failed'} in {seconds} s")
    if asked.record:
        minor = f"{sys.version_info.major}.{sys.version_info.minor}"
        result = "passed" if code == 0 else "failed"
        commit = subprocess.run(
            ("git", "rev-parse", "--short", "HEAD"), cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.strip()
        record(f"| {there.partition('+')[0]} | {minor} | {result} | {datetime.date.today()} | {commit} |")
    names = absent(python)
    print(f"private names that it does not have: {', '.join(names) or 'none'}")
    return code


def absent(python: Path) -> list[str]:
    """The private names of torch that the client uses in full and this release does not have."""
    code = "from repository.test_private_names import absent; print('\\n'.join(absent()))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "tests", ROOT / "client")))}
    done = subprocess.run((str(python), "-c", code), check=True, capture_output=True, text=True, env=environment)
    return done.stdout.split()


if __name__ == "__main__":
    sys.exit(main())
