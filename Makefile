# make demo | make test | make test-all | make docs | make setup: each works alone from a fresh clone.
# Needs python3 (3.10 to 3.13, with venv), make and g++. Paths are relative, so that a checkout in a
# folder with spaces in its name works.

PYTHON ?= python3
PY := .venv/bin/python
STAMP := .venv/.deuteron-setup
WORKERS ?= 2
# torch and others are stricter where CI is set; a run on one's own machine shall see what CI sees.
export CI ?= true

.PHONY: setup demo test test-all lint types docs clean
.DELETE_ON_ERROR:

setup: $(STAMP)

# Set up again only where what is installed changed. The source itself is an editable install.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 10) <= v <= (3, 13) \
	  else "Deuteron needs Python 3.10 to 3.13; this is %d.%d. Say which: make PYTHON=python3.12 ..." % v)'
	@command -v g++ >/dev/null || command -v c++ >/dev/null \
	  || echo "note: no C++ compiler found; CPU programs will run through ATen"
	test -x $(PY) || $(PYTHON) -m venv .venv || { rm -rf .venv; \
	  echo "python3 has no venv: install it (Debian: apt-get install python3-venv)"; exit 1; }
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

demo: $(STAMP)
	$(PY) -m deuteron.tools.cli demo

lint: $(STAMP)
	$(PY) -m ruff check .

types: $(STAMP)
	$(PY) -m mypy

test: lint types
	$(PY) -m pytest -q -n $(WORKERS) --dist loadgroup -m 'not slow'

test-all: lint types
	$(PY) -m pytest -q -n $(WORKERS) --dist loadgroup -o faulthandler_timeout=2400

# The documentation site, in build/site; it fetches nothing when it is read.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

clean:
	rm -rf .venv out build .pytest_cache .mypy_cache .ruff_cache .hypothesis
