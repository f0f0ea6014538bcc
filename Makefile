# Two commands: `make quickstart` and `make test`.  Everything is installed into .venv at the versions of constraints.txt.
#   PYTHON=python3.12                  another interpreter (3.11 or newer)
#   TORCH=cpu|auto|default             torch's build for CPUs, for this machine's GPU, or whatever the package index has.  Without it, x86-64
#                                      Linux takes cpu, unless pip or uv is set up for an index of its own: the default index serves GPU builds
#   PIP_ARGS="--extra-index-url ..."   further options for uv and pip, such as an index of your own
PYTHON ?= python3
PIP_ARGS ?=
TORCH ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := all,docs,executorch,test,trackers
EXECUTORCH := executorch; sys_platform != 'linux' or platform_machine != 'aarch64'
# uv installs several times faster than pip, but does not read pip's settings, so those are passed on.
SETTINGS := export PIP_CONSTRAINT=constraints.txt UV_CONSTRAINT=constraints.txt UV_BUILD_CONSTRAINT=constraints.txt; \
	setting() { "$(BIN)/python" -m pip config get "global.$$1" 2>/dev/null || true; }; \
	export UV_INDEX_STRATEGY=unsafe-best-match UV_DEFAULT_INDEX="$${UV_DEFAULT_INDEX:-$${PIP_INDEX_URL:-$$(setting index-url)}}"; \
	export UV_INDEX="$${UV_INDEX:-$${PIP_EXTRA_INDEX_URL:-$$(setting extra-index-url)}}"; \
	export UV_FIND_LINKS="$${UV_FIND_LINKS:-$${PIP_FIND_LINKS:-$$(setting find-links)}}"; \
	export SSL_CERT_FILE="$${SSL_CERT_FILE:-$${PIP_CERT:-$$(setting cert)}}"; \
	for name in UV_DEFAULT_INDEX UV_INDEX UV_FIND_LINKS SSL_CERT_FILE; do eval "[ -n \"\$$$$name\" ]" || unset $$name; done
# Whether pip or uv is set up to take packages from elsewhere than the default index.
HAS_OWN_INDEX = { [ -n "$${UV_DEFAULT_INDEX:-}$${UV_INDEX:-}$${UV_INDEX_URL:-}$${UV_EXTRA_INDEX_URL:-}$${UV_FIND_LINKS:-}" ] \
	|| [ -n "$${UV_TORCH_BACKEND:-}$${UV_NO_INDEX:-}$${PIP_NO_INDEX:-}$$(setting no-index)" ] \
	|| case " $(PIP_ARGS)" in *" -i"*|*" -f"*|*index*|*" --find-links"*) true;; *) false;; esac \
	|| grep -qsE '^ *(\[\[(pip\.)?index\]\]|(extra-)?index-url|index *=|find-links|no-index|torch-backend)' \
		$${UV_CONFIG_FILE:-/etc/uv/uv.toml /etc/xdg/uv/uv.toml $${XDG_CONFIG_HOME:-$$HOME/.config}/uv/uv.toml}; }
# The .venv's own kernels and widgets win over those of the user's home folder.
export JUPYTER_PREFER_ENV_PATH := 1
# uv does not compile what it installs.  Where this is set, as in many containers, each process would compile torch again: 6 s for 3 s.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help quickstart test check-aarch64 lab labs docs pictures bench setup lock fetch clean distclean

help:
	@echo "make quickstart  set up, then fine-tune a real model on four emulated devices; figures in figures/quickstart/"
	@echo "make test        set up, then ruff, mypy and all tests, the notebooks included"
	@echo "make check-aarch64  a small trial on an emulated Raspberry Pi 4; needs qemu-user and mmdebstrap"
	@echo "make lab         JupyterLab with the labs, at their index"
	@echo "make labs        write the students' notebooks from labs/, whose cells hold the solutions"
	@echo "make docs        the site of docs/ in build/site, with the labs and their outputs; LABS=real executes them at their real size"
	@echo "make pictures    draw the schematics in docs/pictures/"
	@echo "make bench       the benchmarks"
	@echo "make clean       remove caches and figures; make distclean removes $(VENV) too"

