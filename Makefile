# Every target makes its own environment when there is none. PYTHON and PEERS_PYTHON choose the interpreters.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$p" && break; done)
PEERS_PYTHON ?= $(shell for p in python3.12 "$$(pyenv root 2>/dev/null)"/versions/3.12.*/bin/python3.12; do "$$p" -c '' 2>/dev/null && echo "$$p" && break; done)
VENV := .venv
PEERS := .venv-peers
export OMP_NUM_THREADS ?= 2

.PHONY: demo test lint types imports peers records gpu clean

demo: $(VENV)/.installed  ## run the shipped policy end to end
	$(VENV)/bin/innerloop demo

test: $(VENV)/.installed lint types imports  ## lint, types, import direction, CPU tests
	$(VENV)/bin/pytest

lint: $(VENV)/.installed
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

types: $(VENV)/.installed
	$(VENV)/bin/mypy

imports: $(VENV)/.installed
	$(VENV)/bin/python scripts/check_imports.py

peers: $(PEERS)/.installed  ## live parity with LeRobot 0.6.1 (Python 3.12)
	$(PEERS)/bin/python -m pytest tests/peers

records: $(VENV)/.installed  ## measure what docs/performance.md still lacks, on all of this machine's GPUs
	$(VENV)/bin/python -m bench.every
	$(VENV)/bin/innerloop report bench/records --markdown docs/performance.md --html demo-output/performance.html

gpu: $(VENV)/.installed  ## GPU tests; they skip where there is no GPU
	$(VENV)/bin/pytest tests/gpu

$(VENV)/.installed: pyproject.toml
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer on the PATH: install one, or name it with make PYTHON=..."; exit 1; }
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VENV)/bin/python -m pip install --quiet --editable '.[dev,sim]'
	$(VENV)/bin/python -m pip install --quiet --no-deps openpi-client  # its pin of numpy below 2 is not needed
	touch $@

$(PEERS)/.installed: pyproject.toml
	@test -n "$(PEERS_PYTHON)" || { echo "no Python 3.12 on the PATH, which LeRobot 0.6.1 needs: install it, or name it with make PEERS_PYTHON=..."; exit 1; }
	test -x $(PEERS)/bin/python || $(PEERS_PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --upgrade pip
	$(PEERS)/bin/python -m pip install --quiet --editable '.[peers]'
	touch $@

clean:
	rm -rf $(VENV) $(PEERS) build dist demo-output
