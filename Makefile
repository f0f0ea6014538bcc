# Two commands: `make quickstart` and `make test`.  Everything is installed into .venv at the versions of constraints.txt.
#   PYTHON=python3.12                  another interpreter (3.11 or newer)
#   PIP_ARGS="--extra-index-url ..."   further options for pip, such as an index of CPU builds of torch (see README.md)
PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The .venv's own kernels and widgets win over those of the user's home folder.
export JUPYTER_PREFER_ENV_PATH := 1

.PHONY: help quickstart test lab bench setup fetch clean distclean

help:
	@echo "make quickstart  set up, then fine-tune a real model on four emulated devices; figures in figures/quickstart/"
	@echo "make test        set up, then ruff, mypy and all tests, the notebooks included"
	@echo "make lab         JupyterLab with the notebooks"
	@echo "make bench       the benchmarks"
	@echo "make clean       remove caches and figures; make distclean removes $(VENV) too"

quickstart: setup
	@$(BIN)/python -m workbench.cli.quickstart

# Groups of tests, long ones first; two run at a time, one for each core of a small machine.  The last is whatever no other names.
# Notebooks and browser stay together: both write the notebooks' output.
TEST_GROUPS := notebooks+tests/browser tests/runtime tests/methods tests/cli+tests/experiment tests/models \
	tests/planners+tests/schedules+tests/reproduce
REST := tests $(addprefix --ignore=,$(filter tests/%,$(subst +, ,$(TEST_GROUPS))))
NBVAL := --nbval-lax --nbval-current-env --nbval-cell-timeout=120 --nbval-sanitize-with tests/nbval_sanitize.cfg
PYTEST := WORKBENCH_TINY=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(NBVAL)

test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	@logs=$$(mktemp -d); export logs; trap 'rm -rf "$$logs"' EXIT; trap 'exit 130' INT TERM; \
	printf '%s\n' $(TEST_GROUPS) rest | xargs -P 2 -n 1 sh -c ' \
		group=$$1; case $$group in rest) set -- $(REST);; *) set -- $$(echo $$group | tr + " ");; esac; \
		echo "Running $$group"; log=$$(mktemp "$$logs/XXXXXX"); \
		$(PYTEST) "$$@" >"$$log" 2>&1; status=$$?; echo; echo "$$group:"; cat "$$log"; exit $$status' sh

lab: setup
	$(BIN)/jupyter lab notebooks

bench: setup
	$(BIN)/python -m workbench bench all

setup: $(STAMP) fetch

fetch: $(STAMP)
	@$(BIN)/python -m workbench fetch --quiet

# The stamp comes last: after a failure or Ctrl-C in the middle the next call installs again, and pip keeps what is already there.
$(STAMP): pyproject.toml constraints.txt
	@set -e; chosen=; \
	for candidate in "$(PYTHON)" python3.13 python3.12 python3.11; do \
		if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then chosen=$$candidate; break; fi; \
	done; \
	if [ -z "$$chosen" ]; then \
		echo "Python 3.11 or newer was asked for. '$(PYTHON)' is older or missing. Install it, or name one: make PYTHON=/path/to/python3" >&2; \
		exit 2; \
	fi; \
	echo "Setting up $(VENV) with $$chosen"; \
	if ! "$$chosen" -m venv $(VENV); then \
		echo "A virtual environment was asked for. '$$chosen' cannot make one. On Debian and Ubuntu: apt install python3-venv" >&2; \
		exit 2; \
	fi
	@echo "Installing the versions of constraints.txt; the first time takes some minutes"
	@PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --disable-pip-version-check --quiet $(PIP_ARGS) -e ".[test,quantization,pruning,executorch]"
	@# Without what it asks for: torchao changes how peft and transformers load.  Where there is no wheel, all but its programs works.
	@PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --only-binary executorch \
		$(PIP_ARGS) executorch || echo "ExecuTorch has no wheel for this machine; 'workbench export' and 'workbench train' are left out" >&2
	@touch $(STAMP)

clean:
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find figures -mindepth 1 -maxdepth 1 ! -name README.md -exec rm -rf {} +
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) *.egg-info