quickstart: setup
	@$(BIN)/python -m workbench.cli.quickstart

# Groups of tests, long ones first, so that short ones fill what is left of the last minutes.  The first two often wait for emulated devices,
# so three run side by side on the two cores of a small machine; with four, steps of emulated devices come so late that tests of lost devices
# fail.  "rest" is whatever no other names.  Each group imports torch again, so there are few.
TEST_GROUPS := tests/browser+tests/runtime tests/cli+tests/experiment rest \
	tests/models+tests/planners+tests/schedules+tests/studies/papers tests/methods tests/labs mypy
REST := tests $(addprefix --ignore=,$(filter tests/%,$(subst +, ,$(TEST_GROUPS))))
# One notebook runs in a kernel of its own under nbval; a browser or one process runs the others.
NBVAL := --nbval-lax --nbval-current-env --nbval-cell-timeout=120 notebooks/02_write_the_simulator.ipynb
PYTEST := env WORKBENCH_TINY=1 WORKBENCH_DILATION=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest

# REPEAT=yes: tests that fail run once more, alone; if they pass, they are named at the end, and the run counts as passed.
test: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@logs=$$(mktemp -d); export logs only=; trap 'rm -rf "$$logs"' EXIT; trap 'exit 130' INT TERM; \
	run_groups() { xargs -P "$$1" -n 1 sh -c ' \
		group=$$1; cache="-o cache_dir=$$logs/$$(echo $$group | tr / -)"; case $$group in \
			mypy) set -- $(BIN)/mypy;; rest) set -- $(PYTEST) $$cache $$only $(NBVAL) $(REST);; \
			*) set -- $(PYTEST) -p no:nbval $$cache $$only $$(echo $$group | tr + " ");; \
		esac; \
		echo "Running $$group $$only"; log=$$(mktemp "$$logs/log.XXXXXX"); \
		"$$@" >"$$log" 2>&1; status=$$?; echo; echo "$$group:"; cat "$$log"; \
		[ $$status = 0 ] || echo "$$group" >>"$$logs/failed"; exit $$status' sh; }; \
	printf '%s\n' $(TEST_GROUPS) | run_groups 3 || { \
		[ "$(REPEAT)" = yes ] && ! grep -qx mypy "$$logs/failed" || exit 1; \
		mv "$$logs/failed" "$$logs/again"; grep -hE "^(FAILED|ERROR) " "$$logs"/log.* >"$$logs/unstable"; \
		only="--last-failed --last-failed-no-failures=none"; \
		run_groups 1 <"$$logs/again" || exit 1; \
		echo; echo "Unstable: failed at first, passed alone.  Each is a defect, of the test or of what it tests:"; \
		cut -c 1-300 "$$logs/unstable"; }

# On an emulated Raspberry Pi 4; see .ci/check-aarch64.
check-aarch64: $(STAMP)
	.ci/check-aarch64

# The students' notebooks, from their sources with solutions.
labs: $(STAMP)
	$(BIN)/python -m workbench_labs.course.release

# The schematics in docs/pictures.
pictures: $(STAMP)
	$(BIN)/python -m workbench_labs.pictures

lab: setup
	$(BIN)/jupyter lab --LabApp.default_url=/lab/tree/notebooks/index.ipynb

# Labs are executed once for each of their texts, LABS=tiny at the smallest settings, LABS=real at their own; LABS=none leaves them as they
# are.  Links and names that lead nowhere are errors.
LABS ?= tiny
docs: setup
	@[ "$(LABS)" = none ] || LABS=$(LABS) $(BIN)/python docs/generate/labs.py
	$(BIN)/sphinx-build --quiet --fresh-env --fail-on-warning --keep-going --conf-dir docs . build/site
	@echo "The site: build/site/index.html"

bench: setup
	$(BIN)/python -m workbench bench all

setup: $(STAMP) fetch

fetch: $(STAMP)
	@$(BIN)/python -m workbench fetch --quiet

