# Each target does its own set-up: a fresh clone needs Python 3.11 or later, pip and make.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed
# of tests: three for two cores, since many wait for servers and processes
WORKERS ?= $(shell $(PYTHON) -c 'import os; print((os.cpu_count() or 1) * 3 // 2)')
QUICK = not slow and not thorough and not gpu and not standin

.DEFAULT_GOAL := help
.PHONY: help bench papers recipes soak test test-solver test-service test-client test-slow test-bounds test-torch test-quick test-thorough test-properties simulate test-standin test-gpu nightly walks docs release lint lint-tests lint-solver demo wheel lock sbom audit-dependencies clean

help:  ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

# of the 20,000 modules that are installed the tests import a quarter: Python compiles these where they are imported first
unexport PYTHONDONTWRITEBYTECODE

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --no-compile --disable-pip-version-check --quiet -c constraints.txt -e '.[dev]'
	touch $@

# one part alone: an environment of its own, with what that part needs
.venv-%/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/pip install --no-compile --disable-pip-version-check --quiet -c constraints.txt -e '.[dev-$*]'
	touch $@

demo: $(STAMP)  ## train two real models at half their activation memory, planned by the service
	$(BIN)/remat warm  # an answer that compiles meanwhile is no full effort, and is solved again when it is asked for
	$(BIN)/python -m benchmarks.demo

bench: $(STAMP)  ## RematBench: 24 graphs at three budgets, a table, a page and checked answers in rematbench-out/; goes on after a kill
	$(BIN)/python -m benchmarks.rematbench --bench --report rematbench-out --answers rematbench-out/release
	$(BIN)/python benchmarks/rematbench/check.py rematbench-out/release

MINUTES ?= inf

papers: $(STAMP)  ## the papers' tables and figures again, on two idle cores; stops and goes on: MINUTES=60 starts no more
	$(BIN)/remat warm
	$(BIN)/python -m benchmarks.figures.joins --out benchmarks/results/figures
	$(BIN)/python -m benchmarks.figures.memory > /dev/null
	$(BIN)/python -m benchmarks.figures all --minutes $(MINUTES) --since '$(SINCE)'

test: $(STAMP)  ## the checks and every test that is quick, side by side
	@$(MAKE) --no-print-directory -j 2 lint test-quick

test-quick: $(STAMP)
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m '$(QUICK)'

# a property draws all of its examples here, and a quarter of them in `make test`
test-thorough: $(STAMP)  ## the tests that a change must pass, too, and that take longer than one waits for
	REMAT_TEST_DEPTH=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal \
		-m '(thorough or hypothesis) and not slow and not gpu and not standin'

test-properties: $(STAMP)  ## every property with four times as many examples as a change must pass
	REMAT_TEST_DEPTH=4 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m 'hypothesis and not slow and not gpu and not standin'

test-solver: .venv-solver/.installed  ## the tests of remat_ir and remat_solver, or those of TESTS, in an environment without torch and web
	.venv-solver/bin/python -m pytest -q -n $(WORKERS) --dist worksteal -m '$(QUICK)' $(or $(TESTS),tests/ir tests/solver)

test-service: .venv-service/.installed  ## the tests of the service, in an environment without torch
	.venv-service/bin/python -m pytest -q -n $(WORKERS) --dist worksteal -m '$(QUICK)' $(or $(TESTS),tests/service)

test-client: $(STAMP)  ## the tests of the client
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal -m '$(QUICK)' $(or $(TESTS),tests/client)

test-slow: $(STAMP)  ## the tests that take longer
	$(BIN)/python -m pytest -q -m 'slow and not gpu and not standin'

recipes: .venv-recipes/.installed  ## trainers as people write them, by plans and by aot_eager, hours in all; goes on after a kill. ONLY="hf_trainer:callback"
	.venv-recipes/bin/python -m recipes $(ONLY)

soak: $(STAMP)  ## 3,000 steps of eight lengths: memory, file handles and plans stay as they are
	$(BIN)/python -m recipes.soak

test-torch:  ## what has to hold on every release: TORCH=2.15.0 or nightly, in an environment of its own
	$(PYTHON) tests/releases/lane.py $(TORCH)

