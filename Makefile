# Everything a newcomer needs: `make demo`, `make test`. Each target sets up .venv first, once.

VENV := .venv
BIN  := $(VENV)/bin
PYTEST_ARGS ?=
SIM_ARGS ?= --count 10000
STAMP := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help venv demo test soak sim lint types bench docs format lock clean distclean

help: ## what there is to make
	@grep -E '^[a-z]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z]+):.*## (.*)/\1|\2/' | while IFS='|' read -r name what; do printf '  make %-10s %s\n' "$$name" "$$what"; done

venv: $(STAMP) ## set up .venv from the lock files

$(STAMP): .ci/setup pyproject.toml requirements-dev.lock requirements-embedded.lock
	@PYTHON="$(PYTHON)" .ci/setup $(VENV)
	@touch $@

demo: $(STAMP) ## the order flow, with a worker killed on the way, and a sealed order
	@$(BIN)/python -m examples.demo

test: $(STAMP) ## the whole suite, on real Kafka and real Redis, in two processes
	@$(BIN)/pytest -n 2 --dist loadfile $(PYTEST_ARGS)

soak: $(STAMP) ## the long tests
	@$(BIN)/pytest --soak -m soak -o faulthandler_timeout=0 $(PYTEST_ARGS)

sim: $(STAMP) ## the simulation, 10,000 seeds
	@$(BIN)/loom sim $(SIM_ARGS)

lint: $(STAMP) ## style, and which way imports run
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/lint-imports

types: $(STAMP) ## mypy --strict on the package and on its face as users see it
	@$(BIN)/mypy
	@$(BIN)/mypy tests/typing/api.py examples

bench: $(STAMP) ## the benchmarks of docs/benchmarks.md
	@$(BIN)/loom bench

docs: $(STAMP) ## links, and the commands that the documents show
	@$(BIN)/pytest -q tests/test_house.py tests/test_readme.py $(PYTEST_ARGS)

format: $(STAMP) ## let ruff format and fix
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

lock: ## pin anew what CI installs
	@test -x $(BIN)/uv || { echo "run make venv first" >&2; exit 2; }
	@$(BIN)/uv pip compile -q --universal --python-version 3.11 --no-annotate --no-emit-index-url --upgrade \
		--custom-compile-command "make lock" pyproject.toml --all-extras --group dev -o requirements-dev.lock
	@$(BIN)/uv pip compile -q --universal --python-version 3.11 --no-annotate --no-emit-index-url --upgrade \
		--custom-compile-command "make lock" --group embedded -o requirements-embedded.lock

clean: ## caches and build output; .venv stays
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -not -path './$(VENV)/*' -type d -prune -exec rm -rf {} +

distclean: clean ## also .venv
	@rm -rf $(VENV)