# The stamp comes last: after a failure or Ctrl-C in the middle the next call installs again, and pip keeps what is already there.
$(STAMP): pyproject.toml workbench_studies/pyproject.toml constraints.txt
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
	@$(SETTINGS); set -e; \
	torch="$(TORCH)"; \
	case "$$torch" in \
		cpu|auto|default) ;; \
		'') torch=default; $(HAS_OWN_INDEX) || [ "$$(uname -sm)" != "Linux x86_64" ] || torch=cpu;; \
		*) echo "TORCH=$$torch was asked for. There is cpu, auto and default" >&2; exit 2;; \
	esac; \
	uv() { "$(BIN)/uv" pip install --quiet --python $(BIN)/python "$$@"; }; \
	pip() { "$(BIN)/python" -m pip install --disable-pip-version-check --quiet "$$@"; }; \
	all() { "$$@" $(PIP_ARGS) -e ".[$(EXTRAS)]" -e ./workbench_studies; }; \
	if pip --only-binary uv $(PIP_ARGS) uv 2>/dev/null; then install=uv; else install=pip; fi; \
	if [ $$torch = default ] || [ $$install = pip ] || ! all uv --torch-backend=$$torch; then \
		[ $$torch = default ] || echo "The index of torch's CPU builds could not be used. From the default index come" \
			"builds for GPUs, on Linux several GB" >&2; \
		if [ $$install = pip ] || ! all uv; then \
			echo "Installing with pip, which takes longer: uv has no wheel for this machine or could not install" >&2; \
			install=pip; all pip; \
		fi; \
	fi; \
	$$install --no-deps --only-binary executorch $(PIP_ARGS) "$(EXECUTORCH)" && $(BIN)/python -c 'import executorch' 2>/dev/null \
		|| echo "ExecuTorch has no wheel for this machine's torch; 'workbench export' and 'workbench train' are left out" >&2
	@# executorch without what it asks for: torchao changes how peft and transformers load.
	@touch $(STAMP)

# Pins for Python 3.11.0 and later, on Linux and macOS, x86-64 and aarch64.  What still fits stays; LOCK_ARGS=--upgrade takes newer versions.
# HASHES has every wheel's digest, constraints.txt the versions alone: pip allows no hashes beside an editable package.
# The libraries of torch's GPU builds are left out: torch itself pins them.  Digests of its CPU builds are added from where PIP_ARGS finds them.
HASHES := data/hashes.txt
lock: $(STAMP)
	@$(SETTINGS); unset UV_CONSTRAINT UV_BUILD_CONSTRAINT; set -e; \
	compile() { $(BIN)/uv pip compile --quiet --generate-hashes --no-annotate --no-header --no-emit-index-url "$$@"; }; \
	folder="$${UV_FIND_LINKS:-/nowhere}"; more="$$UV_INDEX"; unset UV_FIND_LINKS UV_INDEX; cp constraints.txt $(HASHES); \
	printf '%s\n' "$(EXECUTORCH)" uv \
		| compile --universal --python-version 3.11.0 --all-extras $(LOCK_ARGS) --output-file $(HASHES) pyproject.toml -; \
	for torch in $$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' $(HASHES)); do \
		{ echo "$$torch+cpu" | UV_INDEX="$$more" compile --no-deps $(PIP_ARGS) - || true; \
			sha256sum "$$folder/$$(echo $$torch | sed 's/==/-/')"+cpu-*.whl | sed 's/^/--hash=sha256:/'; } 2>/dev/null \
			| sed -n 's/^ *\(--hash=sha256:[0-9a-f]*\).*/    \1 \\/p' | sort -u >$(HASHES).cpu; \
		sed --in-place "/^$$torch /r $(HASHES).cpu" $(HASHES); \
	done; \
	sed --regexp-extended --in-place '/^(nvidia|cuda|triton)\b/,/[^\\]$$/d' $(HASHES); \
	sed --in-place '1i # Digests of every version in constraints.txt.  Refresh: make lock' $(HASHES); rm $(HASHES).cpu; \
	{ echo '# Every version that the Makefile installs.  Refresh: make lock'; sed -n 's/ \\$$//; /^[a-z]/p' $(HASHES); } >constraints.txt

clean:
	rm -rf .mypy_cache .pytest_cache .ruff_cache .hypothesis build dist
	find figures -mindepth 1 -maxdepth 1 ! -name README.md -exec rm -rf {} +
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) *.egg-info