test-bounds: .venv-solver/.installed  ## the kernels' tests with compiled code looking at every index, in a cache of its own
	NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=$(CURDIR)/.venv-solver/numba-bounds .venv-solver/bin/python -m remat_solver.warm
	NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=$(CURDIR)/.venv-solver/numba-bounds .venv-solver/bin/python -m pytest -q -n 2 \
		-m 'not slow' tests/solver/test_search.py tests/solver/test_tags.py tests/solver/test_blocks.py \
		tests/solver/test_rotor.py tests/solver/test_join.py tests/solver/test_offload.py

simulate: $(STAMP)  ## replay SEED of the simulated service, or a range FIRST:END
	PYTHONPATH=tests $(BIN)/python -m service.simulation $(SEED)

test-standin: $(STAMP)  ## what needs a CUDA device, on a stand-in for one that is built here: needs a C++20 compiler
	$(BIN)/python tests/standin/lane.py

test-gpu:  ## the acceptance test on a GPU, ten minutes: PYTHON has a CUDA build of torch and this package
	$(PYTHON) tests/gpu/run.py --report remat-gpu-report.json

nightly: $(STAMP)  ## all that takes longer, in pieces under an hour; goes on after a kill; writes benchmarks/results/nightly.md
	$(BIN)/python .ci/suites.py nightly

walks: $(STAMP)  ## the README and the guides, each from an empty environment, as their readers walk through them
	$(BIN)/python .ci/suites.py nightly --only 'walk '

docs: $(STAMP)  ## the documentation, without a broken link
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict --site-dir site

release: $(STAMP)  ## check that VERSION can be released, and tag it: pushing the tag publishes
	@test -n "$(VERSION)" || { echo "write make release VERSION=0.1.0"; exit 2; }
	@test -z "$$(git status --porcelain)" || { echo "files differ from the commit"; exit 1; }
	@grep -qx 'version = "$(VERSION)"' pyproject.toml || { echo "pyproject.toml has another version"; exit 1; }
	@grep -q '^## $(VERSION) ' CHANGELOG.md || { echo "CHANGELOG.md has no section ## $(VERSION) (date)"; exit 1; }
	.ci/run
	git tag --annotate v$(VERSION) --message "remat $(VERSION)"
	@echo "publish it by: git push origin v$(VERSION)"

lint: $(STAMP)  ## style, types, which package may import which, and the workflows
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(BIN)/zizmor --offline --quiet .github

lint-tests: $(STAMP)  ## names, calls and returns in tests and benchmarks, by types
	$(BIN)/mypy --config-file tests/mypy.ini tests benchmarks .ci/suites.py

lint-solver: .venv-solver/.installed  ## style and types of the solver and its tests, in the environment without torch
	.venv-solver/bin/ruff check .
	.venv-solver/bin/ruff format --check .
	.venv-solver/bin/mypy -p remat_ir -p remat_solver

wheel: $(STAMP)  ## build the wheel, install it into empty environments, import what each should hold
	PYTHON=$(PYTHON) BUILD=$(BIN)/python sh tests/repository/wheel.sh

# Versions that are there stay where they still fit: delete a line, or all, to get newer ones. torch is pinned by the
# extra `dev-torch`. The build's backend is no dependency of the package, and is named here.
LOCK = uv pip compile pyproject.toml - --universal --python-version 3.11 --no-annotate --quiet \
  --custom-compile-command 'make lock'

lock:  ## write the versions anew: constraints.txt, and docker/requirements.lock of it with hashes; needs uv
	echo hatchling | $(LOCK) --extra dev --extra dev-recipes -o constraints.txt
	echo hatchling | $(LOCK) --extra service --extra telemetry --extra oidc -c constraints.txt --generate-hashes \
	  -o docker/requirements.lock

sbom: $(STAMP)  ## a CycloneDX list of what docker/requirements.lock installs: remat.cdx.json
	$(BIN)/pip install --disable-pip-version-check --quiet 'cyclonedx-bom>=7'
	$(BIN)/cyclonedx-py requirements docker/requirements.lock --pyproject pyproject.toml --output-reproducible -o remat.cdx.json

audit-dependencies: $(STAMP)  ## known vulnerabilities of what docker/requirements.lock installs; needs the network
	$(BIN)/pip install --disable-pip-version-check --quiet 'pip-audit>=2.9'
	$(BIN)/pip-audit --require-hashes --disable-pip -r docker/requirements.lock

clean:  ## remove the environment and what tools left behind
	rm -rf $(VENV) .venv-* dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis demo-out
